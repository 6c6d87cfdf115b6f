"""Optimizers of other packages with ``shard_optimizer``: which are known, which are refused and why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_bucketddp import BucketDDP, declare_element_wise
from lightning_bucketddp.optim.element_wise import _KNOWN, require_element_wise
from tests.models import Mlp, batch
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


class SignOfMomentum(Optimizer):
    """Element-wise, with state of its own making; stands in for other packages' optimizers."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    param.add_(mean.lerp_(param.grad, 0.1).sign(), alpha=-group["lr"])


def called(name: str) -> type[Optimizer]:
    """A stand-in whose class has the qualified name of another package's."""
    module, kind = name.rsplit(".", 1)
    return type(kind, (SignOfMomentum,), {"__module__": module, "__qualname__": kind})


def trained(shard: bool, name: str) -> nn.Module:
    torch.manual_seed(3)
    model = BucketDDP(Mlp(), shard_optimizer=shard)
    optimizer = called(name)(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        inputs, target = batch(step, model.rank)
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    if shard:
        held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        assert 0 < held < sum(param.numel() for param in model.parameters())
    assert largest_difference_between_ranks(model) == 0
    model.close()
    return model


def known() -> None:
    name = "lion_pytorch.lion_pytorch.Lion"
    torch.testing.assert_close(trained(True, name).state_dict(), trained(False, name).state_dict())
    for name in _KNOWN:
        require_element_wise(called(name)([nn.Parameter(torch.ones(1))]))


def test_known_optimizers_of_other_packages_are_sharded(run_ranks: RunRanks) -> None:
    assert {"lion_pytorch.lion_pytorch.Lion", "timm.optim.adopt.Adopt"} <= _KNOWN
    run_ranks(2, known)


class ScheduleFree(SGD):
    """Has parameters elsewhere than where they are evaluated, as the optimizers of schedulefree."""

    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.lerp_(self.state[param]["z"], 0.5)

    def train(self) -> None:
        self.eval()


def refused() -> None:
    model = BucketDDP(Mlp(), shard_optimizer=True)
    with pytest.raises(ValueError, match=r"step\(\) alone .*ScheduleFree with train\(\) and eval\(\).*=False"):
        model.prepare_optimizer(declare_element_wise(ScheduleFree)(model.parameters()))
    with pytest.raises(ValueError, match=r"timm\.optim\.lion\.Lion with caution=True: it takes a mean"):
        model.prepare_optimizer(called("timm.optim.lion.Lion")(model.parameters(), caution=True))
    with pytest.raises(ValueError, match=r"found lion_pytorch.lion_pytorch.Unknown\. If.*declare_element_wise"):
        model.prepare_optimizer(called("lion_pytorch.lion_pytorch.Unknown")(model.parameters()))
    model.close()


def test_optimizers_that_cannot_be_sharded_say_why(run_ranks: RunRanks) -> None:
    run_ranks(2, refused)
