"""``BucketDDP`` against torch's ``DistributedDataParallel``, and against one process on the full batch."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.grads.support import TINY, RunRanks, case, on_ranks
from tests.inside import views_of
from tests.models import MODELS, batch, build, loss_of
from tests.reference import largest_difference_between_ranks

STEPS = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}
SETTINGS = [(1, True, "sgd"), (1, False, "adamw"), (3, True, "adamw"), (3, False, "sgd")]
"""Local passes and the reduced one, whether gradients are cleared to None, optimizer: every pair of values."""


def train(wrapped: nn.Module, optimizer: str, accumulate: int, set_to_none: bool) -> list[dict[str, Tensor]]:
    """Train a few steps; return each step's gradients as the optimizer saw them."""
    steps = OPTIMIZERS[optimizer](wrapped.parameters())
    seen = []
    for step in range(STEPS):
        steps.zero_grad(set_to_none=set_to_none)
        for micro in range(accumulate):
            with nullcontext() if micro == accumulate - 1 else wrapped.no_sync():
                inputs, target = batch(step * accumulate + micro, dist.get_rank())
                (loss_of(wrapped(inputs), target) / accumulate).backward()
        seen.append({n: p.grad.clone() for n, p in wrapped.module.named_parameters() if p.grad is not None})
        steps.step()
    return seen


def assert_close(name: str, found: Tensor, expected: Tensor, exact: bool) -> None:
    tolerance = {} if exact else {"rtol": 2**-7, "atol": 2**-7 * expected.abs().max().item()}
    torch.testing.assert_close(found, expected, msg=lambda message: f"{name}: {message}", **tolerance)


def compare_with_torch_ddp(model: str, accumulate: int, set_to_none: bool, optimizer: str, **options: Any) -> None:
    module = build(model)
    reference = DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=True)
    expected = train(reference, optimizer, accumulate, set_to_none)
    strides = {name: param.stride() for name, param in module.named_parameters()}
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    found = train(ours, optimizer, accumulate, set_to_none)

    # torch divides by the world size before it sums: in bf16 and with 3 ranks, that rounds otherwise, and what
    # differs in the first step grows; fp32, and division by 2, leave only the order of summation.
    exact = not (model == "mixed_dtypes" and dist.get_world_size() == 3)
    for step in range(STEPS if exact else 1):
        assert found[step].keys() == expected[step].keys()
        for name, grad in found[step].items():
            assert_close(f"gradient of {name}", grad, expected[step][name], exact)
    for (name, param), other in zip(module.named_parameters(), reference.module.parameters(), strict=True):
        if exact:
            assert_close(name, param, other, exact)
        if not options:
            assert param.grad is views_of(ours)[name]
            assert param.grad.stride() == strides[name]
    assert ours.passes == STEPS
    assert options or len(ours.layout.buckets) > 1
    ours.synchronise_module_buffers()
    assert largest_difference_between_ranks(module) == 0
    ours.close()


def with_settings(model: str, settings: list[tuple[int, bool, str]], options: dict[str, Any]) -> None:
    for setting in settings:
        with case(model, *setting):
            compare_with_torch_ddp(model, *setting, **options)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_weights_are_those_of_torch_ddp(run_ranks: RunRanks, world_size: int, model: str) -> None:
    run_ranks(world_size, with_settings, model, SETTINGS[:2] if world_size == 3 else SETTINGS[2:], {})


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"use_contiguous_buffers": False},
        {"find_unused_parameters": True},
        {"pad_buckets_to": 100, "max_abs_grad": 1e9},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_do_not_change_gradients(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(2, with_settings, "mixed_dtypes", SETTINGS[2:], options)


@on_ranks(3)
def test_training_is_that_of_one_process() -> None:
    module = build("mlp")
    alone = copy.deepcopy(module)
    ours = BucketDDP(module)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (module, alone)]
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs, target = batch(step, dist.get_rank())
        loss_of(ours(inputs), target).backward()
        inputs, target = (
            torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(dist.get_world_size())), strict=True)
        )
        loss_of(alone(inputs), target).backward()
        for optimizer in optimizers:
            optimizer.step()
    for param, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5)
    assert largest_difference_between_ranks(module) == 0
    ours.close()
