"""The thread that hears of another rank's failure, and ends this rank.

A rank that fails leaves the others blocked: in a pass, or in a collective of Lightning, a metric or the user. So one
thread per process and group waits for a key of the store. It answers roll calls. When a rank fails, it logs the reason,
and closes this process's connections (:func:`abort`) if the thread that trains does not wake by itself. While all is
well it asks the store nothing.

Keys of the store. Every group has a namespace, ``lightning_bucketddp/<group>/<n-th listener>``::

    wake/<rank>                  look at the news! The rank's listener waits for this key alone, and deletes it
    news                         what all ranks are to know: a failure, the last report, a roll call
    status/<rank>                the number of the news that the rank has read; its records
    reporting/<wait>/<seconds>   how many ranks have wanted to report a wait after so long; the first does
    <wrapper>/<topic>/<rank>     a rank's answer on a topic; everyone reads everyone's
    <wrapper>/<topic>/said       how many ranks have answered
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.comm.groups import Group, abort, debug_level
from lightning_bucketddp.layout.options import DEFAULT_REPORT_AFTER
from lightning_bucketddp.peers.agreement import PeerFailureError, RankMismatchError
from lightning_bucketddp.peers.diagnose import ALL_RUNS, LOOK_FOR_BATCHES, Failure, absent, diagnose, silent
from lightning_bucketddp.peers.encoding import encode
from lightning_bucketddp.peers.names import in_words, this_process
from lightning_bucketddp.peers.roll_call import RollCall
from lightning_bucketddp.peers.status import Status
from lightning_bucketddp.peers.stuck import ends_in_wait, shortened
from lightning_bucketddp.peers.timed_store import STORE_SILENT, TimedStore
from lightning_bucketddp.peers.watch import Watch

LEAVE_SECONDS = 30.0
"""How long a rank that has heard may stand still before its process is ended; torchrun allows as much after SIGTERM."""

STORE_SECONDS = 5.0
"""How long this rank waits for the store's answer to a request."""

_ABORT_SECONDS = 1.0
_OWN_ERROR_SECONDS = 0.7
"""Both together are less than a failed rank waits for the others."""

_LOOK_SECONDS = 0.25
_STORE_LOST = "the process that serves the store has ended without a word"
_STORE_ENDED = f"which serves the store, has ended training; {LOOK_FOR_BATCHES}"
_WAIT = timedelta(days=365)
_THREADS = "bucketddp-"
"""Names of this package's threads begin so."""

_log = logging.getLogger(__name__)
_listeners: weakref.WeakKeyDictionary[dist.ProcessGroup, AbortListener] = weakref.WeakKeyDictionary()
_made: Counter[str] = Counter()


def listen(group: Group, report_after: float = 0) -> AbortListener:
    """The listener of a group, made when first asked for. All ranks must ask at the same point of the program.

    Args:
        group: The group.
        report_after: After how many seconds of waiting ranks report; 0 to leave that as it is.
    """
    listener = _listeners.get(group.group)
    if listener is None:
        listener = _listeners[group.group] = AbortListener(group, report_after or DEFAULT_REPORT_AFTER)
        weakref.finalize(group.group, listener.close)  # at exit too
        _tell_of_uncaught_exceptions()
    elif report_after:
        listener.roll_call.report_after = report_after
    return listener


def tell_failure(error: BaseException, what: str = "") -> None:
    """Tell the ranks of all groups that this one stops, and wait a moment until they have heard.

    If another rank failed before, and the error does not say so, it gets a note.

    Args:
        error: What was raised here.
        what: What happened, if the error does not say it, as the end of a sentence that begins with the rank.
    """
    for listener in _own_listeners():
        listener.failed(error, what)


def tell_end_of_rank(rank: int, pid: int, how: str) -> bool:
    """Tell the ranks of the default group that one of them has ended, unless they know of a failure.

    Args:
        rank: That rank.
        pid: Its process, on this machine.
        how: Such as ``"has ended with exit code 3"``.

    Returns:
        Whether somebody listens here already.
    """
    world = dist.group.WORLD
    listener = _listeners.get(world) if world is not None else None
    if listener is not None and listener.failure is None:
        nobody_waits_for = Status(rank, ended=True, process=(this_process()[0], pid))
        listener.publish(Failure(f"{nobody_waits_for.name} {how}", run=ALL_RUNS))
        with suppress(RuntimeError):  # the store is gone
            listener.store.set(f"status/{rank}", encode((0, [nobody_waits_for])))
    return listener is not None


def _own_listeners() -> list[AbortListener]:
    """The listeners of this process. A child that was forked has a copy of its parent's, and no thread behind them."""
    return [listener for listener in list(_listeners.values()) if listener.is_own()]


@cache
def _tell_of_uncaught_exceptions() -> None:
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with suppress(Exception):  # the exception itself must be seen
            tell_failure(error)
            _shorten(error)
        before(kind, error, traceback)
        for listener in _own_listeners():
            listener.end_all_runs()

    sys.excepthook = tell


def _shorten(error: BaseException) -> None:
    """Leave of the traceback of an error that is another rank's where this rank waited."""
    ours = isinstance(error, PeerFailureError | RankMismatchError)
    if (ours or (is_from_torch(error) and ends_in_wait(error.__traceback__))) and debug_level() != "DETAIL":
        error.__traceback__ = shortened(error.__traceback__)
        if ours:  # the message has what torch said
            error.__cause__, error.__suppress_context__ = None, True


def is_from_torch(error: BaseException | None) -> bool:
    """Whether an error may be due to a rank that is gone."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


@dataclass(eq=False)
class _Run:
    """What a failure ends: a Trainer's ``fit``; outside of it, what is done from one wrapper to the next.

    The listener's thread may still be at the last run when the next one begins.

    Attributes:
        number: Its number, from 1.
        is_fit: Whether it is a Trainer's.
        is_stopping: Whether this rank is on its way out, and may take its time: to save a checkpoint, say.
        heard: Set when the listener's thread has heard of a failure.
        leaving: Set when the thread that trains needs nobody to wake it any more.
        reason_logged: Whether the reason was logged.
    """

    number: int = 0
    is_fit: bool = False
    is_stopping: Callable[[], bool] = lambda: False
    heard: threading.Event = field(default_factory=threading.Event)
    leaving: threading.Event = field(default_factory=threading.Event)
    reason_logged: bool = False


class AbortListener:
    """Hears of other ranks' failures, and tells the others of this rank's.

    Args:
        group: The group. Held weakly: when its last user drops it, the listener ends too.
        report_after: After how many seconds of waiting ranks report.

    Attributes:
        store: The group's namespace.
        roll_call: What ranks tell one another.
    """

    def __init__(self, group: Group, report_after: float) -> None:
        self._group = weakref.ref(group.group)
        self._pid = os.getpid()
        name = group.name
        store = group.store(f"lightning_bucketddp/{name}/{_made[name]}")
        self.store = TimedStore(store, STORE_SECONDS)
        _made[name] += 1
        self.roll_call = RollCall(self.store, group.rank, group.world_size, report_after)
        self._store_lost = False
        self._run = _Run()
        self._closed = threading.Event()
        if group.world_size == 1:
            self._closed.set()
            return
        self.roll_call.write(self.store)
        try:  # a write alone does not notice, and a second connection would be tried until the timeout
            self.store.check(["news"])
        except RuntimeError as error:
            raise PeerFailureError(f"rank {group.rank}: {self.roll_call.server(_STORE_LOST)}") from error
        # A connection serves one call at a time, and the thread's lasts until the end: it needs one of its own.
        self._thread = threading.Thread(
            target=self._listen,
            args=(store.clone(),),  # type: ignore[attr-defined]  # torch's stubs lack it
            name=f"{_THREADS}abort-listener",
            daemon=True,
        )
        self._thread.start()
        watch = Watch(self.roll_call, self._group, self._closed, self.publish)
        threading.Thread(target=watch.run, name=f"{_THREADS}watch", daemon=True).start()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a strategy listens for nobody

    @property
    def run(self) -> int:
        """The number of the present run."""
        return self._run.number

    @property
    def failure(self) -> Failure | None:
        """The failure that has ended the present run, as far as is known here; None if there is none."""
        return self.failure_since(self.run)

    def failure_since(self, run: int) -> Failure | None:
        """The failure that has ended a run, as far as is known here; None if there is none."""
        failure = self.roll_call.failure
        return failure if failure.run >= run and failure.text else None

    def is_own(self) -> bool:
        """Whether this process made it; False in a child that was forked."""
        return os.getpid() == self._pid

    def begin_fit(self, is_stopping: Callable[[], bool]) -> None:
        """A fit begins, on all ranks: earlier failures have been handled.

        Args:
            is_stopping: Whether this rank is on its way out, and may take its time: to save a checkpoint, say.
        """
        self._begin(_Run(self.run + 1, True, is_stopping))

    def end_fit(self) -> None:
        """The fit ends on this rank."""
        self._run.is_stopping, self._run.is_fit = lambda: False, False
        self.leave()

    def begin_run(self) -> None:
        """A wrapper is made, on all ranks: outside of a fit, earlier failures have been handled."""
        if not self._run.is_fit:
            self._begin(_Run(self.run + 1))

    def _begin(self, run: _Run) -> None:
        before, self._run = self._run, run
        before.leaving.set()

    def leave(self) -> None:
        """The thread that trains needs nobody to wake it any more."""
        self._run.leaving.set()

    # -- telling -------------------------------------------------------------------------------------

    def publish(self, failure: Failure) -> bool:
        """Tell all ranks that they cannot go on. The first failure stays.

        Returns:
            Whether this is the first.
        """
        if self._store_lost:
            failure = Failure(self._lost())
        return self.roll_call.publish(replace(failure, run=failure.run or self.run))

    def end_all_runs(self) -> None:
        """This process ends after a failure, if there is one: no later run can do without it."""
        if (failure := self.failure) is not None:
            self.publish(replace(failure, run=ALL_RUNS))
            self.abort()

    def failed(self, error: BaseException, what: str = "") -> None:
        """Tell the others that this rank stops; see :func:`tell_failure`."""
        self.leave()
        if self._closed.is_set():
            return
        first = False
        if isinstance(error, PeerFailureError) and not self._store_lost:
            self._run.heard.wait(1)  # the rank that failed says it best, in a moment
        own = what or f"raised {type(error).__name__}: {error}"
        told = f"{in_words([self.roll_call.rank], {self.roll_call.rank: this_process()})} {own}"
        if self.failure is None:
            from_torch = is_from_torch(error)
            gone = self.ask_why(0) if from_torch else ""
            add_note(error, self.roll_call.stuck_report if from_torch else "")
            add_note(error, f"rank {self.roll_call.rank}: {gone}" if gone else "")
            first = self.publish(Failure(self._cause_in(error) or told + (f"; {gone}" if gone else "")))
        failure = self.roll_call.failure
        if own not in failure.text:  # if all ranks raise the same error, it says enough
            self.explain(error)
        if first or self.roll_call.rank == 0:  # the launcher may now end the others, and rank 0 the store
            with suppress(RuntimeError):
                self.roll_call.wait_until(lambda status: status.heard_of >= self.run or status.ended)

    def explain(self, error: BaseException) -> None:
        """Have an error of this rank say which failure has ended the run, unless it does."""
        failure = self.roll_call.failure
        if failure.text in str(error):
            return
        if isinstance(error, Exception):
            add_note(error, self._reason(failure))
        else:  # Python prints no notes
            self._log_reason(self._run, failure)

    def _cause_in(self, error: BaseException) -> str:
        """What an error of this rank says of another rank that was found to be gone; empty if it says nothing."""
        known = self.roll_call.failure.text
        return known if known and isinstance(error, PeerFailureError) and known in str(error) else ""

    def ask_why(self, wrapper: int) -> str:
        """Call the roll. Return why ranks wait in vain, in words; empty if they do not.

        Args:
            wrapper: The number of a wrapper; 0 for none.
        """
        try:
            statuses = self.roll_call.ask(wrapper)
        except RuntimeError as error:
            return self.roll_call.server(STORE_SILENT) if STORE_SILENT in str(error) else self._lost()
        found = diagnose(statuses)
        if found is not None:
            return found.text
        return silent(statuses) or (absent(statuses) if wrapper else "")

    def _lost(self) -> str:
        if self._closed.is_set():  # the rank that serves the store has closed this listener before
            return f"{in_words([0], self.roll_call.processes)}, {_STORE_ENDED}"
        return self.roll_call.server(_STORE_LOST)

    def close(self) -> None:
        """Stop listening, as the group or this process ends."""
        if self._closed.is_set() or not self.is_own():
            return
        if threading.current_thread().name.startswith(_THREADS):  # garbage collection dropped the group there
            threading.Thread(target=self.close, daemon=True).start()  # that listener must go on to listen
            return
        self._closed.set()
        self.leave()
        if not self._store_lost and not self._run.heard.is_set():  # else the store may be gone, and torch prints that
            with suppress(RuntimeError):
                self._tell_end()
        self._thread.join(timeout=5)

    def _tell_end(self) -> None:
        self.roll_call.end(self.store)
        if self.roll_call.rank or not _serves(self.store.store):
            self.store.set(f"wake/{self.roll_call.rank}", "")
        else:  # the store may end with this process: nobody may be in the middle of a call
            self.roll_call.change(lambda news: replace(news, end=True))
            self.roll_call.wait_until(lambda status: status.ended)

    # -- the thread ----------------------------------------------------------------------------------

    def _listen(self, store: Store) -> None:
        key = f"wake/{self.roll_call.rank}"
        try:
            while self._wait(store, key):
                store.delete_key(key)
                self.roll_call.look(store)
                if self.roll_call.news.end:
                    self._closed.set()
                    self.roll_call.end(store)
                    return
                self.roll_call.write(store)
                run = self._run
                failure = self.failure_since(run.number)
                if failure is not None and not run.heard.is_set():
                    run.heard.set()
                    self._end_training(store, run, failure)
        except RuntimeError as error:
            self._store_lost = not self._closed.is_set()
            self.store.note(error)

    def _wait(self, store: Store, key: str) -> bool:
        """Wait until something wakes this rank; False if it need not listen any more."""
        if self._closed.is_set():
            return False  # the key that said so may be deleted
        if _serves(store) and not self._run.heard.is_set():
            store.wait([key], _WAIT)
            return not self._closed.is_set()
        # A wait for a file reads it a hundred times a second. And after a failure this rank may end at any time.
        while not self._closed.wait(_LOOK_SECONDS):
            if store.check([key]):
                return True
        return False

    def _end_training(self, store: Store, run: _Run, failure: Failure) -> None:
        """Make the thread that trains leave: wake it after a second, end the process if it stands still for thirty.

        The rank that failed waits for the answer: when it has ended, its launcher may end this process.
        """
        if not run.leaving.wait(_ABORT_SECONDS) and not run.is_stopping():
            threading.Thread(target=self.abort, name=f"{_THREADS}wakes", daemon=True).start()
        if not run.leaving.wait(_OWN_ERROR_SECONDS):  # else that thread raises an error that says it
            self._log_reason(run, failure)
        self.roll_call.statuses[0].heard_of = run.number
        self.roll_call.write(store)
        where = self.roll_call.stack()
        while not run.leaving.wait(LEAVE_SECONDS):
            before, where = where, self.roll_call.stack()
            if where == before and not run.is_stopping():
                self._end_process(failure)

    def abort(self) -> None:
        """Wake every rank that waits in the group, here and elsewhere, after a failure."""
        group, failure = self._group(), self.failure
        if group is not None and failure is not None:
            Group(group).leave_behind(failure.text)
            abort(group)

    def _reason(self, failure: Failure) -> str:
        return f"rank {self.roll_call.rank} stops because {failure.text}"

    def _log_reason(self, run: _Run, failure: Failure) -> None:
        """Log the reason, once."""
        if not run.reason_logged:
            run.reason_logged = True
            _log.error(self._reason(failure))

    def _end_process(self, failure: Failure) -> None:
        """End a process whose training thread did not wake. The last resort."""
        late = f"has not stopped in {LEAVE_SECONDS:.0f} s, though {failure.text}"
        _log.error("rank %d %s; its process ends here:", self.roll_call.rank, late)
        with suppress(Exception):  # stderr may have been replaced by something without a file
            faulthandler.dump_traceback()
            sys.stdout.flush()
        os._exit(1)


def _serves(store: Store) -> bool:
    """Whether a process serves the store. Then a wait for a key is one request."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, once."""
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
