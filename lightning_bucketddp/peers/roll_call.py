"""Records in the store: each rank's status, in answer to a roll call; failed passes; reports."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import itemgetter, truth
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.peers.records import decode, encode
from lightning_bucketddp.peers.status import Frame, Status
from lightning_bucketddp.peers.timed_store import TimedStore

ANSWER_SECONDS = 2.0
"""How long a rank that calls the roll waits for answers. A rank that lives answers in milliseconds."""


_Answer = tuple[int, Sequence[Status]]
"""The number of the last roll call that a rank has heard of, and its records: what it writes into the store."""

_log = logging.getLogger(__name__)


class FailedPass(NamedTuple):
    """A pass of one wrapper that failed on some rank.

    Attributes:
        number: The pass.
        for_good: Whether the rank cannot go on. Otherwise training goes on if backward raised on every rank.
        text: What happened first: a sentence without its full stop, which begins with the rank.
    """

    number: int = -1
    for_good: bool = False
    text: str = ""


def read(store: Store | TimedStore, key: str) -> str:
    """The value at a key; empty if there is none."""
    return store.get(key).decode(errors="replace") if store.check([key]) else ""


class RollCall:
    """The records of a group's ranks: one key per rank, which holds a record for each wrapper.

    A rank that has waited for long calls the roll. Then each rank writes its records.

    Args:
        store: The group's namespace.
        rank: This rank.
        world_size: Number of ranks.
        report_after: After how many seconds of waiting there is a report.

    Attributes:
        statuses: This rank's records, of all wrappers, closed ones too: others may still ask for them.
        report: The last report of ranks that wait; empty if this rank has got further since.
    """

    def __init__(self, store: TimedStore, rank: int, world_size: int, report_after: float) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self._thread = threading.get_ident()
        self.statuses: list[Status] = []
        self._failed: dict[str, FailedPass] = {}  # by wrapper, as far as is known here
        self._calls = deque([("", 0.0)], maxlen=64)  # the last calls, and when this rank heard of them
        self._reports = 0  # of which this rank has heard
        self.report, self.report_after = "", report_after

    def enter(self, status: Status) -> int:
        """Add a wrapper's record; its number. Ranks make their wrappers in the same order, so numbers are the same."""
        self.statuses.append(status)
        return len(self.statuses)

    def wake(self) -> None:
        """Have all ranks' listeners look into the store."""
        keys = [f"wake/{rank}" for rank in range(self.world_size)]
        self.store.multi_set(keys, [""] * len(keys))

    def look(self, store: Store | TimedStore) -> None:
        """Look for failed passes, and answer a call that this rank has not answered.

        Args:
            store: The connection to use.
        """
        self._failed = _failed_in(read(store, "failed"))
        call = read(store, "call")
        if call != self._calls[-1][0]:
            self._calls.append((call, time.monotonic()))
            self.write(store)
        while store.check([key := f"report/{self._reports}"]):
            self._reports += 1
            self.report = store.get(key).decode(errors="replace")
            _log.warning("%s", self.report)

    # -- failed passes -------------------------------------------------------------------------------

    def failed_pass(self, wrapper: int) -> FailedPass:
        """The last pass of a wrapper that failed on some rank, as far as is known here."""
        return self._failed.get(str(wrapper), FailedPass())

    def publish_failed(self, wrapper: int, failed: FailedPass) -> None:
        """Tell all ranks of a failed pass. What happened first in a pass stays, and so does a failure for good."""
        while True:
            before = read(self.store, "failed")
            self._failed = _failed_in(before)
            first = self.failed_pass(wrapper)
            if first.for_good:
                return
            text = first.text if first.number == failed.number else failed.text
            after = encode({**self._failed, str(wrapper): failed._replace(text=text)})
            if self.store.compare_set("failed", before, after) == after.encode():  # no other rank came in between
                break
        self.wake()

    # -- records -------------------------------------------------------------------------------------

    def write(self, store: Store | TimedStore) -> None:
        """Write this rank's records.

        Args:
            store: The connection to use.
        """
        store.set(f"status/{self.rank}", encode((_call_number(self._calls[-1][0]), self.records())))

    def records(self) -> list[Status]:
        """This rank's records, by wrapper, and at the end one without a wrapper."""
        stack = self.stack()
        return [replace(status.snapshot(), stack=stack) for status in (*self.statuses, Status(self.rank))]

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

    def end(self) -> None:
        """This rank has ended training in all wrappers."""
        for status in self.statuses:
            status.end_training()
        self.write(self.store)

    def ask(
        self,
        wrapper: int,
        unless_within: float = 0,
        seconds: float = 0,
        until: Callable[[], bool] = lambda: False,
    ) -> list[Status]:
        """Call the roll, and wait a moment until all ranks have answered.

        Args:
            wrapper: The number of a wrapper.
            unless_within: Do nothing if another rank has called in the last so many seconds, or calls right now.
            seconds: How long to wait for answers; 0 for :data:`ANSWER_SECONDS`.
            until: Answers are no longer needed when this returns True.

        Returns:
            What the ranks have written of the wrapper. Ranks that have not answered are marked.
        """
        last, called_at = self._calls[-1]
        if time.monotonic() < called_at + unless_within:
            return []
        call = _call_number(last) + 1
        mine = f"{call} {self.rank}"
        if self.store.compare_set("call", last, mine) == mine.encode():
            self.wake()
        elif unless_within:
            return []
        deadline = time.monotonic() + (seconds or ANSWER_SECONDS)
        while True:
            found = self._records(wrapper, call)
            if all(status.heard or status.ended for status in found) or until() or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def _records(self, wrapper: int, call: int) -> list[Status]:
        keys = [f"status/{rank}" for rank in range(self.world_size)]
        if self.store.check(keys):
            values = self.store.multi_get(keys)
        else:  # some ranks have not made their listener yet
            values = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        found, now = [], time.monotonic()
        for rank, value in enumerate(values):
            nothing: _Answer = (0, [Status(rank)])
            answered, statuses = decode(value, _Answer, nothing) if value else nothing
            if rank == self.rank:  # its listener may be late
                answered, statuses = call, self.records()
            seconds = now - min((at for later, at in list(self._calls) if _call_number(later) > answered), default=now)
            # Without such a wrapper the last one.
            status = statuses[min(wrapper, len(statuses)) - 1] if statuses else Status(rank)
            found.append(replace(status, rank=rank, silent_for=0.0 if answered >= call else max(seconds, 1e-3)))
        return found


def _failed_in(written: str) -> dict[str, FailedPass]:
    return decode(written or "{}", dict[str, FailedPass], {})


def _call_number(call: str) -> int:
    """The number of a roll call, which is written as ``"<number> <rank that calls>"``."""
    number = call.partition(" ")[0]
    return int(number) if number.isdecimal() else 0
