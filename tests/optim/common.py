"""What tests of optimizers share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves_with_path

from tests.reference import mean_grads

TINY = 0.0004  # MiB: several buckets

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "rmsprop": partial(optim.RMSprop, lr=0.005, momentum=0.9, centered=True),
    "adamw": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "adam_amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "sgd": partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adamax": partial(optim.Adamax, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01),
}
"""Element-wise ones, which may be sharded."""


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    params = [param for name, param in module.named_parameters() if name != "later"]
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003, "weight_decay": 0.0}]


def average(plain: nn.Module) -> None:
    expected = mean_grads(plain)
    for name, param in plain.named_parameters():
        param.grad = expected[name]


def stepped(*optimizers: Optimizer, **options: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(**options)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def assert_equal(mine: Any, theirs: Any, where: str = "") -> None:
    found, expected = (dict(tree_leaves_with_path(tree)) for tree in (mine, theirs))
    assert found.keys() == expected.keys(), where
    for path, leaf in expected.items():
        same = found[path].dtype is leaf.dtype and torch.equal(found[path], leaf) if isinstance(leaf, Tensor) else None
        assert found[path] == leaf if same is None else same, f"{where}{path}: {found[path]} {leaf}"


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], what: str = "", tolerance: float = 1e-5) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        most = max(tolerance, 1e-2) if value.dtype is torch.bfloat16 else tolerance
        torch.testing.assert_close(value, theirs[name], rtol=most, atol=most, msg=lambda m, n=name: f"{what} {n}: {m}")
