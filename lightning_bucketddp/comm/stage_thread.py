"""A thread that starts collectives, or carries them on, while backward runs."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from datetime import timedelta
from queue import SimpleQueue

import torch

from lightning_bucketddp.comm.work import Work


class StageThread:
    """Completes the first stages of works, and starts the second ones; first in, first out.

    A work whose first stage is nothing is a collective that has yet to be started. Every rank hands its works over in
    the same order. So second stages start in the same order on every rank, if their group carries nothing else. After
    an error none is started any more. The thread starts when the first work comes, and ends with this object.
    """

    def __init__(self) -> None:
        self._queue = SimpleQueue[_Taken | None]()
        self._ended = threading.Event()
        self._started = False

    def take(self, work: Work) -> Work:
        """Take a work over.

        Args:
            work: On the host. The caller must not use it again.

        Returns:
            The work to wait for instead.
        """
        if not self._started:
            self._started = True
            # The thread must not keep this object alive.
            threading.Thread(target=_run, args=(self._queue,), name="bucketddp-stages", daemon=True).start()
            weakref.finalize(self, _end, self._queue, self._ended)
        taken = _Taken(work, self._ended)
        self._queue.put(taken)
        return Work(taken, on_host=True, left_behind=work.left_behind).then(taken.give_back)


def _run(queue: SimpleQueue[_Taken | None]) -> None:
    started = deque[_Taken]()
    error: BaseException | None = None
    with torch.no_grad():
        while (taken := queue.get()) is not None:
            error = taken.start_second(error)
            started.append(taken)
            while started and started[0].settle():
                started.popleft()


def _end(queue: SimpleQueue[_Taken | None], ended: threading.Event) -> None:
    ended.set()
    queue.put(None)


class _Taken:
    """A work in the hands of the thread, with the methods of a ``dist.Work`` that :class:`Work` needs."""

    def __init__(self, work: Work, ended: threading.Event) -> None:
        self._work, self._ended = work, ended
        self._lock = threading.Lock()
        self._given_back = False
        self._has_started = threading.Event()
        self._error: BaseException | None = None

    # -- called by the thread ------------------------------------------------------------------------

    def start_second(self, earlier: BaseException | None) -> BaseException | None:
        """Wait for the first stage, and start the second one, if there is one.

        Args:
            earlier: The error of a work that came before, after which nothing is started.

        Returns:
            The first error so far.
        """
        self._error = earlier
        try:
            self._raise_if_ended()
            if earlier is None and not self._work.start_next(self._raise_if_ended):
                self._work.complete(self._raise_if_ended)
        except BaseException as error:  # raised by every wait
            self._error = error
        self._has_started.set()
        return self._error

    def settle(self) -> bool:
        """Finish the last stage if it has completed. Return whether nothing is left to do here."""
        with self._lock:
            return self._given_back or self._error is not None or self._work.settle()

    def _raise_if_ended(self) -> None:
        if self._ended.is_set():
            raise RuntimeError("the wrapper was closed")

    # -- called by the main thread -------------------------------------------------------------------

    def all_done(self) -> bool:
        """Whether no stage is left to wait for."""
        return self._has_started.is_set() and self._error is None and self._work.known_done()

    def give_back(self) -> Work:
        """Take the work away from the thread, when its second stage has started."""
        with self._lock:
            self._given_back = True
            work, self._work = self._work, Work()  # the thread must not keep the work's memory
            return work

    def is_completed(self) -> bool:
        return self._has_started.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._has_started.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the time is up")
        if self._error is not None:
            raise self._error
