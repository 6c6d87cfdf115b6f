"""A collective under way, and the stages of a reduction.

A reduction is a generator: it starts a collective, yields it as a :class:`Stage`, works on what has arrived, starts the
next one, and so on. An all-reduce in low precision, for example::

    pack the bucket  ->  all-to-all  ->  sum the ranks' parts  ->  all-gather  ->  copy into the bucket

A lane (:mod:`lightning_bucketddp.comm.lane`) runs the generator. It says who waits for a stage, and when the next
begins.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

POLL_SECONDS = 0.5
"""How often a rank polls while it waits for a collective."""

AWAKE_SECONDS = 0.0003
"""How long a thread that waits for a collective stays awake. To wake it up takes as long as a small collective."""

_let_others_run: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))  # Windows has no sched_yield


class Handle(Protocol):
    """The part of ``dist.Work`` that lanes need."""

    def is_completed(self) -> bool:
        """Whether a wait would return, or raise, at once."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Wait; raise ``RuntimeError`` if the collective failed or the time is up."""


class Handles:
    """Several collectives as one :class:`Handle`.

    Args:
        handles: What torch returned for each.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def is_completed(self) -> bool:
        """Whether all have completed."""
        return all(handle.is_completed() for handle in self._handles)

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """Wait for all; each may take as long as ``timeout``."""
        for handle in self._handles:
            handle.wait() if timeout is None else handle.wait(timeout)


class FutureHandle:
    """A future as a :class:`Handle`. Whoever needs its value waits for it without a timeout, or the stream does.

    Args:
        future: The future.
    """

    def __init__(self, future: torch.Future[Any]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        """Whether it has a value, or an error."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """Wait until the time is up; does nothing without a timeout."""
        if timeout is not None:
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                raise RuntimeError("the time is up")


class Stage(NamedTuple):
    """A collective that a reduction has started.

    Attributes:
        handle: What torch returned.
        memory: Tensors made on the stream that started it, and used by this stage or by what follows it.
        followed: Whether something is to follow as soon as it is complete: arithmetic, or another collective.
    """

    handle: Handle
    memory: tuple[Tensor, ...] = ()
    followed: bool = True


Stages = Iterator[Stage]


class Work:
    """A collective or a reduction under way. This base class is one with nothing to wait for."""

    def done(self) -> bool:
        """Whether nothing is left to wait for, as far as the host knows without asking a device."""
        return True

    def wait(self) -> None:
        """Wait for all stages: on the host for CPU tensors; the current stream waits for those of accelerators.

        Raises:
            RuntimeError: From the backend, when a peer is gone or the time is up. Every wait raises it anew.
        """


class DirectWork(Work):
    """The thread that waits also carries the stages on.

    Args:
        stage: The first stage, which has been started; None if there is none.
        stages: The others.
        on_host: Whether the host waits for them.
        left_behind: Called with the error when a wait raises. The collective is still under way then.
    """

    def __init__(self, stage: Stage | None, stages: Stages, on_host: bool, left_behind: Callable[[str], None]) -> None:
        self._stage, self._stages, self._on_host, self._left_behind = stage, stages, on_host, left_behind

    def done(self) -> bool:
        """Whether nothing is left to wait for, but perhaps arithmetic to do."""
        return self._stage is None or (self._on_host and self._stage.handle.is_completed())

    def wait(self) -> None:
        """Wait for each stage and start the next."""
        while self._stage is not None:
            try:
                if self._on_host:
                    stay_awake(self._stage.handle.is_completed)
                    wait_for(self._stage.handle)
                else:
                    self._stage.handle.wait()
            except BaseException as error:
                self._left_behind(str(error))
                raise
            self._stage = next(self._stages, None)


class _Polls(threading.local):
    poll: Callable[[], None] | None = None


_polls = _Polls()


@contextmanager
def polling(poll: Callable[[], None]) -> Iterator[None]:
    """Context in which this thread polls while it waits for collectives of the CPU.

    Args:
        poll: Called every :data:`POLL_SECONDS`. An exception in it ends the wait.
    """
    before, _polls.poll = _polls.poll, poll
    try:
        yield
    finally:
        _polls.poll = before


def wait_for(handle: Handle) -> None:
    """Wait on the host for a collective, and poll meanwhile, inside :func:`polling`.

    It waits with a timeout, after which gloo's collectives go on. The alternative is a callback of the collective's
    future. It takes the interpreter's lock in gloo's thread, which is slower than a small collective.
    """
    poll = _polls.poll
    while poll is not None and not handle.is_completed():
        begin = time.monotonic()
        try:
            handle.wait(timedelta(seconds=POLL_SECONDS))
            break
        except RuntimeError:
            if handle.is_completed():
                break  # in time after all, or with an error that the last wait raises
            if time.monotonic() - begin < POLL_SECONDS / 2:
                raise  # another error than a timeout
        poll()  # not in the handler: its errors have nothing to do with the timeout
    handle.wait()


def stay_awake(completed: Callable[[], bool]) -> None:
    """Look for a moment whether something has completed, and let other threads run in between."""
    until = time.monotonic() + AWAKE_SECONDS
    while not completed() and time.monotonic() < until:
        _let_others_run()
