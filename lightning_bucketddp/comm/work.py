"""A collective under way, of one or several stages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

POLL_SECONDS = 0.5
"""How often a rank polls while it waits for a collective."""

AWAKE_SECONDS = 0.0003
"""How long a thread that waits for a collective stays awake. To wake it up takes as long as a small collective."""

_let_others_run: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))  # Windows has no sched_yield


class Handle(Protocol):
    """The part of ``dist.Work`` that :class:`Work` needs."""

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


class Work:
    """A collective under way: a sequence of stages, the first of which has been started.

    A gradient's bucket with ``shard_group_size`` and ``wire_dtype``, for example, has three::

        all-to-all inside, sum  ->  all-to-all across, sum  ->  all-gather across, copy

    The completion of a stage does not start the next one: collectives complete in another order on each rank. The
    program starts it. All ranks start the stages on one process group in the same order.

    Args:
        handle: What torch returned for the first stage; None if there is nothing to wait for (one rank).
        finish: Called once, on the waiting thread, when the stage has completed.
        on_host: Whether the host waits for the stage (CPU tensors). On accelerators the current stream waits.
        left_behind: Called with the error when a wait raises. The collective is still under way then.
        sends_more: Whether it may start further collectives by itself. :meth:`start_next` waits for it then, so that
            no other collective comes in between.
    """

    def __init__(
        self,
        handle: Handle | None = None,
        finish: Callable[[], object] | None = None,
        on_host: bool = False,
        left_behind: Callable[[str], None] = lambda error: None,
        sends_more: bool = False,
    ) -> None:
        self._handle, self._finish, self._on_host = handle, finish, on_host
        self.left_behind, self._sends_more = left_behind, sends_more
        self._later: list[Callable[[], Work]] = []

    def then(self, start: Callable[[], Work]) -> Work:
        """Add a stage, and return this work.

        Args:
            start: Starts it; called when the stage before has completed. The work that it returns may have stages too.
        """
        self._later.append(start)
        return self

    @property
    def in_last_stage(self) -> bool:
        """Whether nothing is left to start."""
        return not self._later

    def done(self) -> bool:
        """Whether nothing is left to start or to wait for."""
        handle = self._handle  # read once: the stage thread may take it away
        return self.in_last_stage and (handle is None or handle.is_completed())

    def known_done(self) -> bool:
        """Whether nothing is left to wait for, as far as the host knows without asking a device."""
        done = getattr(self._handle, "all_done", self.done)  # a stage thread knows
        return (self._on_host or self._handle is None) and done()

    def start_next(self, poll: Callable[[], None] | None = None) -> bool:
        """Wait for the present stage and start the next one, if there is one.

        Args:
            poll: As for :meth:`wait`.

        Returns:
            Whether it has started one.

        Raises:
            RuntimeError: As :meth:`wait`.
        """
        if self._later:
            self.complete(poll)
            started = self._later[0]()
            self._handle, self._finish, self._on_host = started._handle, started._finish, started._on_host
            self.left_behind, self._sends_more = started.left_behind, started._sends_more
            self._later[:1] = started._later
            return True
        if self._sends_more:
            self.complete(poll)
        return False

    def proceed(self, poll: Callable[[], None] | None = None) -> None:
        """Start all stages, and wait for all but the last. Other collectives may start then.

        Args:
            poll: As for :meth:`wait`.

        Raises:
            RuntimeError: As :meth:`wait`.
        """
        while self.start_next(poll):
            pass

    def wait(self, poll: Callable[[], None] | None = None) -> None:
        """Wait for all stages: on the host, or on the current stream for an accelerator.

        Args:
            poll: Called every :data:`POLL_SECONDS` while the host waits. An exception in it ends the wait.

        Raises:
            RuntimeError: From the backend, when a peer is gone or the time is up.
        """
        self.proceed(poll)
        if self._handle is not None and self._on_host:
            _stay_awake(self._handle)
        self.complete(poll)

    def settle(self) -> bool:
        """Finish the last stage if it has completed, without waiting.

        It does so on the host only, as on accelerators the current stream would wait. It ignores a collective that
        failed: :meth:`wait` raises.

        Returns:
            Whether nothing is left to wait for.
        """
        if not self._on_host or not self.done():
            return False
        try:
            self.complete(None)
        except Exception:  # raised anew by every wait
            return False
        return True

    def complete(self, poll: Callable[[], None] | None = None) -> None:
        """Wait for the present stage and finish it. No haste: :meth:`wait` stays awake for a moment.

        Args:
            poll: As for :meth:`wait`.

        Raises:
            RuntimeError: As :meth:`wait`.
        """
        if self._handle is not None:
            try:
                if poll is not None and self._on_host:
                    _poll_until_completed(self._handle, poll)
                self._handle.wait()
            except BaseException as error:
                self.left_behind(str(error))
                raise
            self._handle = None
        if self._finish is not None:
            self._finish()
            self._finish = None


def _stay_awake(handle: Handle) -> None:
    """Look for a moment whether the collective has completed, and let other threads run in between."""
    until = time.monotonic() + AWAKE_SECONDS
    while not handle.is_completed() and time.monotonic() < until:
        _let_others_run()


def _poll_until_completed(handle: Handle, poll: Callable[[], None]) -> None:
    """Block the host until the collective has completed, and call ``poll`` every :data:`POLL_SECONDS`.

    It waits with a timeout, after which gloo's collectives go on. The alternative is a callback of the collective's
    future. It takes the interpreter's lock in gloo's thread, which is slower than a small collective.
    """
    while not handle.is_completed():
        begin = time.monotonic()
        try:
            handle.wait(timedelta(seconds=POLL_SECONDS))
            return
        except RuntimeError:
            if handle.is_completed():
                return  # in time after all, or with an error that the caller's wait raises
            if time.monotonic() - begin < POLL_SECONDS / 2:
                raise  # not for want of time
        poll()  # not in the handler: what it raises has nothing to do with the time being up
