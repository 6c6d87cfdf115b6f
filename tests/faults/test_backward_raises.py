"""An exception on one rank or on all: nothing hangs that could have been an error, and errors say who and what."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.reducer.reducer import PassState
from tests.hooks import options_for
from tests.inside import reducer_of
from tests.models import Branches, Checkpointed, ConvBatchNorm, Fragile, Mlp, batch, loss_of
from tests.pool import RunRanks, on_ranks
from tests.reference import (
    TINY,
    assert_grads,
    inputs_of,
    largest_difference_between_ranks,
    mean_over_ranks,
    pair,
    run_backward,
)


def options_of(way: str) -> dict[str, Any]:
    """Options by which buckets travel in some way, one for each parameter."""
    return {"bucket_cap_mb": 0.0001, **({} if way == "plain" else options_for(way))}


def run_pass(model: Any, step: int, guarded: bool = False, **options: Any) -> None:
    inputs, target = batch(step, dist.get_rank())
    run_backward(model, loss_of(model(inputs, **options), target), guarded)


def all_ranks_raise(way: str, guarded: bool) -> None:
    plain, ours = pair(Fragile, **{"cap": 0.0001, **({} if way == "plain" else options_for(way))})
    for step in range(6):
        plain.zero_grad()
        ours.zero_grad()
        if step in (0, 4):  # while the order is learned, and later
            with pytest.raises(ArithmeticError, match="no gradient today"):
                run_pass(ours, step, guarded, fail=True)
            if guarded or step == 4:
                ours(batch(step, 0)[0])  # in plain PyTorch the next use finds out that all ranks failed
                assert all(param.grad is None for param in ours.parameters())
            ours.zero_grad()
        for model in (plain, ours):
            run_pass(model, step)
        means = mean_over_ranks(plain)
        if way != "powersgd" or step == 0:  # two passes: PowerSGD has not started
            assert_grads(ours.module, means, **({"rtol": 0.02, "atol": 0.01} if way == "wire" else {}))
    assert largest_difference_between_ranks(ours.module) == 0
    assert all(torch.isfinite(param.grad).all() for param in ours.parameters())
    ours.close()


@on_ranks(2, 3, cases=[("plain", True), ("wire", False), ("powersgd", True), ("plain", False), ("own hook", True)])
def test_training_goes_on_when_all_ranks_raised(way: str, guarded: bool) -> None:
    all_ranks_raise(way, guarded)


@on_ranks(2)
def test_the_first_gradient_after_a_failure_is_not_lost() -> None:
    plain, ours = pair(Fragile, 0.0001)
    for step in range(2):
        plain.zero_grad()
        ours.zero_grad()
        with pytest.raises(ArithmeticError):
            run_pass(ours, step, fail=True)
        assert all(param.grad is None for param in ours.parameters())
        for module in (plain, ours.module):  # past the wrapper: the first gradient is what finds the failed pass
            module(inputs_of(step)).square().mean().backward()
        assert_grads(ours.module, mean_over_ranks(plain))


def raise_in_backward(grad: torch.Tensor) -> None:
    raise ArithmeticError("no gradient today")


@on_ranks(2, cases=(True, False))
def test_gradients_that_a_failed_pass_spared_are_put_back(guarded: bool) -> None:
    ours = BucketDDP(Branches(), bucket_cap_mb=0.0001, find_unused_parameters=True)
    inputs = inputs_of(0)
    for _ in range(2):
        ours(inputs).square().mean().backward()
    grad = ours.module.left.weight.grad.add_(dist.get_rank())  # on each rank another: this rank's own is put back
    before = grad.clone()
    inputs.requires_grad_().register_hook(raise_in_backward)
    loss = ours(inputs, "right").square().mean()
    kept: list[Any] = []
    reducer = reducer_of(ours)
    ours.module.stem.bias.register_hook(lambda _, kept=kept, of=reducer: kept.extend(of.storage._kept))
    with pytest.raises(ArithmeticError):
        run_backward(ours, loss, guarded)
    assert bool(kept) == guarded, "only a guard knows beforehand that the gradient will not come"
    assert ours.module.right.weight.grad is None
    for _ in range(2):
        assert torch.equal(ours.module.left.weight.grad, before)
        ours(inputs)


def one_rank_raises(way: str, guarded: bool, step_of_failure: int) -> tuple[str, str, float]:
    ours = BucketDDP(Fragile(), **options_of(way))
    rank = dist.get_rank()
    for step in range(step_of_failure):
        ours.zero_grad()
        run_pass(ours, step, guarded)
    begin = time.monotonic()
    with pytest.raises((ArithmeticError, PeerFailureError)) as error:
        run_pass(ours, step_of_failure, guarded, fail=rank == 1)
    elapsed = time.monotonic() - begin
    # Nobody may go on by mistake, least of all the rank that failed.
    with pytest.raises(PeerFailureError) as later:
        ours(batch(9, rank)[0])
    assert reducer_of(ours).state is PassState.FAILED
    return str(error.value), str(later.value), elapsed


@pytest.mark.parametrize(
    ("world_size", "way", "guarded", "step"),
    [
        (2, "plain", True, 0),
        (3, "plain", False, 3),
        (3, "allreduce", True, 3),
        (3, "wire", False, 0),
        (2, "powersgd", True, 3),
    ],
)
def test_one_rank_that_raises_is_an_error_on_all(
    run_ranks: RunRanks, world_size: int, way: str, guarded: bool, step: int
) -> None:
    found = run_ranks(world_size, one_rank_raises, way, guarded, step, fresh=True)
    for rank, (first, later, elapsed) in enumerate(found):
        assert elapsed < (15 if rank == 1 else 8)
        assert "rank 1" in later
        if rank == 1:
            assert first == "no gradient today"
            continue
        assert f"rank {rank}: pass {step} cannot be completed: rank 1" in first
        if way == "plain":
            assert ("ArithmeticError" in first and "no gradient today" in first) if guarded else "first." in first


@on_ranks(2)
def test_a_failed_local_pass_concerns_nobody_else() -> None:
    plain, ours = pair(Fragile, TINY)
    if dist.get_rank() == 1:
        with pytest.raises(ArithmeticError), ours.no_sync():
            run_pass(ours, 0, fail=True)
        ours.zero_grad()
    for model in (plain, ours):
        run_pass(model, 0)
    assert_grads(ours.module, mean_over_ranks(plain))


def interrupt() -> None:
    raise KeyboardInterrupt


def in_the_second_pass(what: str) -> str:
    """Rank 1 fails around the second pass; rank 0 has to hear of it there."""
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    if what != "interrupted":
        run_pass(ours, 0)
    if dist.get_rank() == 1:
        if what == "dies":
            os._exit(1)
        if what == "publishes":
            ours._publish_failure(OSError("disk full"))
        else:  # the collectives of the pass are through
            reducer_of(ours)._end = interrupt
            with pytest.raises(KeyboardInterrupt):
                run_pass(ours, 0, guarded=True)
        return ""
    if what == "interrupted":
        run_pass(ours, 0, guarded=True)
    with pytest.raises(PeerFailureError) as error:
        run_pass(ours, 1)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("publishes", ["rank 0: pass 1 cannot be completed: rank 1 raised OSError: disk full"]),
        ("interrupted", ["rank 0: pass 1 cannot be completed: rank 1 raised KeyboardInterrupt"]),
        ("dies", ["rank 0: waiting for the gradients of 'head.", "failed in pass 1", "rank(s) 1"]),
    ],
)
def test_a_rank_that_waits_hears_of_a_failure(run_ranks: RunRanks, what: str, words: list[str]) -> None:
    message, _ = run_ranks(2, in_the_second_pass, what, fresh=True, may_exit=[1] if what == "dies" else [], timeout=30)
    assert all(it in message for it in words), message


@pytest.mark.parametrize("waits_for", ["bucket", "module buffers"])
@on_ranks(2, fresh=True)
def test_a_group_of_a_failed_pass_is_refused(waits_for: str) -> None:
    """Rank 0 waits for a bucket, or rank 1 for rank 0's module buffers, when the other has failed."""
    waiting, failing = (0, 1) if waits_for == "bucket" else (1, 0)
    module = ConvBatchNorm()
    ours = BucketDDP(module, timeout=timedelta(seconds=20))
    run_pass(ours, 0)
    if waits_for == "bucket":
        ours.synchronise_module_buffers()
    if dist.get_rank() == failing:
        ours._publish_failure(OSError("disk full"))
    else:
        with pytest.raises(PeerFailureError, match="disk full"):
            run_pass(ours, 0)
    ours.close()
    refused = rf"rank {failing}: rank {waiting} cannot go on.*start the processes anew"
    words = "disk full" if dist.get_rank() == waiting else refused
    with pytest.raises(RuntimeError, match=words):
        BucketDDP(module, timeout=timedelta(seconds=20))


@on_ranks(2, fresh=True)
def test_a_gradient_that_comes_too_late_is_named() -> None:
    """The block is called once in the pass that teaches the order, and twice later."""
    module = Checkpointed(use_reentrant=True, calls=1)
    ours = BucketDDP(module, bucket_cap_mb=0.0001)
    run_pass(ours, 0)
    module.calls = 2
    with pytest.raises(RuntimeError, match=r"'block\.0\..*came after its bucket.*use_reentrant=False"):
        run_pass(ours, 0)
