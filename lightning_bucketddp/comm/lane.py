"""Lanes run the stages of reductions: in which thread, on which stream, and who waits.

A lane runs the reductions that it is given first in, first out, and in the same order on every rank. What streams other
than its own do with a tensor on an accelerator::

    tensor               made on      used on                ordered by                        memory is kept by
    gradient             its stream   packing                Streams.wait_for                  record_stream
    bucket               any          packing, collective,   the collective's own waits; at    the wrapper; where it is
                                      side                   the end the current stream waits  freed, record_stream
                                                             for the collective or the side
                                                             stream
    sent, received       packing      collective, side       the same                          record_stream
    made between stages  side         collective, side       the collective's own waits        the side stream's order
    stashed shard        root         current                autograd, at its end              record_stream
    control vector       current      current, host          an event, read one pass later     the exchange

A lane on an accelerator never waits on the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.work import DirectWork, FutureHandle, Stage, Stages, Work, polling, stay_awake, wait_for


class Lane(Protocol):
    """Runs reductions."""

    def run(self, stages: Stages, common: bool = False) -> Work:
        """Run a reduction's stages, after those of the reductions before.

        Args:
            stages: The stages.
            common: Whether they start in the group of all ranks. Then the thread that trains starts them, so that ranks
                that are in different passes find one another.

        Returns:
            The work to wait for.
        """


def lane_for(collectives: Collectives, device: torch.device, collectives_each: int, starts_here: bool) -> Lane:
    """The lane for reductions of gradients on a device.

    Args:
        collectives: The group of all ranks that train together.
        device: The gradients' device.
        collectives_each: How many collectives a reduction starts, one after the other.
        starts_here: Whether the thread that trains starts the first ones.
    """
    if is_accelerator(device):
        return StreamLane(device, collectives.leave_behind)
    if _may_have_threads(collectives) and (collectives_each > 1 or not starts_here):
        return ThreadLane(collectives.leave_behind, starts_here)
    return InlineLane(collectives)


def separate_stages(
    collectives: Collectives,
    first: Collectives | None,
    second: Collectives | None,
    device: torch.device,
    one_machine: bool,
) -> None:
    """Give stages of reductions groups of their own where threads start them. All ranks must call this.

    Args:
        collectives: The group of all ranks that train together.
        first: The collectives of first stages. On one machine the thread that trains starts them. None if they have a
            group of their own already.
        second: Those of which the second stage follows a first one of the same ranks; None if there are none.
        device: The gradients' device.
        one_machine: Whether the ranks share one machine.
    """
    if is_accelerator(device) or not _may_have_threads(collectives):
        return
    if first is not None and not one_machine and first.world_size > 1:
        first.of_stage[0] = collectives.split(first.made_of)
    if second is not None and second.world_size > 2:  # two ranks have no second stage
        second.of_stage[1] = collectives.split(second.made_of)


def _may_have_threads(collectives: Collectives) -> bool:
    """Whether threads may have process groups of their own."""
    return collectives.world_size > 1 and collectives.has_all_processes()


class InlineLane:
    """The thread that trains starts reductions, and carries them on when it waits for them.

    Args:
        collectives: The group.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def run(self, stages: Stages, common: bool = False) -> Work:
        """Start the first stage."""
        return DirectWork(next(stages, None), stages, True, self._collectives.leave_behind)


class StreamLane:
    """Accelerators: the first stage starts on the current stream, further ones follow on one side stream, all at once.

    If nothing has to follow at once, the stream that waits at the end carries on. Then no side stream is needed.

    Args:
        device: The device.
        left_behind: Called with the error when a wait raises.
    """

    def __init__(self, device: torch.device, left_behind: Callable[[str], None]) -> None:
        self._device, self._left_behind = device, left_behind
        self._side: torch.Stream | None = None
        self._queued = self._awaited = 0  # reductions on the side stream; those that the current stream has waited for

    def run(self, stages: Stages, common: bool = False) -> Work:
        """Queue all stages. The host waits for none."""
        stage = next(stages, None)
        if stage is None or not stage.followed:
            return DirectWork(stage, stages, False, self._left_behind)
        if self._side is None:
            self._side = torch.Stream(self._device)
        for tensor in stage.memory:  # it may be freed here before the side stream has come to it
            tensor.record_stream(self._side)
        with self._side:
            while stage is not None:
                stage.handle.wait()  # the side stream waits
                stage = next(stages, None)
        self._queued += 1
        return _StreamWork(self, self._queued)

    def has_awaited(self, number: int) -> bool:
        """Whether a stream has waited for so many reductions on the side stream."""
        return self._awaited >= number

    def wait(self) -> None:
        """Let the current stream wait for all that is queued on the side stream, by one event."""
        assert self._side is not None
        # Of the gradients' device: backward may end in another device's thread.
        torch.accelerator.current_stream(self._device).wait_stream(self._side)
        self._awaited = self._queued


class _StreamWork(Work):
    def __init__(self, lane: StreamLane, number: int) -> None:
        self._lane, self._number = lane, number

    def done(self) -> bool:
        return self._lane.has_awaited(self._number)

    def wait(self) -> None:
        if not self.done():
            self._lane.wait()


# Private. The public function makes two more calls of Python for each gradient.
current_stream: Callable[[int], torch.Stream] = getattr(
    torch._C, "_accelerator_getStream", torch.accelerator.current_stream
)
"""The current stream of the device at an index."""


class Streams:
    """The streams on which an accelerator made the gradients of a pass.

    Attributes:
        seen: These streams. Each device has a thread of autograd, which adds to them.
    """

    def __init__(self) -> None:
        self.seen: set[torch.Stream] = set()

    def forget(self) -> None:
        """Forget the streams of earlier passes, whose gradients are packed."""
        self.seen.clear()

    def wait_for(self, grads: Iterable[Tensor]) -> None:
        """Let the current stream read gradients that were made on any of the streams."""
        for stream in tuple(self.seen):  # another device's thread may add to them meanwhile
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
                for grad in grads:  # their memory must not be used again before they have been read
                    grad.record_stream(torch.accelerator.current_stream(grad.device))


def used_here(*tensors: Tensor) -> None:
    """Keep accelerators' memory that is freed next until the current stream, which need not be its own, has used it."""
    for tensor in tensors:
        if is_accelerator(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class ThreadLane:
    """CPU ranks on several machines: a thread packs and starts, another one waits and carries on.

    There is one thread per stage, and each stage has a process group of its own (:meth:`Collectives.stage`). So every
    rank starts the collectives of a group in the same order. After an error no stage is started any more. Threads start
    when they are first needed, and end with this object.

    Args:
        left_behind: Called with the error when a wait raises.
        starts_here: Whether the calling thread starts first stages, in the common group.
    """

    def __init__(self, left_behind: Callable[[str], None], starts_here: bool) -> None:
        self._left_behind, self._starts_here = left_behind, starts_here
        self._state = _State()
        self._queue: SimpleQueue[_ThreadWork | None] | None = None

    def run(self, stages: Stages, common: bool = False) -> Work:
        """Hand a reduction over to the threads."""
        if common:
            return DirectWork(next(stages, None), stages, True, self._left_behind)
        stage = next(stages, None) if self._starts_here else None
        work = _ThreadWork(stages, stage, self._state, self._left_behind)
        if self._queue is None:
            self._queue = _start_thread()
            weakref.finalize(self, _end, self._queue, self._state.ended)
        self._queue.put(work)
        return work


class _State:
    """What the reductions of a lane share.

    Idle threads do not hold it: an error holds the frames that it went through. If these hold the lane, it never ends.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def raise_if_over(self) -> None:
        if self.ended.is_set():
            raise RuntimeError("the wrapper was closed")
        if self.error is not None:
            raise self.error


def _start_thread() -> SimpleQueue[_ThreadWork | None]:
    queue = SimpleQueue[_ThreadWork | None]()
    threading.Thread(target=_run, args=(queue,), name="bucketddp-lane", daemon=True).start()
    return queue


def _run(queue: SimpleQueue[_ThreadWork | None]) -> None:
    following: SimpleQueue[_ThreadWork | None] | None = None
    with torch.no_grad():
        while (work := queue.get()) is not None:
            if work.advance():
                following = following or _start_thread()
                following.put(work)
            del work
    if following is not None:
        following.put(None)


def _end(queue: SimpleQueue[_ThreadWork | None], ended: threading.Event) -> None:
    ended.set()
    queue.put(None)


class _ThreadWork(Work):
    def __init__(self, stages: Stages, stage: Stage | None, state: _State, left_behind: Callable[[str], None]) -> None:
        self._stages, self._stage, self._state, self._left_behind = stages, stage, state, left_behind
        self._finished = torch.futures.Future[None]()
        self._error: BaseException | None = None

    def advance(self) -> bool:
        """Wait for the present stage, and start the next. Returns whether there is one to wait for."""
        try:
            self._state.raise_if_over()
            with polling(self._state.raise_if_over):
                if self._stage is not None:
                    wait_for(self._stage.handle)
                self._stage = next(self._stages, None)
            if self._stage is not None:
                return True
        except BaseException as error:  # raised by every wait
            self._error = self._state.error = error
        self._finished.set_result(None)
        return False

    def done(self) -> bool:
        return self._finished.done() and self._error is None

    def wait(self) -> None:
        try:
            stay_awake(self._finished.done)
            wait_for(FutureHandle(self._finished))
            self._finished.wait()
            if self._error is not None:
                raise self._error
        except BaseException as error:
            self._left_behind(str(error))
            raise
