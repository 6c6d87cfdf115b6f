"""What ranks tell one another through the store: the news, which all are to know, and each rank's status."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, itemgetter, truth

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.peers.diagnose import Failure
from lightning_bucketddp.peers.encoding import decode, encode
from lightning_bucketddp.peers.names import Process, in_words
from lightning_bucketddp.peers.status import Frame, Status
from lightning_bucketddp.peers.timed_store import TimedStore

ANSWER_SECONDS = 2.0
"""How long a rank waits for the records of the others. A rank that lives answers in milliseconds."""

_Answer = tuple[int, Sequence[Status]]
"""The number of the last news that a rank has read, and its records: what it writes into the store."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class News:
    """What all ranks are to know. A rank that changes it wakes all ranks: each reads it, and writes its records.

    Attributes:
        number: How many changes there were.
        by: The rank that made the last one.
        failure: The first failure of the last run that failed.
        stuck_report: The last report of ranks that wait; empty if there was none.
        end: Whether the rank ends that may serve the store.
    """

    number: int = 0
    by: int = -1
    failure: Failure = field(default_factory=Failure)
    stuck_report: str = ""
    end: bool = False


class RollCall:
    """The news and the records of a group's ranks. Each rank writes one key, which holds a record for each wrapper.

    A rank that has waited for long calls the roll: it changes nothing but the number of the news.

    Args:
        store: The group's namespace.
        rank: This rank.
        world_size: Number of ranks.
        report_after: After how many seconds of waiting there is a report.

    Attributes:
        news: The last news that this rank has read.
        failure: The failure by which this rank goes: the one of the news, or one that it has found alone.
        statuses: This rank's records: one that belongs to no wrapper, then those of all wrappers by number, closed ones
            too, as others may still ask for them.
        stuck_report: The last report of ranks that wait; empty if this rank has got further since.
        processes: Where ranks run, as far as this one has read their records.
    """

    def __init__(self, store: TimedStore, rank: int, world_size: int, report_after: float) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self._thread = threading.get_ident()
        self.statuses = [Status(rank)]
        self.news, self._lock = News(), threading.RLock()  # a collected group's end may come in between
        self.failure = Failure()
        self._heard = deque([(0, 0.0)], maxlen=64)  # the last news, and when this rank heard of them
        self.stuck_report, self.report_after = "", report_after
        self.processes: dict[int, Process] = {}
        self._gone: set[int] = set()  # ranks that listen no more: they have ended training in all wrappers

    def enter(self, status: Status) -> int:
        """Add a wrapper's record; its number. Ranks make their wrappers in the same order, so numbers are the same."""
        self.statuses.append(status)
        return len(self.statuses) - 1

    # -- news ----------------------------------------------------------------------------------------

    def look(self, store: Store | TimedStore) -> bytes:
        """Read the news, and log a report that is new.

        Args:
            store: The connection to use.

        Returns:
            The news as they are written.
        """
        written = store.get("news") if store.check(["news"]) else b""
        self._learn(decode(written, News, self.news) if written else self.news)
        return written

    def _learn(self, news: News) -> None:
        with self._lock:
            before, self.news = self.news, max(self.news, news, key=attrgetter("number"))
            if self.news is not before:
                self._heard.append((news.number, time.monotonic()))
        self.know(self.news.failure)
        if self.news.stuck_report != before.stuck_report:
            self.stuck_report = self.news.stuck_report
            _log.warning("%s", self.stuck_report)

    def change(self, edit: Callable[[News], News | None]) -> bool:
        """Change the news, and wake all ranks.

        Args:
            edit: Makes the new ones of the old; None if nothing is to be changed.

        Returns:
            Whether they were changed.
        """
        while True:
            written = self.look(self.store)
            if (news := edit(self.news)) is None:
                return False
            news = replace(news, number=news.number + 1, by=self.rank)
            text = encode(news)
            if self.store.compare_set("news", written, text) == text.encode():  # no other rank came in between
                break
        self._learn(news)
        keys = [f"wake/{rank}" for rank in range(self.world_size)]
        self.store.multi_set(keys, [""] * len(keys))
        return True

    def know(self, failure: Failure) -> None:
        """Go by a failure from now on, unless one of the same run or a later one is known."""
        if failure.run > self.failure.run:
            self.failure = failure

    def publish(self, failure: Failure) -> bool:
        """Tell all ranks of a failure. The first one of a run stays.

        Returns:
            Whether it is new to the ranks; False if the store is gone, and this rank alone knows.
        """
        try:
            return self.change(lambda news: replace(news, failure=failure) if failure.run > news.failure.run else None)
        except RuntimeError:
            return False
        finally:
            self.know(failure)

    # -- records -------------------------------------------------------------------------------------

    def write(self, store: Store | TimedStore) -> None:
        """Write this rank's records, which answers the news that it has read.

        Args:
            store: The connection to use.
        """
        first, *others = self.records()
        for status in others:
            status.stack = ()  # stands in the first one: a process may have had many wrappers
        store.set(f"status/{self.rank}", encode((self.news.number, [first, *others])))

    def records(self) -> list[Status]:
        """This rank's records as they are now."""
        stack = self.stack()
        return [status.snapshot(stack) for status in self.statuses]

    def stack(self) -> list[Frame]:
        """Where the thread that trains is, which made this object: the innermost frame first.

        The thread may run on meanwhile, and a generator's frame then loses its caller. So one call in C takes all
        frames, in which no other thread gets the interpreter's lock. In it Python 3.11 must not collect garbage, which
        may start a thread and would wait for ever. (A dump by faulthandler crashes while gloo's threads call Python.)
        """
        innermost = islice(map(itemgetter(self._thread), iter(sys._current_frames, None)), 1)
        collects = gc.isenabled()
        gc.disable()
        try:
            frames = [*takewhile(truth, accumulate(chain(innermost, repeat("f_back")), getattr))]
        except KeyError:  # the thread has ended
            return []
        finally:
            if collects:
                gc.enable()
        return [(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name) for frame in frames]

    def end(self, store: Store | TimedStore) -> None:
        """This rank has ended training in all wrappers, and stops listening.

        Args:
            store: The connection to use.
        """
        for status in self.statuses:
            status.end_training()
        self.write(store)

    def in_words(self, ranks: Sequence[int]) -> str:
        """Ranks in words. Reads their records if it is not known where they run."""
        if not self.processes.keys() >= {*ranks}:
            with suppress(RuntimeError):  # the store is gone
                self._read_records(0, 0)
        return in_words(ranks, self.processes)

    def server(self, what: str) -> str:
        """A sentence on the process that serves the store, with that process's name."""
        return f"{what}: {in_words([0], self.processes)} or the launcher"

    def note_process(self, rank: int, written: bytes) -> None:
        """Keep where a rank runs.

        Args:
            rank: The rank.
            written: Its records as it has written them.
        """
        nothing: _Answer = (0, ())
        for status in decode(written, _Answer, nothing)[1]:
            self.processes[rank] = status.process

    def ask(self, wrapper: int, unless_within: float = 0) -> list[Status]:
        """Call the roll, and wait a moment until all ranks have answered, or a failure is known.

        Args:
            wrapper: The number of a wrapper; 0 for none.
            unless_within: Seconds. Do nothing if the news have changed within them, or change right now.

        Returns:
            What the ranks have written of the wrapper. Ranks that have not answered are marked.
        """
        last, heard_at = self._heard[-1]
        if time.monotonic() < heard_at + unless_within:
            return []
        called = self.change(lambda news: None if news.number > last else news)  # else a call of another rank will do
        if unless_within and not called:
            return []
        known = self.failure
        return self.wait_until(lambda status: status.rank in self._gone or self.failure != known, wrapper, last + 1)

    def wait_until(self, enough: Callable[[Status], bool], wrapper: int = 0, call: int = sys.maxsize) -> list[Status]:
        """Read the ranks' records until all have answered or say enough, or :data:`ANSWER_SECONDS` have passed.

        Args:
            enough: Whether a record says enough.
            wrapper: As for :meth:`ask`.
            call: The number of the news that ranks are to answer.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            found = self._read_records(wrapper, call)
            if all(status.heard or enough(status) for status in found) or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def _read_records(self, wrapper: int, call: int) -> list[Status]:
        keys = [f"status/{rank}" for rank in range(self.world_size)]
        if self.store.check(keys):
            values = self.store.multi_get(keys)
        else:  # some ranks have not made their listener yet
            values = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        found, everywhere, now = [], [], time.monotonic()
        for rank, value in enumerate(values):
            nothing: _Answer = (0, [Status(rank)])
            answered, statuses = decode(value, _Answer, nothing) if value else nothing
            for each in statuses[1:]:
                each.stack = statuses[0].stack
            if rank == self.rank:  # its listener may be late
                answered, statuses = call, self.records()
            silent = now - min((at for number, at in list(self._heard) if number > answered), default=now)
            if any(each.ended for each in statuses[:1]):
                self._gone.add(rank)
            # A rank that has not made the wrapper yet may have ended training in those before it.
            status = next(iter(statuses[wrapper : wrapper + 1] or statuses[:1]), Status(rank))
            silent = 0.0 if answered >= call else max(silent, 1e-3)
            found.append(replace(status, rank=rank, silent_for=silent, names=self.statuses[wrapper].names))
            if status.process[0]:
                self.processes[rank] = status.process
            everywhere.append([replace(each, rank=0) for each in statuses])
        if any(each.waiting_for for of_rank in everywhere for number, each in enumerate(of_rank) if number != wrapper):
            found = [replace(status, records=each) for status, each in zip(found, everywhere, strict=True)]
        return found
