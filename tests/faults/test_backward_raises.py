"""An exception on one rank or on all: nothing hangs that could have been an error, and errors say who and what."""

import os
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.comm.hooks import CommHookError
from tests.hooks import options_for
from tests.inside import reducer_of
from tests.models import Checkpointed, ConvBatchNorm, Fragile, Mlp
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    WHERE,
    assert_grads,
    backward,
    inputs_of,
    mean_grads,
    pair,
    raises_soon,
    without_where,
)

SMALL = 0.0001
"""MiB; makes a bucket of each parameter."""


@on_ranks(3, cases=(True, False), fresh=True)
def test_an_exception_on_all_ranks_is_for_good(guarded: bool) -> None:
    ours = BucketDDP(Fragile(), bucket_cap_mb=SMALL)
    backward(ours, 0, guarded=guarded)
    for expected in ((ArithmeticError, PeerFailureError), PeerFailureError):  # a late rank hears of another one
        with pytest.raises(expected):
            backward(ours, 1, guarded=guarded, fail=True)


ALONE = [("plain", True), ("wire", False), ("powersgd", True), ("plain", False), ("own hook", True)]


@on_ranks(1, cases=ALONE)
def test_a_rank_without_others_drops_the_pass_and_goes_on(way: str, guarded: bool) -> None:
    plain, ours = pair(Fragile, SMALL, **options_for(way))
    for step in range(4):
        if step in (0, 3):  # while the order is learned, and later
            with pytest.raises(ArithmeticError, match="no gradient today"):
                backward(ours, step, guarded=guarded, fail=True)
            assert all(param.grad is None for param in ours.parameters())
        for model in (plain, ours):
            model.zero_grad()
            backward(model, step)
        if way != "powersgd" or step == 0:  # it has not begun to compress
            assert_grads(ours.module, mean_grads(plain))


@on_ranks(2, cases=(True, False))
def test_a_local_pass_that_raises_ends_and_training_goes_on(guarded: bool) -> None:
    plain, ours = pair(Fragile, SMALL)
    for step in range(3):
        with ours.no_sync(), pytest.raises(ArithmeticError):
            backward(ours, step, guarded=guarded, fail=True)
        for model in (plain, ours):
            model.zero_grad()
            backward(model, step)
        assert_grads(ours.module, mean_grads(plain))


@on_ranks(3, cases=[("plain", True, 0), ("plain", False, 3), ("wire", False, 0), ("powersgd", True, 3)], fresh=True)
def test_one_rank_that_raises_is_an_error_on_all(way: str, guarded: bool, step: int) -> None:
    rank, ours = dist.get_rank(), BucketDDP(Fragile(), bucket_cap_mb=SMALL, **options_for(way))
    for before in range(step):
        ours.zero_grad()
        backward(ours, before, guarded=guarded)
    with raises_soon(ArithmeticError, PeerFailureError, CommHookError) as error:
        backward(ours, step, guarded=guarded, fail=rank == 1)
    # Nobody may go on by mistake, least of all the rank that failed.
    with pytest.raises(PeerFailureError, match="rank 1"):
        ours(inputs_of(9))
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    if rank == 1:
        assert said == "no gradient today"
    elif error.type is CommHookError:  # PowerSGD waits by itself, and is woken by an abort
        assert f"rank {rank} stops because rank 1" in without_where(said)
    else:
        assert f"rank {rank}: pass {step} cannot be completed: rank 1" in said
        words = {"plain": ["ArithmeticError", "no gradient today"] if guarded else ["first."]}.get(way, [])
        assert all(word in said for word in words)


IN_THE_SECOND_PASS = {
    "publishes": ["rank 0: pass 1 cannot be completed: rank 1 raised OSError: disk full"],
    "interrupted": ["rank 0: pass 1 cannot be completed: rank 1 raised KeyboardInterrupt"],
    "dies": ["rank 0: waiting for the gradients of 'head.", "failed in pass 1: nothing is heard of rank 1: "],
}


@on_ranks(2, cases=IN_THE_SECOND_PASS.items(), fresh=True, may_exit=[1])
def test_a_rank_that_waits_hears_of_a_failure(what: str, words: list[str]) -> None:
    """Rank 1 fails around the second pass; rank 0 hears of it there."""
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    if what != "interrupted":
        backward(ours, 0)
    if dist.get_rank() == 0:
        if what == "interrupted":
            backward(ours, 0, guarded=True)
        with pytest.raises(PeerFailureError) as error:
            backward(ours, 1)
        assert all(word in without_where(str(error.value)) for word in words), error.value
    elif what == "dies":
        os._exit(1)
    elif what == "publishes":
        ours._publish_failure(OSError("disk full"))
    else:  # the collectives of the pass are through
        reducer_of(ours)._end = Mock(side_effect=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            backward(ours, 0, guarded=True)


@on_ranks(2, fresh=True)
def test_a_group_of_a_failed_pass_is_refused() -> None:
    module, rank, soon = ConvBatchNorm(), dist.get_rank(), timedelta(seconds=20)
    ours = BucketDDP(module, timeout=soon)
    backward(ours, 0)
    ours.synchronise_module_buffers()
    if rank == 1:
        ours._publish_failure(OSError("disk full"))
    else:
        with pytest.raises(PeerFailureError, match="disk full"):
            backward(ours, 0)
    ours.close()
    refused = f"rank 1: rank 0{WHERE} cannot go on.*start the processes anew" if rank == 1 else "disk full"
    with pytest.raises(RuntimeError, match=refused):
        BucketDDP(module, timeout=soon)


@on_ranks(2, fresh=True)
def test_a_gradient_that_comes_too_late_is_named() -> None:
    """The block is called once in the pass that teaches the order, and twice later."""
    module = Checkpointed(use_reentrant=True, calls=1)
    ours = BucketDDP(module, bucket_cap_mb=SMALL)
    backward(ours, 0)
    module.calls = 2
    with pytest.raises(RuntimeError, match=r"'block\.0\..*came after its bucket.*use_reentrant=False"):
        backward(ours, 0)
