"""``last_pass()``, and what the logger says at each ``TORCH_DISTRIBUTED_DEBUG``."""

import dataclasses
import logging
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.peers.control import HEADER
from tests.models import Branches, Fragile, Lookup, MixedDtypes, Mlp, OutOfOrder, batch, tokens
from tests.pool import Nursery, RunRanks, WorkerPool, on_ranks
from tests.reference import TINY, backward, run_backward


def train(ours: BucketDDP, step: int) -> None:
    ours.zero_grad()
    backward(ours, step)


@on_ranks(2)
def test_the_record_holds_what_became_of_each_bucket() -> None:
    ours = BucketDDP(MixedDtypes(), bucket_cap_mb=TINY)
    assert ours.last_pass() is None
    for step in range(3):
        train(ours, step)
        record, layout = ours.last_pass(), ours.layout
        assert (record.number, record.rank, record.world_size) == (step, dist.get_rank(), 2)
        for index, (found, bucket) in enumerate(zip(record.buckets, layout.buckets, strict=True)):
            assert (found.index, found.nbytes) == (index, layout.bucket_nbytes(bucket))
            assert found.parameters == tuple(layout.slots[slot].spec.name for slot in bucket.slots)
            assert (found.dtype, found.device) == (layout.buffers[bucket.buffer].dtype, "cpu")
            assert found.launched_early == (found.launched_at <= record.backward_seconds)
        assert sum(bucket.launched_early for bucket in record.buckets) == ours.last_pass().early_launches
        assert (ours.last_pass().early_launches > 0) == (step > 0)
        times = [bucket.launched_at for bucket in record.buckets]
        assert times[0] > 0
        assert times == sorted(times)
        assert times[-1] < record.backward_seconds + record.exposed_seconds
        assert (record.grad_nbytes, record.sparse_nbytes) == (layout.nbytes, 0)
        assert record.control_nbytes in (4 * (HEADER + len(layout.slots)), 8 * (HEADER + len(layout.slots)))
        assert record.unused_here == record.unused_everywhere == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.number = 3


@on_ranks(2)
def test_the_record_counts_layouts_and_local_passes() -> None:
    ours = BucketDDP(OutOfOrder(), bucket_cap_mb=TINY)
    seen = []
    for step in range(4):
        with ours.no_sync():
            for _ in range(2 if step == 2 else 0):
                train(ours, step)
        train(ours, step)
        record = ours.last_pass()
        seen.append((record.rebuilt, record.layouts, record.local_passes))
    assert seen == [(False, 1, 0), (True, 2, 0), (False, 2, 2), (False, 2, 0)]


@on_ranks(2)
def test_the_record_names_unused_parameters() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(Branches(), bucket_cap_mb=TINY)
    unused = "right" if rank else "left"
    for step in range(3):
        ours.zero_grad()
        ours(batch(step, rank)[0], "left" if rank else "right").square().mean().backward()
        record = ours.last_pass()
        assert record.unused_here == ("idle", f"{unused}.weight", f"{unused}.bias")
        assert record.unused_everywhere == ("idle",)
    ours.module.idle.requires_grad_(False)
    ours(batch(3, rank)[0]).square().mean().backward()
    assert record.unused_everywhere == ("idle",), "a record does not change"
    assert ours.last_pass().unused_here == ours.last_pass().unused_everywhere == ()
    ours.close()
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


@on_ranks(2)
def test_a_dropped_pass_leaves_no_record() -> None:
    ours = BucketDDP(Fragile())
    train(ours, 0)
    before = ours.last_pass()
    with pytest.raises(ArithmeticError):
        run_backward(ours, ours(batch(1, dist.get_rank())[0], fail=True).sum(), guarded=True)
    assert ours.last_pass() == before


@on_ranks(2)
def test_times_tell_backward_from_exposed_communication() -> None:
    seconds = 0.6 if dist.get_rank() == 1 else 0.2
    ours = BucketDDP(nn.Linear(8, 8))
    hidden = ours(batch(0, dist.get_rank())[0])
    hidden.register_hook(lambda _: time.sleep(seconds))
    run_backward(ours, hidden.square().mean(), guarded=True)
    record = ours.last_pass()
    assert record.backward_seconds >= seconds
    assert record.exposed_seconds > 0.1 or dist.get_rank() == 1, "rank 0 had to wait"


@on_ranks(2)
def test_the_table_is_readable() -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    train(ours, 0)
    train(ours, 1)
    lines = str(ours.last_pass()).splitlines()
    ours.close()
    assert re.fullmatch(r"pass 1, rank [01] of 2: backward [\d.]+ ms, exposed [\d.]+ ms \(host time\)", lines[0])
    assert re.search(r"KiB in \d+ buckets, [1-9]\d* launched early; control vector \d+ B; layout \d", lines[1])
    assert lines[2].split() == ["bucket", "launched", "size", "dtype", "device", "parameters"]
    assert re.fullmatch(r" +0 +[\d.]+ ms  early +[\d.]+ K?i?B  float32   cpu       head\.bias.*", lines[3])
    assert len({line.index("float32") for line in lines[3:]}) == 1


def log_of_three_passes(level: dist.DebugLevel | None = None) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger, before = logging.getLogger("lightning_bucketddp"), dist.get_debug_level()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dist.set_debug_level(before if level is None else level)
    try:
        ours = BucketDDP(OutOfOrder(), bucket_cap_mb=TINY)
        for step in range(3):
            train(ours, step)
        ours.close()
    finally:
        dist.set_debug_level(before)
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    return lines


def test_the_log_says_as_much_as_the_debug_level_asks(run_ranks: RunRanks) -> None:
    assert run_ranks(2, log_of_three_passes, dist.DebugLevel.OFF) == [[], []]
    for rank, lines in enumerate(run_ranks(2, log_of_three_passes, dist.DebugLevel.INFO)):
        assert len(lines) == 2
        for number, line in enumerate(lines):
            assert line.startswith(f"INFO rank {rank}: gradients of 6 parameters laid out for pass {number}: ")
        assert "in 5 buckets, in launch order: 64 B middle.bias; 256 B middle.weight; " in lines[0]
        assert "in launch order: 256 B last.bias to middle.bias (3); " in lines[1]


def test_the_environment_variable_sets_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # torch then checks its collectives too
    nursery = Nursery()
    pool = WorkerPool(2, nursery)
    try:
        for lines in pool.run(log_of_three_passes):
            kinds = ["layout" if "laid out" in line else line.split(",")[0] for line in lines]
            assert kinds == ["layout", "INFO pass 0", "layout", "INFO pass 1", "INFO pass 2"]
            assert all("exposed" in line and "last.bias" in line for line in lines if "INFO pass" in line)
    finally:
        pool.stop()
        nursery.end()
