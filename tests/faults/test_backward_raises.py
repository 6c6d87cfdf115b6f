"""An exception on one rank or on all: nothing hangs that could have been an error, and errors say who and what."""

import copy
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.reducer.reducer import PassState
from tests.hooks import options_for
from tests.inside import reducer_of
from tests.models import Branches, Checkpointed, ConvBatchNorm, Fragile, Mlp, batch, loss_of
from tests.reference import assert_grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003
GUARDED = pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])


def options_of(way: str) -> dict[str, Any]:
    """Options by which buckets travel in some way."""
    return {} if way == "plain" else options_for(way)


def run_pass(ours: BucketDDP, step: int, guarded: bool = False, **options: Any) -> None:
    inputs, target = batch(step, dist.get_rank())
    loss = loss_of(ours(inputs, **options), target)
    with ours.backward_pass(loss) if guarded else nullcontext():
        loss.backward()


# -- on all ranks ------------------------------------------------------------------------------------


def all_ranks_raise(ways: list[str], guarded: bool) -> None:
    for way in ways:
        torch.manual_seed(0)
        plain = Fragile()
        ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001, **options_of(way))
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
            inputs, target = batch(step, dist.get_rank())
            loss_of(plain(inputs), target).backward()
            run_pass(ours, step)
            means = mean_over_ranks(plain)
            if way != "powersgd" or step == 0:  # two passes: PowerSGD has not started
                assert_grads(ours.module, means, **({"rtol": 0.02, "atol": 0.01} if way == "wire" else {}))
        assert largest_difference_between_ranks(ours.module) == 0
        assert all(torch.isfinite(param.grad).all() for param in ours.parameters())
        ours.close()


@GUARDED
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_goes_on_when_all_ranks_raised(run_ranks: RunRanks, world_size: int, guarded: bool) -> None:
    ways = ["plain", "wire", "powersgd"] if guarded is (world_size == 2) else ["plain", "allreduce", "own hook"]
    run_ranks(world_size, all_ranks_raise, ways, guarded)


def past_the_wrapper() -> None:
    torch.manual_seed(0)
    plain = Fragile()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001)
    for step in range(2):
        inputs, target = batch(step, dist.get_rank())
        with pytest.raises(ArithmeticError):
            run_pass(ours, step, fail=True)
        assert all(param.grad is None for param in ours.parameters())
        plain.zero_grad()
        loss_of(plain(inputs), target).backward()
        loss_of(ours.module(inputs), target).backward()  # its first gradient is what finds the failed pass
        assert_grads(ours.module, mean_over_ranks(plain))
        ours.zero_grad()
    ours.close()


def test_the_first_gradient_after_a_failure_is_not_lost(run_ranks: RunRanks) -> None:
    run_ranks(2, past_the_wrapper)


def raise_in_backward(grad: torch.Tensor) -> None:
    raise ArithmeticError("no gradient today")


def beside_a_published_gradient(guarded: bool) -> int:
    ours = BucketDDP(Branches(), bucket_cap_mb=0.0001, find_unused_parameters=True)
    inputs, _ = batch(0, dist.get_rank())
    for _ in range(2):
        ours(inputs).square().mean().backward()
    grad = ours.module.left.weight.grad.add_(dist.get_rank())  # on each rank another: this rank's own is put back
    before = grad.clone()
    inputs.requires_grad_().register_hook(raise_in_backward)
    loss = ours(inputs, "right").square().mean()
    kept: list[Any] = []
    ours.module.stem.bias.register_hook(lambda _: kept.extend(reducer_of(ours).storage._kept))
    with pytest.raises(ArithmeticError), ours.backward_pass(loss) if guarded else nullcontext():
        loss.backward()
    assert ours.module.right.weight.grad is None
    for _ in range(2):
        assert torch.equal(ours.module.left.weight.grad, before)
        ours(inputs)
    ours.close()
    return len(kept)


@GUARDED
def test_gradients_that_a_failed_pass_spared_are_put_back(run_ranks: RunRanks, guarded: bool) -> None:
    on_the_wire = run_ranks(2, beside_a_published_gradient, guarded)
    assert all(on_the_wire) == guarded, "only a guard knows beforehand that the gradient will not come"


# -- on one rank -------------------------------------------------------------------------------------


def one_rank_raises(way: str, guarded: bool, step_of_failure: int) -> tuple[str, str, float]:
    ours = BucketDDP(Fragile(), bucket_cap_mb=0.0001, **options_of(way))
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
        (3, "plain", True, 3),
        (3, "plain", False, 0),
        (2, "plain", False, 3),
        (3, "allreduce", True, 3),
        (3, "wire", False, 3),
        (2, "powersgd", True, 3),
    ],
)
def test_one_rank_that_raises_is_an_error_on_all(
    run_ranks: RunRanks, world_size: int, way: str, guarded: bool, step: int
) -> None:
    for rank, (first, later, elapsed) in enumerate(
        run_ranks(world_size, one_rank_raises, way, guarded, step, fresh=True)
    ):
        assert elapsed < 8 if rank != 1 else elapsed < 15
        assert "rank 1" in later
        if rank == 1:
            assert first == "no gradient today"
            continue
        assert f"rank {rank}: pass {step} cannot be completed: rank 1" in first
        if way == "plain":
            assert ("ArithmeticError" in first and "no gradient today" in first) if guarded else "first." in first


def in_a_local_pass() -> None:
    torch.manual_seed(0)
    plain = Fragile()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    inputs, target = batch(0, dist.get_rank())
    if dist.get_rank() == 1:  # nothing is on the wire: this concerns nobody else
        with pytest.raises(ArithmeticError), ours.no_sync():
            run_pass(ours, 0, fail=True)
        ours.zero_grad()
    loss_of(plain(inputs), target).backward()
    run_pass(ours, 0)
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_a_failed_local_pass_concerns_nobody_else(run_ranks: RunRanks) -> None:
    run_ranks(2, in_a_local_pass)


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
            ours.publish_failure(OSError("disk full"))
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


def a_skipped_backward() -> str:
    ours = BucketDDP(Mlp())
    with pytest.raises(RankMismatchError) as error:
        run_steps(ours, skipped=1 if dist.get_rank() == 1 else None)
    return str(error.value)


def run_steps(ours: BucketDDP, skipped: int | None) -> None:
    for step in range(4):
        ours.begin_step()
        inputs, target = batch(step, dist.get_rank())
        loss = loss_of(ours(inputs), target)
        if step != skipped:
            loss.backward()


def test_a_skipped_backward_is_noticed(run_ranks: RunRanks) -> None:
    for rank, message in enumerate(run_ranks(2, a_skipped_backward, fresh=True)):
        assert f"rank {rank}: ranks met in pass 1 from different steps; this rank is in step {2 + rank}" in message


# -- afterwards --------------------------------------------------------------------------------------


def the_group_of_a_failed_pass(waits_for: str) -> tuple[str, str]:
    """Rank 0 waits for a bucket, or rank 1 for rank 0's module buffers, when the other has failed."""
    module = ConvBatchNorm()
    ours = BucketDDP(module, timeout=timedelta(seconds=20))
    run_pass(ours, 0)
    if waits_for == "bucket":
        ours.synchronise_module_buffers()
    if dist.get_rank() == (1 if waits_for == "bucket" else 0):
        ours.publish_failure(OSError("disk full"))
    else:
        with pytest.raises(PeerFailureError, match="disk full"):
            run_pass(ours, 0)
    ours.close()
    with pytest.raises(RuntimeError) as error:
        BucketDDP(module, timeout=timedelta(seconds=20))
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("waits_for", ["bucket", "module buffers"])
def test_a_group_of_a_failed_pass_is_refused(run_ranks: RunRanks, waits_for: str) -> None:
    waited, failed = (0, 1) if waits_for == "bucket" else (1, 0)
    results = run_ranks(2, the_group_of_a_failed_pass, waits_for, fresh=True)
    kind, message = results[waited]
    assert kind == "RuntimeError"
    assert "disk full" in message
    kind, message = results[failed]
    assert kind == "PeerFailureError"
    assert f"rank {failed}: rank {waited} cannot go on" in message
    assert "start the processes anew" in message


def late_gradient() -> str:
    """The block is called once in the pass that teaches the order, and twice later."""
    module = Checkpointed(use_reentrant=True, calls=1)
    ours = BucketDDP(module, bucket_cap_mb=0.0001)
    run_pass(ours, 0)
    module.calls = 2
    with pytest.raises(RuntimeError, match="came after its bucket") as error:
        run_pass(ours, 0)
    return str(error.value)


def test_a_gradient_that_comes_too_late_is_named(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, late_gradient, fresh=True):
        assert "'block.0." in message
        assert "use_reentrant=False" in message
