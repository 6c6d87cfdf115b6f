"""Each wait that orders streams or memory is needed: left out, it is found.

Not here: the wait for a hook's future (``comm/hooks.py``), which the CPU needs too, where its result is not there yet.
The host's wait for a copy (``comm/host_copy.py``), without which it reads memory that nobody has written. ``close()``,
which waits for the device before it frees memory (averages on a second stream in ``test_streams.py``).
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm import lane
from lightning_bucketddp.comm.lane import StreamLane, Streams
from lightning_bucketddp.comm.work import DirectWork, Stage, Stages, Work
from lightning_bucketddp.optim.lazy_all_gather import Arrival
from tests.accelerator import DEVICE, simulated
from tests.pool import RunRanks, on_ranks
from tests.simulated.training import Case, Pictures, TwoStreams, compare

BF16 = torch.bfloat16


class Unawaited:
    """A handle that nobody waits for."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def is_completed(self) -> bool:
        return self.handle.is_completed()

    def wait(self, *timeout: Any) -> None: ...


def in_lane(change: Callable[[Stage], Stage]) -> AbstractContextManager[object]:
    """Let the lane for accelerators see other stages."""
    run = StreamLane.run

    def changed(self: StreamLane, stages: Stages, common: bool = False) -> Work:
        return run(self, map(change, stages), common)

    return patch.object(StreamLane, "run", changed)


def without_wait_stream(self: Streams, grads: Any) -> None:
    for stream in self.seen:
        for grad in grads:
            grad.record_stream(torch.accelerator.current_stream(stream.device))


def without_record_stream(self: Streams, grads: Any) -> None:
    for stream in self.seen:
        current = torch.accelerator.current_stream(stream.device)
        if current != stream:
            current.wait_stream(stream)


def first_stream_alone(self: Arrival) -> None:
    if self._wait is not None:
        self._wait()
        self._wait = None
    self.forget()


def wait_on_host_alone(work: DirectWork, wait: Any = DirectWork.wait) -> None:
    if work._on_host:
        wait(work)


MUTANTS: dict[str, tuple[Callable[[], AbstractContextManager[object]], Case]] = {
    "gradients of other streams, wait": (
        lambda: patch.object(Streams, "wait_for", without_wait_stream),
        Case({"bucket_cap_mb": 25}, model=TwoStreams),
    ),
    "gradients of other streams, memory": (
        lambda: patch.object(Streams, "wait_for", without_record_stream),
        Case({"bucket_cap_mb": 25}, model=TwoStreams),
    ),
    "side stream waits for the collective": (
        lambda: in_lane(lambda stage: Stage(Unawaited(stage.handle), stage.memory)),
        Case({"wire_dtype": BF16}),
    ),
    "current stream waits for the side stream": (
        lambda: patch.object(lane._StreamWork, "wait", lambda self: None),
        Case({"wire_dtype": BF16}),
    ),
    "current stream waits for a bucket": (
        lambda: patch.object(DirectWork, "wait", wait_on_host_alone),
        Case(),
    ),
    "current stream waits for a collective": (
        lambda: patch.object(DirectWork, "wait", wait_on_host_alone),
        Case({"module_buffers": "mean"}, model=Pictures),
    ),
    "every stream awaits parameters": (
        lambda: patch.object(Arrival, "wait_here", first_stream_alone),
        Case({"shard_optimizer": True, "bucket_cap_mb": 25}, model=TwoStreams),
    ),
}


def finds(name: str) -> str:
    mutate, case = MUTANTS[name]
    with mutate(), pytest.raises((AssertionError, RuntimeError)) as caught:
        compare(case)
    with suppress(RuntimeError):  # it may have started what a rank that raised before does not join
        torch.accelerator.synchronize()
    simulated().clear()
    return str(caught.value)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wait_that_is_left_out_is_found(name: str, run_ranks: RunRanks) -> None:
    """By the checker, by the weights, or by the control vector, whose sum is then no sum."""
    found = run_ranks(2, finds, name, fresh=True)
    assert any(re.search(r"nothing orders|not close|ranks met in pass", text) for text in found), found


def without_record_stream_at_all() -> AbstractContextManager[object]:
    return patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)


@on_ranks(2)
def test_memory_of_a_first_stage_is_kept_for_the_side_stream() -> None:
    for mutate, is_found in ((nullcontext, False), (without_record_stream_at_all, True)):
        total = torch.zeros(1000, device=DEVICE)

        def stages(into: torch.Tensor) -> Stages:
            sent = torch.ones(1000, device=DEVICE)
            yield Stage(dist.all_reduce(sent, async_op=True), (sent,))
            into.add_(sent)

        torch.accelerator.synchronize()
        with mutate():
            reduction = StreamLane(DEVICE, pytest.fail).run(stages(total))
            torch.ones(1000, device=DEVICE)  # takes the memory, once it is free
        reduction.wait()
        assert bool(simulated().unordered_accesses()) is is_found
        torch.accelerator.synchronize()
        simulated().clear()
