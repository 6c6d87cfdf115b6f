"""``last_pass()``, and what the logger says at each ``TORCH_DISTRIBUTED_DEBUG``."""

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.peers.control import HEADER
from tests.models import Branches, Fragile, Lookup, MixedDtypes, Mlp, OutOfOrder, batch, loss_of, tokens
from tests.pool import Nursery, WorkerPool
from tests.reference import TINY

RunRanks = Callable[..., list[Any]]


def train(ours: BucketDDP, step: int) -> None:
    ours.zero_grad()
    inputs, target = batch(step, dist.get_rank())
    loss_of(ours(inputs), target).backward()


def buckets_of_a_pass() -> None:
    ours = BucketDDP(MixedDtypes(), bucket_cap_mb=TINY)
    assert ours.last_pass() is None
    for step in range(3):
        train(ours, step)
        record, layout = ours.last_pass(), ours.layout
        assert (record.number, record.rank, record.world_size) == (step, dist.get_rank(), 2)
        assert [bucket.index for bucket in record.buckets] == list(range(len(layout.buckets)))
        for found, bucket in zip(record.buckets, layout.buckets, strict=True):
            assert found.parameters == tuple(layout.slots[slot].spec.name for slot in bucket.slots)
            assert found.nbytes == layout.bucket_nbytes(bucket)
            assert (found.dtype, found.device) == (layout.buffers[bucket.buffer].dtype, "cpu")
            assert found.launched_early == (found.launched_at <= record.backward_seconds)
        assert {bucket.dtype for bucket in record.buckets} == {torch.float32, torch.bfloat16}
        assert sum(bucket.launched_early for bucket in record.buckets) == ours.early_launches
        assert (ours.early_launches > 0) == (step > 0)
        times = [bucket.launched_at for bucket in record.buckets]
        assert times[0] > 0
        assert times == sorted(times)
        assert times[-1] < record.backward_seconds + record.exposed_seconds
        assert record.grad_nbytes == layout.nbytes
        assert record.control_nbytes in (4 * (HEADER + len(layout.slots)), 8 * (HEADER + len(layout.slots)))
        assert record.sparse_nbytes == 0
        assert record.unused_here == record.unused_everywhere == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.number = 3
    ours.close()


def layouts_and_local_passes() -> None:
    ours = BucketDDP(OutOfOrder(), bucket_cap_mb=TINY)
    seen = []
    for step in range(4):
        for _ in range(2 if step == 2 else 0):
            with ours.no_sync():
                train(ours, step)
        train(ours, step)
        record = ours.last_pass()
        seen.append((record.rebuilt, record.layouts, record.local_passes))
    assert seen == [(False, 1, 0), (True, 2, 0), (False, 2, 2), (False, 2, 0)]
    ours.close()


def unused_parameters() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(Branches(), bucket_cap_mb=TINY)
    here = [("left.weight", "left.bias"), ("right.weight", "right.bias")]
    for step in range(3):
        ours.zero_grad()
        ours(batch(step, rank)[0], "right" if rank == 0 else "left").square().mean().backward()
        record = ours.last_pass()
        assert record.unused_here == ("idle", *here[rank])
        assert record.unused_everywhere == ("idle",)
    ours.module.idle.requires_grad_(False)
    ours(batch(3, rank)[0]).square().mean().backward()
    assert record.unused_everywhere == ("idle",), "a record does not change"
    assert ours.last_pass().unused_here == ours.last_pass().unused_everywhere == ()
    ours.close()


def sparse_gradients() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(Lookup())
    words, bag = tokens(0, rank)
    ours(words, bag, use_words=rank == 0, use_bag=False).square().mean().backward()
    record = ours.last_pass()
    most = torch.tensor(len(words.unique()) if rank == 0 else 0)
    dist.broadcast(most, src=0)
    assert record.sparse_nbytes == 2 * int(most) * (8 + 4 * 4)  # from 2 ranks, per row its index and 4 values
    assert record.unused_here == (("bag.weight",) if rank == 0 else ("words.weight", "bag.weight"))
    assert record.unused_everywhere == ("bag.weight",)
    assert "received for sparse gradients" in str(record)
    ours.close()


def dropped_pass() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(Fragile())
    train(ours, 0)
    before = ours.last_pass()
    loss = ours(batch(1, rank)[0], fail=True).sum()
    with pytest.raises(ArithmeticError), ours.backward_pass(loss):
        loss.backward()
    assert ours.last_pass() == before
    train(ours, 2)
    assert ours.last_pass().number == 2
    ours.close()


@pytest.mark.parametrize(
    "job", [buckets_of_a_pass, layouts_and_local_passes, unused_parameters, sparse_gradients, dropped_pass]
)
def test_the_record_says_what_the_pass_did(run_ranks: RunRanks, job: Callable[[], None]) -> None:
    run_ranks(2, job)


class SlowBackward(torch.autograd.Function):
    """The identity. Its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def late_rank() -> tuple[float, float]:
    """Rank 1's backward takes longer."""
    ours = BucketDDP(nn.Linear(8, 8))
    hidden = ours(batch(0, dist.get_rank())[0])
    loss = SlowBackward.apply(hidden, 0.6 if dist.get_rank() == 1 else 0.2).square().mean()
    with ours.backward_pass(loss):
        loss.backward()
    record = ours.last_pass()
    ours.close()
    return record.backward_seconds, record.exposed_seconds


def test_times_tell_backward_from_exposed_communication(run_ranks: RunRanks) -> None:
    (backward, exposed), (late_backward, _) = run_ranks(2, late_rank)
    assert backward >= 0.2
    assert late_backward >= 0.6
    assert exposed > 0.1, "rank 0 had to wait"


def table() -> str:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    train(ours, 0)
    train(ours, 1)
    record = ours.last_pass()
    ours.close()
    return str(record)


def test_the_table_is_readable(run_ranks: RunRanks) -> None:
    lines = run_ranks(2, table)[1].splitlines()
    assert re.fullmatch(r"pass 1, rank 1 of 2: backward [\d.]+ ms, exposed [\d.]+ ms \(host time\)", lines[0])
    assert re.search(r"KiB in \d+ buckets, [1-9]\d* launched early; control vector \d+ B; layout \d", lines[1])
    assert lines[2].split() == ["bucket", "launched", "size", "dtype", "device", "parameters"]
    assert re.fullmatch(r" +0 +[\d.]+ ms  early +[\d.]+ K?i?B  float32   cpu       head\.bias.*", lines[3])
    assert len({line.index("float32") for line in lines[3:]}) == 1


# -- the log -----------------------------------------------------------------------------------------


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs at level INFO and above."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_bucketddp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)


def log_of_three_passes() -> list[str]:
    with logged() as lines:
        ours = BucketDDP(OutOfOrder(), bucket_cap_mb=TINY)
        for step in range(3):
            train(ours, step)
        ours.close()
    return lines


def log_by_level() -> list[list[str]]:
    before = dist.get_debug_level()
    found = []
    try:
        for level in (dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL):
            dist.set_debug_level(level)
            found.append(log_of_three_passes())
    finally:
        dist.set_debug_level(before)
    return found


def require_details(lines: list[str]) -> None:
    kinds = ["layout" if "laid out" in line else line.split(",")[0] for line in lines]
    assert kinds == ["layout", "INFO pass 0", "layout", "INFO pass 1", "INFO pass 2"]
    assert all("exposed" in line and "last.bias" in line for line in lines if "INFO pass" in line)


def test_the_log_says_as_much_as_the_debug_level_asks(run_ranks: RunRanks) -> None:
    for rank, (off, info, detail) in enumerate(run_ranks(2, log_by_level)):
        assert off == []
        first, second = info
        assert first.startswith(f"INFO rank {rank}: gradients of 6 parameters laid out for pass 0: ")
        assert second.startswith(f"INFO rank {rank}: gradients of 6 parameters laid out for pass 1: ")
        assert "in 5 buckets, in launch order: 64 B middle.bias; 256 B middle.weight; " in first
        assert "in launch order: 256 B last.bias to middle.bias (3); " in second
        require_details(detail)


def test_the_environment_variable_sets_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # torch then checks its collectives too
    nursery = Nursery()
    pool = WorkerPool(2, nursery)
    try:
        for lines in pool.run(log_of_three_passes):
            require_details(lines)
    finally:
        pool.stop()
        nursery.end()
