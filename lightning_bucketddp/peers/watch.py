"""The thread that notices that this rank waits for others for long, wherever it waits."""

from __future__ import annotations

import logging
import threading
import weakref
from zlib import crc32

import torch.distributed as dist

from lightning_bucketddp.comm.groups import started_collectives
from lightning_bucketddp.peers.report import report, waits, waits_at
from lightning_bucketddp.peers.roll_call import RollCall
from lightning_bucketddp.peers.timed_store import STORE_SILENT

_LOOK_SECONDS = 6.0
"""How often it looks at the thread that trains, at least. With a smaller ``report_after`` ten times in this time."""

_log = logging.getLogger(__name__)


class Watch(threading.Thread):
    """Looks at the thread that trains now and then. Has a report made when it has waited for long.

    A wait ends when the rank gets further: its position changes, or it starts another collective in the group. Time
    counts while this process runs, and not while it is stopped. Frames count for the default group alone, as they do
    not tell the group.

    Args:
        roll_call: Where all ranks are.
        group: The group whose collectives count.
        closed: Set when the group ends.
    """

    def __init__(self, roll_call: RollCall, group: weakref.ref[dist.ProcessGroup], closed: threading.Event) -> None:
        super().__init__(name="bucketddp-watch", daemon=True)
        self._roll_call, self._group, self._closed = roll_call, group, closed
        self._seconds = 0.0  # for which the rank has waited
        self._due = 0.0  # after how many a report is due

    def run(self) -> None:
        """Look until the group ends."""
        before = None
        while not self._closed.wait(seconds := min(self._roll_call.report_after / 10, _LOOK_SECONDS)):
            here = self._progress()
            if here != before:
                self._roll_call.report = ""
            if here != before or not self._may_wait():
                before, self._seconds, self._due = here, 0.0, self._roll_call.report_after
                continue
            self._seconds += seconds
            if self._seconds >= self._due:
                self._report()

    def _progress(self) -> str:
        """How far this rank has come. It changes with each collective, and is the same on ranks that wait for one."""
        positions = repr([status.position for status in self._roll_call.statuses])
        return f"{crc32(positions.encode())}/{started_collectives(self._group())}"

    def _may_wait(self) -> bool:
        if any(status.waiting_for for status in self._roll_call.statuses):  # it may turn out not to wait
            return True
        return self._group() is dist.group.WORLD and waits_at(self._roll_call.stack())

    def _report(self) -> None:
        """Have a report made, unless this rank turns out not to wait or another one reports."""
        records = self._roll_call.records()
        wrapper = max((n for n, record in enumerate(records, 1) if record.waiting_for), default=len(records) - 1)
        if not waits(mine := records[wrapper - 1]):
            self._seconds = 0.0
            return
        due, self._due = self._due, self._due * 10
        before = self._progress()
        try:
            if not self._roll_call.claim_report(f"{before}/{due:g}"):
                return
            statuses = self._roll_call.ask(wrapper)
            if self._progress() == before and not self._closed.is_set():  # else the others came while ranks answered
                self._roll_call.publish_report(report(statuses, mine.rank, self._seconds))
        except RuntimeError:  # this rank reports alone
            self._roll_call.report = report([mine], mine.rank, self._seconds, STORE_SILENT)
            _log.warning("%s", self._roll_call.report)
