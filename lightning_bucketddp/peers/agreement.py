"""Ranks agree through the store, without a collective, and errors say on what they do not.

The store is a side channel: a rank may ask in it what the others are not in the middle of answering, without upsetting
the order of the collectives.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.comm.work import POLL_SECONDS

_PROBLEM = "problem: "


class WrapError(ValueError, RuntimeError):
    """A module or its options that cannot be wrapped.

    torch's DDP raises a RuntimeError for some of these and a ValueError for others: code that catches either is right.
    """


class RankMismatchError(ValueError, RuntimeError):
    """Ranks disagree on something that must be the same on all of them."""


class PeerFailureError(RuntimeError):
    """Another rank failed in the pass that this rank is in, so that it cannot complete."""


@dataclass(frozen=True)
class Entry:
    """One line of what ranks compare.

    Attributes:
        subject: What it is about, e.g. ``"parameter 'net.0.weight'"``.
        value: What this rank has there, e.g. ``"shape (4, 3), torch.float32"``.
    """

    subject: str
    value: str


class Agreement:
    """What the ranks tell each other, topic by topic.

    Args:
        store: The store.
        prefix: The wrapper's, before every topic.
        rank: This rank.
        world_size: How many ranks there are.
        timeout: How long a rank waits for the others before it names the silent ones, in seconds.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._said: list[str] = []  # this rank's keys of the topic before

    def exchange(self, topic: str, mine: str, poll: Callable[[], None]) -> list[str]:
        """Say ``mine`` on ``topic`` and return what every rank said, by rank.

        Args:
            topic: A name used once per wrapper.
            mine: This rank's value.
            poll: Called now and then while waiting; an exception it raises ends the wait.

        Raises:
            RuntimeError: If some ranks stay silent for the whole timeout; names them.
        """
        name = self._prefix + topic
        keys = [f"{name}/{rank}" for rank in range(self._world_size)]
        counter, complete = f"{name}/said", f"{name}/complete"
        self._store.set(keys[self._rank], mine)
        if self._store.add(counter, 1) == self._world_size:
            self._store.set(complete, "")
        deadline = time.monotonic() + self._timeout
        while not self._wait_for(complete):
            poll()
            if time.monotonic() > deadline:
                silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RuntimeError(
                    f"rank {self._rank}: waited {self._timeout:.0f} s for every rank to agree on {topic!r}; nothing "
                    f"came from rank(s) {silent}. They are not at this point of the program: look for a branch "
                    "that depends on the rank, or for an error in their output"
                )
        answers = [value.decode() for value in self._store.multi_get(keys)]
        for key in self._said:  # all ranks have read the topic before, or they would not have come here
            self._store.delete_key(key)
        self._said = [keys[self._rank], *((counter, complete) if self._rank == 0 else ())]
        return answers

    def _wait_for(self, key: str) -> bool:
        """Wait a moment for a key; whether it is there."""
        try:
            self._store.wait([key], timedelta(seconds=POLL_SECONDS))
        except RuntimeError:  # timed out, in words that differ by store; a store that is gone raises here again
            return self._store.check([key])
        return True

    def require_same(
        self, topic: str, entries: Sequence[Entry], problem: Exception | None, poll: Callable[[], None]
    ) -> None:
        """Require that all ranks have the same entries in the same order.

        Digests are compared first; the entries themselves travel only if they differ.

        Args:
            topic: A name used once per wrapper, in the error too.
            entries: What this rank has.
            problem: What is wrong on this rank, so that it cannot go on whatever the others have.
            poll: As for :meth:`exchange`.

        Raises:
            Exception: The problem, on the rank that has it.
            PeerFailureError: If another rank has a problem; says which.
            RankMismatchError: On every rank, naming the first entry that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        text = json.dumps([[entry.subject, entry.value] for entry in entries])
        mine = hashlib.sha256(text.encode()).hexdigest() if problem is None else f"{_PROBLEM}{problem}"
        digests = self.exchange(topic, mine, poll)
        if problem is not None:
            raise problem
        for rank, digest in enumerate(digests):
            if digest.startswith(_PROBLEM):
                raise PeerFailureError(
                    f"rank {self._rank}: rank {rank} cannot go on with {topic}: {digest.removeprefix(_PROBLEM)}"
                )
        if len(set(digests)) == 1:
            return
        everyone = [json.loads(said) for said in self.exchange(f"{topic} in full", text, poll)]
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise RankMismatchError(
            f"rank {self._rank}: ranks disagree on {topic}: {_first_difference(everyone[0], everyone[other], other)}. "
            "Build the same module with the same options on every rank"
        )


def _first_difference(first: list[list[str]], second: list[list[str]], other: int) -> str:
    for mine, theirs in zip(first, second, strict=False):
        if mine == theirs:
            continue
        if mine[0] == theirs[0]:
            return f"{mine[0]}: rank 0 has {mine[1]}, rank {other} has {theirs[1]}"
        return f"rank 0 has {mine[0]} ({mine[1]}) where rank {other} has {theirs[0]} ({theirs[1]})"
    longer, rank = (first, 0) if len(first) > len(second) else (second, other)
    extra = longer[min(len(first), len(second))]
    return f"only rank {rank} has {extra[0]} ({extra[1]})"
