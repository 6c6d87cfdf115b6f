"""What ends training on one rank ends it on all, and every rank can say why.

A rank that raises leaves the others in whatever they wait for: a pass, where they look into the store now and then, or
a collective of Lightning's, of a metric's or of the user's, which knows nothing of a store. Those end when the
connection to the rank closes, with an error that tells of a connection; and if the store was served by that rank, the
reason is gone with it. So a thread of each rank waits for the reason, keeps it and says so at once, and the rank that
failed stays until all have heard.

Keys, below a prefix of this object's own::

    first              the first failure, in words
    for/<rank>         the same, which the rank's thread waits for; empty when the rank itself wants it to end
    heard/<rank>       the rank's thread has the reason
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.agreement import PeerFailureError

LINGER_SECONDS = 2.0
"""How long a rank that failed waits for the others to hear of it."""

LEAVE_SECONDS = 30.0
"""How long a rank that has heard may go on before its process is ended; what torchrun allows after SIGTERM."""

_OWN_ERROR_SECONDS = 0.3
_WAIT = timedelta(days=7)

_log = logging.getLogger(__name__)
_ends_per_group: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class CommonEnd:
    """Tells the other ranks when training fails here, and listens for the others. All ranks must make one.

    Args:
        collectives: The group.
        is_stopping: Whether this rank is on its way out, and may take its time: for saving a checkpoint, say.
    """

    def __init__(self, collectives: Collectives, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._rank, self._world_size = collectives.rank, collectives.world_size
        number = _ends_per_group.get(collectives.group, 0)
        _ends_per_group[collectives.group] = number + 1
        self._store = collectives.store(f"lightning_bucketddp/end/{number}")
        self._is_stopping = is_stopping
        self._cause = ""
        self._first = False
        self._said = False
        self._saying = threading.Lock()
        self._heard = threading.Event()
        self._leaving = threading.Event()
        self._closed = threading.Event()
        # A store serves one call at a time, and this thread's lasts until the end: it needs a connection of its own.
        self._thread = threading.Thread(
            target=self._listen,
            args=(self._store.clone(),),  # type: ignore[attr-defined]  # torch's stubs lack it
            name="bucketddp-common-end",
            daemon=True,
        )
        if self._world_size > 1:
            self._thread.start()
            atexit.register(self.close)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a strategy listens for nobody

    def heard(self) -> bool:
        """Whether some rank has failed, this one included, as far as is known here."""
        return self._heard.is_set()

    def failed(self, error: BaseException) -> None:
        """Tells the others that this rank stops, and waits a moment until they have heard.

        If another rank failed before, this one says so, and the error gets a note (Python 3.11 and later).

        Args:
            error: What was raised here.
        """
        for _ in range(2):
            try:
                self._take_leave(error)
                self._linger()
                return
            except RuntimeError:  # Lightning's handler of SIGTERM starts a broadcast, which raises here
                continue

    def _take_leave(self, error: BaseException) -> None:
        self._leaving.set()
        if self._world_size == 1 or self._closed.is_set():
            return
        if isinstance(error, PeerFailureError):  # the rank that it tells of says it best, in a moment
            self._heard.wait(1)
        if not self._heard.is_set():
            self._tell(f"rank {self._rank} raised {type(error).__name__}: {error}")
            self._heard.wait(1)
        own = f"raised {type(error).__name__}: {error}"
        if self._cause and not self._cause.endswith(own):  # with the same error everywhere, nobody needs to be told
            self._say()
            if hasattr(error, "add_note") and self._reason() not in getattr(error, "__notes__", ()):
                error.add_note(self._reason())

    def _linger(self) -> None:
        """Waits until the others have heard, as the reason may end with this process."""
        if self._world_size == 1 or self._closed.is_set():
            return
        if not self._first and self._rank != 0:  # rank 0 serves the store
            self._thread.join(timeout=1)
            return
        keys = [f"heard/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < deadline:
            try:
                if self._store.check(keys):  # not wait(): torch prints a warning when that runs out of time
                    return
                time.sleep(0.02)
            except dist.DistError:
                return  # the store is gone
        with suppress(RuntimeError):
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            _log.error("rank %d: rank(s) %s do not answer: killed, or their machine is gone", self._rank, silent)

    def _tell(self, mine: str) -> None:
        with suppress(dist.DistError):  # the store is gone
            first = self._store.compare_set("first", "", mine).decode()
            self._cause = self._cause or first
            self._first = first == mine
            for rank in range(self._world_size):
                self._store.compare_set(f"for/{rank}", "", first)

    def close(self) -> None:
        """Stops listening. Sends nothing to the others."""
        if self._closed.is_set() or self._world_size == 1:
            return
        self._closed.set()
        self._leaving.set()
        atexit.unregister(self.close)
        if not self._heard.is_set():  # else the store may be gone, of which torch prints warnings
            with suppress(RuntimeError):
                self._store.set(f"for/{self._rank}", "")
        self._thread.join(timeout=5)

    def _listen(self, store: Store) -> None:
        cause = self._wait_for_cause(store)
        if self._closed.is_set():
            return
        self._cause = self._cause or cause
        self._heard.set()
        if not self._leaving.wait(_OWN_ERROR_SECONDS):  # otherwise the main thread says it, if its error is another
            self._say()
        with suppress(RuntimeError):
            store.set(f"heard/{self._rank}", "")
        deadline = time.monotonic() + LEAVE_SECONDS
        while not self._leaving.wait(0.5) and not self._is_stopping():
            if time.monotonic() > deadline:
                self._end_process()

    def _wait_for_cause(self, store: Store) -> str:
        key = f"for/{self._rank}"
        while True:
            with suppress(RuntimeError):  # the time is up, or the store is gone; which of them is told below
                store.wait([key], _WAIT)
            try:
                if store.check([key]):
                    return store.get(key).decode()
            except RuntimeError:
                return "the process that serves the store, rank 0's or the launcher's, has ended without a word"

    def _reason(self) -> str:
        return f"rank {self._rank} stops because {self._cause}"

    def _say(self) -> None:
        """Says why, now: launchers end this process without mercy, and may do so before its traceback is printed."""
        with self._saying:
            if not self._said:
                _log.error(self._reason())
            self._said = True

    def _end_process(self) -> None:
        """The last resort, for a rank that waits for something which a closed connection does not end."""
        _log.error(
            "rank %d has not stopped in %.0f s, though %s; its process ends here:",
            self._rank,
            LEAVE_SECONDS,
            self._cause,
        )
        with suppress(Exception):  # stderr may have been replaced by something without a file
            faulthandler.dump_traceback()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)
