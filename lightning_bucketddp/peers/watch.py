"""What notices that this rank waits for others, wherever it waits: in vain, or for long."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from lightning_bucketddp.comm.groups import started_collectives
from lightning_bucketddp.peers.diagnose import Failure, diagnose
from lightning_bucketddp.peers.roll_call import RollCall
from lightning_bucketddp.peers.stuck import stuck_report, waits
from lightning_bucketddp.peers.timed_store import STORE_SILENT

_LOOK_SECONDS = 1.0
"""How often it looks at the thread that trains, at least. With a smaller ``report_after`` ten times in this time."""

_AGAIN_SECONDS = 0.3
"""After how long it looks again, when it has found that ranks wait in vain for different things."""

_log = logging.getLogger(__name__)


@dataclass
class Watch:
    """Looks at the thread that trains now and then.

    When it has waited for 1, 2, 4, ... seconds, it calls the roll, unless another rank does: :func:`diagnose` tells
    whether the awaited ranks may still come. When it has waited for long, it has a report made.

    A wait ends when the rank gets further: its position changes, or it starts another collective in the group. Time
    counts while this process runs, and not while it is stopped. Frames count for the default group alone, as they do
    not tell the group.

    Attributes:
        roll_call: Where all ranks are.
        group: The group whose collectives count.
        closed: Set when the group ends.
        publish: Tells all ranks that they cannot go on.
    """

    roll_call: RollCall
    group: weakref.ref[dist.ProcessGroup]
    closed: threading.Event
    publish: Callable[[Failure], object]

    def run(self) -> None:
        """Look until the group ends, in a thread of its own."""
        before, waited, due, ask = "", 0.0, 0.0, 0.0
        while not self.closed.wait(seconds := min(self.roll_call.report_after / 10, _LOOK_SECONDS)):
            here = self._progress()
            if here != before:
                self.roll_call.stuck_report = ""
            if here != before or (wrapper := self._waiting_wrapper()) is None:
                before, waited, due, ask = here, 0.0, self.roll_call.report_after, _LOOK_SECONDS
                continue
            waited += seconds
            if waited >= ask:
                ask *= 2
                self._look_for_mistakes(wrapper, unless_within=waited / 2)
            if waited >= due:
                self._report(here, wrapper, waited, due)
                due *= 10

    def _progress(self) -> str:
        """How far this rank has come. It changes with each collective, and is the same on ranks that wait for one."""
        positions = [status.position for status in self.roll_call.statuses]
        return f"{positions}, {started_collectives(self.group())}"

    def _waiting_wrapper(self) -> int | None:
        """The wrapper that waits, by its number, or the last one for another wait; None if this rank does not wait."""
        records = self.roll_call.records()
        waiting = [number for number, record in enumerate(records) if record.waiting_for]
        if not waiting and self.group() is dist.group.WORLD and waits(records[-1]):
            return len(records) - 1
        return max(waiting, default=None)

    def _look_for_mistakes(self, wrapper: int, unless_within: float) -> None:
        """Look whether ranks wait in vain. Ranks that wait for different things must be found so twice."""
        if not self.roll_call.records()[wrapper].waiting_for:  # a collective of the user's own
            return
        with suppress(RuntimeError):  # the store is gone; the collective will tell
            found = diagnose(self.roll_call.ask(wrapper, unless_within))
            if found is not None and found.mismatch and not self.closed.wait(_AGAIN_SECONDS):
                again = diagnose(self.roll_call.ask(wrapper))
                found = found if found == again else None
            if found is not None:
                self.publish(found)

    def _report(self, here: str, wrapper: int, waited: float, due: float) -> None:
        """Have a report made, unless another rank reports the same wait."""
        roll_call, store = self.roll_call, self.roll_call.store
        try:
            if store.add(f"reporting/{here}/{due:g}", 1) > 1:
                return
            statuses = roll_call.ask(wrapper)
            if self._progress() == here and not self.closed.is_set():  # else the others came while ranks answered
                text = stuck_report(statuses, roll_call.rank, waited)
                roll_call.change(lambda news: replace(news, stuck_report=text))
        except RuntimeError:  # this rank reports alone
            alone, why = [roll_call.records()[wrapper]], roll_call.server(STORE_SILENT)
            roll_call.stuck_report = stuck_report(alone, roll_call.rank, waited, why)
            _log.warning("%s", roll_call.stuck_report)
