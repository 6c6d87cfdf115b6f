"""Roll calls: a rank that has waited for long asks where all the others are, and each writes its record."""

from __future__ import annotations

import json
import time
import weakref
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.peers.status import Here, Phase, Status

ANSWER_SECONDS = 2.0
"""How long a rank that has lost a connection waits for answers. Whoever lives answers in milliseconds."""


class Wrapper(Protocol):
    """What a roll call wants of a wrapper."""

    here: Here

    def look(self, store: Store) -> None:
        """See in the store whether another rank failed."""


def read(store: Store, key: str) -> str:
    """What is at a key; empty if nothing is."""
    return store.get(key).decode() if store.check([key]) else ""


class RollCall:
    """The records of a group's ranks in the store, one per rank, with a part for each wrapper.

    Args:
        store: The group's namespace.
        rank: This rank.
        world_size: How many ranks there are.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._wrappers: weakref.WeakValueDictionary[int, Wrapper] = weakref.WeakValueDictionary()
        self._last_words: dict[int, Status] = {}  # of wrappers that were closed or dropped
        self._entered = 0
        self._number, self._called_at = 0, 0.0  # the last call, as far as is known here

    def enter(self, wrapper: Wrapper) -> int:
        """Have a wrapper answer; its number. Ranks make their wrappers in the same order, so numbers are the same."""
        self._entered += 1
        self._wrappers[self._entered] = wrapper
        return self._entered

    def leave(self, number: int, last_words: Status) -> None:
        """Have a wrapper answer no more; its last record stays."""
        self._wrappers.pop(number, None)
        self._last_words[number] = last_words._replace(phase=Phase.RUNS)

    def wake(self) -> None:
        """Have all ranks' listeners look into the store."""
        keys = [f"wake/{rank}" for rank in range(self.world_size)]
        self._store.multi_set(keys, [""] * len(keys))  # type: ignore[attr-defined]  # torch's stubs lack it

    def look(self, store: Store) -> None:
        """Look whether wrappers failed elsewhere, and answer a call that this rank has not answered.

        Args:
            store: The listener's own connection.
        """
        for wrapper in list(self._wrappers.values()):
            wrapper.look(store)
        called = int(read(store, "call").partition(" ")[0] or 0)
        if called > self._number:
            self._number, self._called_at = called, time.monotonic()
            self.write(store)

    def write(self, store: Store, ended: bool = False) -> None:
        """Write this rank's record.

        Args:
            store: The connection to use.
            ended: Whether this rank has ended training, whatever wrappers know of it.
        """
        now = {number: wrapper.here.status() for number, wrapper in list(self._wrappers.items())}
        words = {
            number: status._replace(ended=status.ended or ended).packed()
            for number, status in {**self._last_words, **now}.items()
        }
        store.set(f"status/{self.rank}", json.dumps([self._number, words]))

    def call(self, since: float) -> int:
        """Ask all ranks where they are, unless another rank has done so.

        Args:
            since: For how many seconds the others are not to have called.

        Returns:
            The call's number; 0 if another rank was first.
        """
        if time.monotonic() < self._called_at + since:
            return 0
        before = read(self._store, "call")
        if int(before.partition(" ")[0] or 0) > self._number:
            return 0
        mine = f"{self._number + 1} {self.rank}"
        if self._store.compare_set("call", before, mine).decode() != mine:
            return 0
        self.wake()
        return self._number + 1

    def records(self, wrapper: int, call: int) -> list[Status]:
        """What the ranks have last written of a wrapper; ranks that have not answered a call are marked."""
        keys = [f"status/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            return []
        found = []
        for rank, value in enumerate(self._store.multi_get(keys)):
            answered, words = json.loads(value)
            if str(wrapper) in words:
                found.append(Status.unpacked(words[str(wrapper)], heard=answered >= call))
            elif answered < call:
                found.append(Status(rank, heard=False))
        return found

    def ask(self, wrapper: int) -> list[Status]:
        """Call, whoever else does, and wait a moment until all have answered."""
        call = int(read(self._store, "call").partition(" ")[0] or 0) + 1
        self._store.set("call", f"{call} {self.rank}")
        self.wake()
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            found = self.records(wrapper, call)
            if all(status.heard for status in found) or time.monotonic() > deadline:
                return found
            time.sleep(0.02)
