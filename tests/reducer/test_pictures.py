"""A pass in pictures: times in the record, the plot, the trace, and labels in torch's profiler."""

import json
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.layout.plan import size_text
from lightning_bucketddp.reducer import labels
from lightning_bucketddp.reducer.record import PassRecord
from tests.models import Branches, Mlp, batch
from tests.pool import on_ranks
from tests.reference import TINY, backward, inputs_of

WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "reduce-scatter": {"shard_optimizer": True},
    "two stages": {"wire_dtype": torch.bfloat16},
    "hook": {"comm_hook": "fp16"},
}


def of_mlp(**options: Any) -> tuple[BucketDDP, PassRecord]:
    """A wrapper and the record of its third pass."""
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY, **options)
    for step in range(3):
        backward(ours, step)
    record = ours.last_pass()
    assert record is not None
    return ours, record


@on_ranks(2, cases=WAYS)
def test_a_bucket_is_ready_then_launched_then_done(options: dict[str, Any]) -> None:
    ours, _ = of_mlp(**options)
    output = ours(inputs_of(3))
    params = dict(ours.module.named_parameters())
    last = params[ours.last_pass().buckets[-1].parameters[0]]
    handle = last.register_hook(lambda _: time.sleep(0.3))  # meanwhile the collective of the first bucket ends
    output.square().mean().backward()
    handle.remove()
    record = ours.last_pass()
    for it in record.buckets:
        assert 0 < it.ready_at <= it.launched_at <= it.done_at <= record.backward_seconds + record.exposed_seconds
    assert [it.ready_at for it in record.buckets] == sorted(it.ready_at for it in record.buckets)
    assert record.buckets[0].done_at <= record.backward_seconds, "it was seen during backward"
    assert record.buckets[0].ready_at + 0.25 < record.buckets[-1].ready_at


@on_ranks(2)
def test_a_bucket_without_all_gradients_is_ready_when_it_is_launched() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(Branches(), bucket_cap_mb=0)
    for step in range(2):
        ours(batch(step, rank)[0], "left" if rank else "right").square().mean().backward()
    record = ours.last_pass()
    ready = {name: it.ready_at == it.launched_at for it in record.buckets for name in it.parameters}
    assert ready["right.weight" if rank else "left.weight"]
    assert not ready["left.weight" if rank else "right.weight"]


@on_ranks(2)
def test_a_trace_has_an_event_for_each_bucket(tmp_path: Path) -> None:
    _, record = of_mlp()
    path = tmp_path / f"{dist.get_rank()}.json"
    record.to_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = {it["name"]: it for it in events if it["ph"] == "X"}
    assert len(spans) == len(record.buckets) + 2 > 4
    assert {it["pid"] for it in events} == {record.rank}
    assert spans["backward"]["dur"] == spans["exposed communication"]["ts"] == record.backward_seconds * 1e6
    for row, it in enumerate(record.buckets, 1):
        (found,) = (value for name, value in spans.items() if name.startswith(f"bucket {it.index}, "))
        assert (found["tid"], found["ts"]) == (row, it.launched_at * 1e6)
        assert found["ts"] + found["dur"] == pytest.approx(it.done_at * 1e6)
        assert found["args"]["parameters"] == list(it.parameters)
        (ready,) = (it for it in events if it["ph"] == "i" and it["tid"] == row)
        assert ready["ts"] == it.ready_at * 1e6
    names = {it["tid"]: it["args"]["name"] for it in events if it["name"] == "thread_name"}
    assert names == {0: "pass", **{row: f"bucket {it.index}" for row, it in enumerate(record.buckets, 1)}}


@on_ranks(2)
def test_a_plot_shows_the_buckets_and_the_end_of_backward(tmp_path: Path) -> None:
    _, record = of_mlp()
    path = tmp_path / f"{dist.get_rank()}.svg"
    record.plot(path)
    texts = re.findall("<!-- (.+) -->", path.read_text())  # beside each text, which is drawn as curves
    assert [it for it in texts if it.startswith("bucket ")] == [
        f"bucket {it.index}, {size_text(it.nbytes)}" for it in record.buckets
    ]
    assert {"end of backward", "gradients published", "launched to done"} <= set(texts)
    assert any(it.startswith(f"Pass 2, rank {record.rank}: backward") for it in texts)


@on_ranks(2, cases=WAYS)
def test_the_profiler_shows_what_becomes_of_each_bucket(options: dict[str, Any]) -> None:
    ours, _ = of_mlp(**options)
    assert not profiler._is_profiler_enabled, "private to torch; without it labels are always made"
    with patch.object(labels, "record_function", side_effect=AssertionError("made although no profiler runs")):
        backward(ours, 3)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert profiler._is_profiler_enabled
        backward(ours, 4)
    names = [event.name for event in profiled.events() if event.name.startswith("bucketddp: ")]
    collective = {"shard_optimizer": "reduce-scatter", "comm_hook": "fp16_compress_hook"}.get(
        next(iter(options), ""), "all-reduce"
    )
    expected = [
        f"bucketddp: bucket {it.index}, {what}, {size_text(it.nbytes)}"
        for it in ours.last_pass().buckets
        for what in ("pack", collective, "wait")
    ]
    assert sorted(names) == sorted(expected)
