"""A step that ignores gradients of local passes is told. Everything that is sound is left alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_bucketddp import BucketDDP
from tests.lightning_models import Regression, data, ours, trainer
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reference import backward, local_if, mse, pair, seeded

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "coalesced": {"use_contiguous_buffers": False},
    "sharded": {"shard_optimizer": True},
}


def accumulate(model: BucketDDP, *local: bool) -> None:
    for number, is_local in enumerate(local):
        with local_if(model, is_local):
            backward(model, number)


@on_ranks(2, 3, cases=KINDS)
def test_a_step_after_local_passes_is_told_once(options: dict[str, Any]) -> None:
    """The first micro-batch is averaged instead of the last one."""
    model = BucketDDP(seeded(Mlp), **options)
    optimizer = SGD(model.parameters(), lr=0.1)
    accumulate(model, False, True, True)
    effect = "left them out" if "shard_optimizer" in options else "used those of this rank alone"
    rank = dist.get_rank()
    text = rf"rank {rank}: .* SGD steps, .* of 8 parameter\(s\), the first 'layers.0.weight'. The step has {effect}"
    with pytest.warns(UserWarning, match=text) as found:
        optimizer.step()
    assert found[0].filename == __file__, "it points at the step"
    optimizer.zero_grad()
    accumulate(model, True)
    optimizer.step()  # warnings are errors


def saliency(model: BucketDDP, optimizer: Optimizer) -> None:
    """A backward whose gradients are dropped."""
    accumulate(model, True)
    optimizer.zero_grad()
    accumulate(model, False)


def by_hand(model: BucketDDP, optimizer: Optimizer) -> None:
    accumulate(model, False, True, True)
    model.allreduce_gradients()


def nothing_left(model: BucketDDP, optimizer: Optimizer) -> None:
    accumulate(model, True)
    optimizer.zero_grad()


SOUND: dict[str, Callable[[BucketDDP, Optimizer], None]] = {
    "the last one is averaged": lambda model, optimizer: accumulate(model, True, True, False),
    "saliency": saliency,
    "allreduce_gradients": by_hand,
    "all dropped": nothing_left,
}


@on_ranks(2, cases=KINDS)
def test_sound_steps_are_left_alone(options: dict[str, Any]) -> None:
    for take in SOUND.values():
        model = BucketDDP(seeded(Mlp), **options)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            take(model, optimizer)
            optimizer.step()
        optimizer.zero_grad()
        accumulate(model, True)
        optimizer.step(partial(backward, model, 1))  # the closure averages
        SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
        model.close()


@on_ranks(2, cases=KINDS)
def test_another_optimizers_local_gradients_may_wait(options: dict[str, Any]) -> None:
    model = BucketDDP(seeded(Mlp), **options)
    head, body = (SGD(part.parameters(), lr=0.1) for part in (model.module.head, model.module.layers))
    accumulate(model, False, True)
    head.zero_grad()
    head.step()
    with pytest.warns(UserWarning, match="passes inside no_sync"):
        body.step()


@on_ranks(1)
def test_one_rank_alone_has_all_gradients() -> None:
    model = BucketDDP(seeded(Mlp))
    accumulate(model, False, True)
    SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_the_remedy_gives_the_gradients_of_all_passes() -> None:
    plain, model = pair(shard_optimizer=True)
    accumulate(model, False, True)
    model.allreduce_gradients()
    for number in range(2):
        mse(number)(plain).backward()
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        dist.all_reduce(param.grad)
        torch.testing.assert_close(model.full_grad(other), param.grad / 2)


class Quiet(Regression):
    records = False


class FirstIsAveraged(Quiet):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for number in range(2):
            with local_if(self.trainer.strategy.bucket_ddp, number == 1):
                self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@on_ranks(2, cases={"plain": {}, "sharded": {"shard_optimizer": True}})
def test_a_trainer_tells_of_manual_optimisation_alone(options: dict[str, Any]) -> None:
    trainer(ours(**options), accumulate_grad_batches=2).fit(Quiet(), data(5))
    with pytest.warns(UserWarning, match="passes inside no_sync"):
        trainer(ours(**options)).fit(FirstIsAveraged(), data(2))
