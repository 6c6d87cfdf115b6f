"""Steps that all ranks skip together: what is dropped, what the warning names, and when ranks stop."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.hooks import options_for
from tests.models import Mlp
from tests.pool import case, on_ranks
from tests.reference import TINY, drift, inputs_of, seeded


@contextmanager
def warns_of(*expected: str) -> Iterator[None]:
    """On rank 0 exactly these parts of warnings are told inside, on other ranks none."""
    with warnings.catch_warnings(record=True, action="always") as found:
        yield
    texts = [str(warning.message) for warning in found]
    expected = expected if dist.get_rank() == 0 else ()
    assert len(texts) == len(expected), texts
    assert all(part in text for part, text in zip(expected, texts, strict=True)), texts


class OutOfMemory(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory, for this test")


def nan_grad(model: BucketDDP, step: int) -> Tensor:
    hidden = model(inputs_of(step)).square().mean()
    hidden.register_hook(lambda grad: grad * math.nan)
    return hidden


def late_inf(model: BucketDDP, step: int) -> Tensor:
    """Infinite from a layer in the middle on, backwards."""
    handle = model.module.layers[1].register_forward_hook(
        lambda layer, args, output: output.register_hook(lambda grad: grad * math.inf) and None
    )
    loss = model(inputs_of(step)).square().mean()
    handle.remove()
    return loss


def oom_in_backward(model: BucketDDP, step: int) -> Tensor:
    """After the gradients of the head."""
    handle = model.module.layers[1].register_forward_hook(lambda layer, args, output: OutOfMemory.apply(output))
    loss = model(inputs_of(step)).square().mean()
    handle.remove()
    return loss


def oom_in_forward(model: BucketDDP, step: int) -> Tensor:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory, for this test")

    handle = model.module.layers[1].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(inputs_of(step))
    handle.remove()
    return model.skip_step("ran out of memory in forward")


Loss = Callable[[BucketDDP, int], Tensor]


def good(model: BucketDDP, step: int) -> Tensor:
    return model(inputs_of(step)).square().mean()


class Training:
    """A wrapped model with AdamW, that some step may go wrong for."""

    def __init__(self, build: Callable[[], nn.Module] = Mlp, **options: Any) -> None:
        self.model = BucketDDP(seeded(build), bucket_cap_mb=TINY, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)  # weight decay: a step without gradients

    def step(self, *numbers: int, bad: Loss = good, rank: int = 1) -> None:
        """One step of one backward per number; the first goes wrong on one rank."""
        for place, number in enumerate(numbers):
            with nullcontext() if place == len(numbers) - 1 else self.model.no_sync():
                loss = (bad if place == 0 and dist.get_rank() == rank else good)(self.model, number)
                with self.model.backward_pass(loss):
                    loss.backward()
        if self.model.step_skipped():
            assert all(param.grad is None for param in self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        self.model.wait_for_parameters()
        return [param.detach().clone() for param in self.model.parameters()]


FAULTS: dict[str, tuple[Loss, str]] = {
    "NaN": (nan_grad, "rank 1 has NaN or Inf in 8 gradient(s), first in that of 'head."),
    "Inf": (late_inf, "rank 1 has NaN or Inf in 4 gradient(s), first in that of 'layers.1."),
    "oom in backward": (oom_in_backward, "rank 1 ran out of memory in backward"),
    "oom in forward": (oom_in_forward, "rank 1 ran out of memory in forward"),
}
STORAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "coalesced": lambda: {"use_contiguous_buffers": False},
    "sharded": lambda: {"shard_optimizer": True},
    "wire": lambda: {"wire_dtype": "bf16"},
    "powersgd": lambda: options_for("powersgd"),
}


@on_ranks(2, 3, cases=[*product(STORAGES, [1]), *product(["plain", "sharded"], [3])])
def test_all_ranks_skip_a_step_that_goes_wrong_on_one(storage: str, passes: int) -> None:
    """Weights are those of a run that never saw the batches. Steps in between are ordinary ones."""
    ours, never = (Training(skip_step_on=["oom", "nonfinite"], **STORAGES[storage]()) for _ in range(2))
    for step, (bad, words) in enumerate(FAULTS.values()):
        with case(words), warns_of():
            for training in (ours, never):
                training.step(*range(2 * step * passes, (2 * step + 1) * passes))
            assert not ours.model.step_skipped()
        before = ours.parameters()
        told = f"rank 0: all ranks skip the step of pass {2 * step + 1}, 1 in a row so far: {words}"
        with case(words), warns_of(told):
            ours.step(*range((2 * step + 1) * passes, (2 * step + 2) * passes), bad=bad)
            assert ours.model.step_skipped()
            torch.testing.assert_close(ours.parameters(), before, rtol=0, atol=0)
    ours.step(100)
    never.step(100)
    assert drift(ours.model) == 0
    if storage != "powersgd":  # whose memory starts anew
        torch.testing.assert_close(ours.parameters(), never.parameters())
    assert all(param.isfinite().all() for param in ours.parameters())
