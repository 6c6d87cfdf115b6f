"""``last_pass()``: its record, its pictures; what the logger says, and labels in torch's profiler."""

import dataclasses
import logging
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import ProfilerActivity, profile

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.layout.plan import size_text
from lightning_bucketddp.peers.control import HEADER
from lightning_bucketddp.reducer.record import PassRecord
from tests.inside import reducer_of
from tests.models import Branches, MixedDtypes, Mlp, OutOfOrder
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    backward,
    eventually,
    group_store,
    inputs_of,
    local_if,
    run_backward,
    taking,
    telling_of_waits,
)

WAYS: dict[str, list[Any]] = {  # options, and the profiler's name for the collective
    "all-reduce": [{}, "all-reduce"],
    "reduce-scatter": [{"shard_optimizer": True}, "reduce-scatter"],
    "two stages": [{"wire_dtype": torch.bfloat16}, "all-reduce"],
    "fp16 hook": [{"comm_hook": "fp16"}, "communication hook"],
    "hook": [{"comm_hook": allreduce_hook}, "communication hook"],
}


def train(ours: BucketDDP, step: int) -> None:
    ours.zero_grad()
    backward(ours, step)


def of_mlp(**options: Any) -> tuple[BucketDDP, PassRecord]:
    """A wrapper and the record of its third pass."""
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY, **options)
    for step in range(3):
        backward(ours, step)
    record = ours.last_pass()
    assert record is not None
    return ours, record


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
        assert sum(bucket.launched_early for bucket in record.buckets) == record.early_launches
        assert (record.early_launches > 0) == (step > 0)
        times = [0.0, *(bucket.launched_at for bucket in record.buckets)]
        times.append(record.backward_seconds + record.exposed_seconds)
        assert times == sorted(times)
        assert (record.grad_nbytes, record.sparse_nbytes) == (layout.nbytes, 0)
        assert record.control_nbytes in (4 * (HEADER + len(layout.slots)), 8 * (HEADER + len(layout.slots)))
        assert record.unused_here == record.unused_everywhere == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.number = 3


@on_ranks(2)
def test_the_record_counts_layouts_and_local_passes() -> None:
    ours = BucketDDP(OutOfOrder(), bucket_cap_mb=TINY)
    seen = []
    for local in (False, False, True, True, False, False):
        with local_if(ours, local):
            train(ours, 0)
        record = ours.last_pass()
        seen += [] if local else [(record.rebuilt, record.layouts, record.local_passes)]
    assert seen == [(False, 1, 0), (True, 2, 0), (False, 2, 2), (False, 2, 0)]


@on_ranks(2)
def test_the_record_names_unused_parameters() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(Branches(), bucket_cap_mb=0)
    used, unused = ("left", "right") if rank else ("right", "left")
    for step in range(3):
        ours.zero_grad()
        taking(step, used)(ours).backward()
        record = ours.last_pass()
        assert record.unused_here == ("idle", f"{unused}.weight", f"{unused}.bias")
        assert record.unused_everywhere == ("idle",)
    lines = str(record).splitlines()[-2:]
    assert lines[0] == f"  without a gradient on this rank: idle, {unused}.weight, {unused}.bias"
    assert lines[1] == "  without a gradient on any rank: idle"
    at_launch = {name: bucket.ready_at == bucket.launched_at for bucket in record.buckets for name in bucket.parameters}
    assert [at_launch[f"{name}.weight"] for name in (used, unused)] == [False, True], "when a bucket lacks gradients"
    ours.module.idle.requires_grad_(False)
    taking(3)(ours).backward()
    assert record.unused_everywhere == ("idle",), "a record does not change"
    assert ours.last_pass().unused_here == ours.last_pass().unused_everywhere == ()


@on_ranks(2)
def test_times_tell_backward_from_exposed_communication() -> None:
    rank, store, ours = dist.get_rank(), group_store(), BucketDDP(Mlp())
    output = ours(inputs_of(0))
    if rank == 1:
        output.register_hook(lambda _: eventually(lambda: store.add("rank 0 waits", 0)))
    output.register_hook(lambda _: time.sleep(0.2))
    with telling_of_waits(lambda: store.add("rank 0 waits", 1)) if rank == 0 else nullcontext():
        run_backward(ours, output.square().mean(), guarded=True)
    record = ours.last_pass()
    assert record.backward_seconds >= 0.2
    assert record.exposed_seconds >= 0.2 or rank == 1, "rank 0 had to wait"


@on_ranks(2, cases=WAYS)
def test_a_bucket_is_ready_then_launched_then_done(options: dict[str, Any], collective: str) -> None:
    ours, record = of_mlp(**options)
    output = ours(inputs_of(3))
    last = ours.module.get_parameter(record.buckets[-1].parameters[0])
    store = group_store()

    def wait(_: torch.Tensor) -> None:  # until the collective of the first bucket has ended
        store.add("in the last hook", 1)
        eventually(lambda: store.add("in the last hook", 0) == dist.get_world_size())
        this_pass = reducer_of(ours).this_pass
        assert this_pass is not None
        eventually(lambda: this_pass.buckets[0].launched and this_pass.buckets[0].work.done())
        time.sleep(0.05)

    handle = last.register_hook(wait)
    output.square().mean().backward()
    handle.remove()
    record = ours.last_pass()
    end = record.backward_seconds + record.exposed_seconds
    for bucket in record.buckets:
        assert 0 < bucket.ready_at <= bucket.launched_at <= bucket.done_at <= end
    assert [bucket.ready_at for bucket in record.buckets] == sorted(bucket.ready_at for bucket in record.buckets)
    assert record.buckets[0].done_at <= record.backward_seconds, "it was seen during backward"
    assert record.buckets[0].ready_at + 0.05 <= record.buckets[-1].ready_at

    assert not profiler._is_profiler_enabled, "private to torch; without it labels are always made"
    made = AssertionError("made although no profiler runs")
    with patch("lightning_bucketddp.grads.bucket.record_function", side_effect=made):
        backward(ours, 3)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert profiler._is_profiler_enabled
        backward(ours, 4)
    names = [event.name for event in profiled.events() if event.name.startswith("bucketddp: ")]
    assert sorted(names) == sorted(
        f"bucketddp: bucket {bucket.index}, {what}, {size_text(bucket.nbytes)}"
        for bucket in ours.last_pass().buckets
        for what in ("pack", collective, "wait")
    )


@on_ranks(2)
def test_the_table_and_the_plot_show_all_buckets(tmp_path: Path) -> None:
    _, record = of_mlp()
    lines = str(record).splitlines()
    assert re.fullmatch(r"pass 2, rank [01] of 2: backward [\d.]+ ms, exposed [\d.]+ ms \(host time\)", lines[0])
    assert re.search(r"KiB in \d+ buckets, [1-9]\d* launched early; control vector \d+ B; layout \d", lines[1])
    assert lines[2].split() == ["bucket", "launched", "size", "dtype", "device", "parameters"]
    assert re.fullmatch(r" +0 +[\d.]+ ms  early +[\d.]+ K?i?B  float32   cpu       head\.bias.*", lines[3])
    assert len({line.index("float32") for line in lines[3:]}) == 1

    path = tmp_path / f"{dist.get_rank()}.svg"
    record.plot(path)
    texts = re.findall("<!-- (.+) -->", path.read_text())  # beside each text, which is drawn as curves
    buckets = [f"bucket {bucket.index}, {size_text(bucket.nbytes)}" for bucket in record.buckets]
    assert [text for text in texts if text.startswith("bucket ")] == buckets
    assert {"end of backward", "gradients published", "launched to done"} <= set(texts)
    assert any(text.startswith(f"Pass 2, rank {record.rank}: backward") for text in texts)
    dataclasses.replace(record, buckets=()).plot(path)  # all gradients are sparse


def log_of_three_passes(level: dist.DebugLevel) -> list[str]:
    logger = logging.getLogger("lightning_bucketddp")
    logger.setLevel(logging.INFO)
    dist.set_debug_level(level)
    try:
        with patch.object(logger, "handle") as handle:
            ours = BucketDDP(OutOfOrder(), bucket_cap_mb=TINY)
            for step in range(3):
                train(ours, step)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
        logger.setLevel(logging.NOTSET)
    return [f"{record.levelname} {record.getMessage()}" for (record,), _ in handle.call_args_list]


@on_ranks(2)
def test_the_log_says_as_much_as_the_debug_level_asks() -> None:
    assert log_of_three_passes(dist.DebugLevel.OFF) == []
    lines = log_of_three_passes(dist.DebugLevel.INFO)
    for number, line in enumerate(lines):
        assert line.startswith(f"INFO rank {dist.get_rank()}: gradients of 6 parameters laid out for pass {number}: ")
    first, second = lines
    assert "in 5 buckets, in launch order: 64 B middle.bias; 256 B middle.weight; " in first
    assert "in launch order: 256 B last.bias to middle.bias (3); " in second
    lines = log_of_three_passes(dist.DebugLevel.DETAIL)
    kinds = ["layout" if "laid out" in line else line.split(",")[0] for line in lines]
    assert kinds == ["layout", "INFO pass 0", "layout", "INFO pass 1", "INFO pass 2"]
    assert all("exposed" in line and "last.bias" in line for line in lines if "INFO pass" in line)
