"""Records in the store: each rank's status, in answer to a roll call, and failed passes."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import replace
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.peers.status import Status

ANSWER_SECONDS = 2.0
"""How long a rank that calls the roll waits for answers. A rank that lives answers in milliseconds."""


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


def read(store: Store, key: str) -> str:
    """The value at a key; empty if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


class RollCall:
    """The records of a group's ranks: one key per rank, which holds a record for each wrapper.

    A rank that has waited for long calls the roll. Then each rank writes its records.

    Args:
        store: The group's namespace.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._statuses: list[Status] = []  # of all wrappers, closed ones too: others may still ask for them
        self._failed: dict[str, FailedPass] = {}  # by wrapper, as far as is known here
        self._call, self._called_at = "", 0.0  # the last call, as far as is known here

    def enter(self, status: Status) -> int:
        """Add a wrapper's record; its number. Ranks make their wrappers in the same order, so numbers are the same."""
        self._statuses.append(status)
        return len(self._statuses)

    def wake(self) -> None:
        """Have all ranks' listeners look into the store."""
        keys = [f"wake/{rank}" for rank in range(self.world_size)]
        self._store.multi_set(keys, [""] * len(keys))  # type: ignore[attr-defined]  # torch's stubs lack it

    def look(self, store: Store) -> None:
        """Look for failed passes, and answer a call that this rank has not answered.

        Args:
            store: The connection to use.
        """
        self._failed = _failed_in(read(store, "failed"))
        call = read(store, "call")
        if call != self._call:
            self._call, self._called_at = call, time.monotonic()
            self.write(store)

    # -- failed passes -------------------------------------------------------------------------------

    def failed_pass(self, wrapper: int) -> FailedPass:
        """The last pass of a wrapper that failed on some rank, as far as is known here."""
        return self._failed.get(str(wrapper), FailedPass())

    def publish_failed(self, wrapper: int, failed: FailedPass) -> None:
        """Tell all ranks of a failed pass. What happened first in a pass stays, and so does a failure for good."""
        while True:
            before = read(self._store, "failed")
            self._failed = _failed_in(before)
            first = self.failed_pass(wrapper)
            if first.for_good:
                return
            text = first.text if first.number == failed.number else failed.text
            after = json.dumps({**self._failed, str(wrapper): failed._replace(text=text)})
            if self._store.compare_set("failed", before, after).decode() == after:  # no other rank came in between
                break
        self.wake()

    # -- records -------------------------------------------------------------------------------------

    def write(self, store: Store) -> None:
        """Write this rank's records.

        Args:
            store: The connection to use.
        """
        records = [status.snapshot() for status in self._statuses]
        packed = pickle.dumps((_call_number(self._call), records))
        store.set(f"status/{self.rank}", packed)  # type: ignore[arg-type]  # takes bytes too

    def end(self) -> None:
        """This rank has ended training in all wrappers."""
        for status in self._statuses:
            status.end_training()
        self.write(self._store)

    def ask(self, wrapper: int, unless_within: float = 0) -> list[Status]:
        """Call the roll, and wait a moment until all ranks have answered.

        Args:
            wrapper: The number of a wrapper.
            unless_within: Do nothing if another rank has called in the last so many seconds, or calls right now.

        Returns:
            What the ranks have written of the wrapper. Ranks that have not answered are marked.
        """
        if time.monotonic() < self._called_at + unless_within:
            return []
        call = _call_number(self._call) + 1
        mine = f"{call} {self.rank}"
        if self._store.compare_set("call", self._call, mine).decode() == mine:
            self.wake()
        elif unless_within:
            return []
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            found = self._records(wrapper, call)
            if all(status.heard or status.ended for status in found) or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def _records(self, wrapper: int, call: int) -> list[Status]:
        keys = [f"status/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            return []
        found = []
        for rank, value in enumerate(self._store.multi_get(keys)):
            answered, statuses = pickle.loads(value)
            if 0 < wrapper <= len(statuses):
                found.append(replace(statuses[wrapper - 1], heard=answered >= call))
            elif answered < call:
                found.append(Status(rank, heard=False))
        return found


def _failed_in(written: str) -> dict[str, FailedPass]:
    return {wrapper: FailedPass(*failed) for wrapper, failed in json.loads(written or "{}").items()}


def _call_number(call: str) -> int:
    """The number of a roll call, which is written as ``"<number> <rank that calls>"``."""
    return int(call.partition(" ")[0] or 0)
