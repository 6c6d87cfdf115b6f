"""A sharded optimizer whose ranks do not do the same: errors that say who and what, within seconds."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError, declare_element_wise
from tests.models import Branches, Fragile, batch
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    WHERE,
    backward,
    eventually,
    group_store,
    raises_soon,
    without_where,
)


@declare_element_wise
class Breaking(torch.optim.SGD):
    when: str | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if self.when == "before":
            raise ArithmeticError("no step today")
        update = torch.optim.SGD.step  # hooked if there ever was a plain one in this process: a step within the step
        loss = getattr(update, "__wrapped__", update)(self, closure)
        if self.when == "after":
            raise ArithmeticError("half a step today")
        return loss


def begin(module: nn.Module, **options: Any) -> tuple[BucketDDP, Breaking]:
    ours = BucketDDP(module, shard_optimizer=True, **{"bucket_cap_mb": TINY, **options})
    return ours, Breaking(ours.parameters(), lr=0.1, momentum=0.9)


def train(ours: BucketDDP, optimizer: Breaking, step: int, what: str = "") -> None:
    optimizer.when = {"raises in step": "before", "raises late in step": "after"}.get(what)
    try:
        backward(ours, step, fail=what == "raises in backward")
        if what != "skips":
            optimizer.step()
    except ArithmeticError:  # and goes on as if nothing had happened
        assert what
    optimizer.when = None
    optimizer.zero_grad()


def run_steps(ours: BucketDDP, optimizer: Breaking, how: str) -> None:
    for step in range(6):
        if step == 3 and how == "dies":
            os._exit(7)
        train(ours, optimizer, step, how if step == 3 else "")
    ours.wait_for_parameters()


OTHER_STEP = ["after 3 optimizer steps", "rank 1", "optimizer step 4"]
DOES_OTHERWISE = [
    ("skips", OTHER_STEP),
    ("raises in step", OTHER_STEP),
    ("raises late in step", ["rank 1 raised in optimizer.step()"]),
    ("raises in backward", ["rank 1", "cannot be completed"]),
    ("dies", ["nothing is heard of rank 1"]),
]


@on_ranks(4, 2, cases=DOES_OTHERWISE, fresh=True, may_exit=[1])
def test_a_rank_that_does_something_else_is_named(how: str, words: list[str]) -> None:
    """Rank 1 does something else in step 3."""
    options = {} if "in step" in how else {"shard_group_size": 2}
    ours, optimizer = begin(Fragile(), **options)
    with raises_soon(PeerFailureError, RankMismatchError) as error:
        run_steps(ours, optimizer, how if dist.get_rank() == 1 else "")
    assert all(word in without_where(str(error.value)) for word in words), error.value
    with pytest.raises((PeerFailureError, RankMismatchError)):  # for good
        train(ours, optimizer, 9)


@on_ranks(2, fresh=True)
def test_a_rank_that_alone_asks_for_the_whole_state_is_named() -> None:
    ours, optimizer = begin(Fragile())
    for step in range(3):
        train(ours, optimizer, step)
    with raises_soon(PeerFailureError, RankMismatchError, match="agree on the entries of the optimizer's state"):
        if dist.get_rank() == 0:
            ours.optimizer_state_dict(optimizer)
        for step in range(3, 6):
            train(ours, optimizer, step)


@on_ranks(3, fresh=True)
def test_a_rank_that_ends_without_the_last_step_is_named() -> None:
    ours, optimizer = begin(Fragile())
    train(ours, optimizer, 0)
    train(ours, optimizer, 1, "skips" if dist.get_rank() == 1 else "")
    if dist.get_rank() == 1:
        ours._end_training()
        eventually(lambda: group_store().add("raised", 0) == 2)  # the process is there, and comes to nothing
    else:
        with pytest.raises((RankMismatchError, PeerFailureError), match=f"rank 1{WHERE} has ended training"):
            ours.wait_for_parameters()
        group_store().add("raised", 1)


@on_ranks(2, cases=[("both", 1e-6, True), ("both", TINY, False), ("right", TINY, False)], fresh=True)
def test_steps_that_nobody_waits_for_are_noticed(other: str, cap: float, laid_out: bool) -> None:
    """Rank 0 steps the left branch's optimizer, rank 1 both or the right branch's. The next pass uses neither."""
    ours, _ = begin(Branches(), bucket_cap_mb=cap)
    left, right = (Breaking(part.parameters(), lr=0.1) for part in (ours.module.left, ours.module.right))
    for _ in range(3):
        ours(batch(0, 0)[0]).square().mean().backward()
    for optimizer in {"both": [left, right], "right": [right]}[other] if dist.get_rank() else [left]:
        optimizer.step()
    if not laid_out:  # state would move
        ours.module.stem.bias.requires_grad_(False)
    with pytest.raises((RankMismatchError, PeerFailureError), match="optimizer step"):
        ours(batch(0, 0)[0], "left").square().mean().backward()
