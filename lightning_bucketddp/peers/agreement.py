"""Ranks agree through the store, and tell each other of failures there.

The store is a side channel: a rank may ask in it what the others are not in the middle of answering, without
upsetting the order of the collectives. Every wait is bounded and names the ranks that stayed silent.

Keys, below a prefix of the wrapper's own::

    <topic>/<rank>      what this rank says on a topic; everyone reads everyone's
    failed/<pass>       the first rank whose backward raised in this pass; if all did, training may go on
    skipped/<step>      some rank went through this step without a backward
    ended/<pass>        some rank has ended training and will not come to this pass
    update              for the parameters of which optimizer step, before which pass, some rank waits
    updates/<pass>/<rank>  after how many steps of sharded optimizers a rank has ended training before this pass
    exchange            in which exchange of BatchNorm statistics, of which pass, some rank waits
    here/<rank>         this rank has heard of a failure after which the ranks cannot go on together
    failed/for good     the first failure after which the ranks cannot go on together
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.work import POLL_SECONDS

_PROBLEM = "problem: "
_wrappers_per_group: Counter[str] = Counter()


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
    """The wrapper's use of the group's store.

    Args:
        collectives: The group.
        timeout: How long a rank waits for the others before it names the silent ones.

    Attributes:
        number: Which of the group's wrappers this is; the same on every rank.
    """

    def __init__(self, collectives: Collectives, timeout: timedelta) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._timeout = timeout.total_seconds()
        # Ranks construct their wrappers in the same order, so that counting gives them the same prefix.
        name = collectives.name
        self.number = _wrappers_per_group[name]
        _wrappers_per_group[name] += 1
        self._last_topic: str | None = None
        self._store = collectives.store(f"lightning_bucketddp/{name}/{self.number}")

    # -- values of all ranks -------------------------------------------------------------------------

    def exchange(self, topic: str, mine: str, on_idle: Callable[[], None] | None = None) -> list[str]:
        """Says ``mine`` on ``topic`` and returns what every rank said, by rank.

        Args:
            topic: A name used once per wrapper.
            mine: This rank's value.
            on_idle: Called now and then while waiting; an exception it raises ends the wait.

        Raises:
            RuntimeError: If some ranks stay silent for the whole timeout; names them.
        """
        self._say(topic, mine)
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + self._timeout
        while not self._wait_for(keys):
            if on_idle is not None:
                on_idle()
            if time.monotonic() > deadline:
                silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RuntimeError(
                    f"rank {self.rank}: waited {self._timeout:.0f} s for every rank to agree on {topic!r}; nothing "
                    f"came from rank(s) {silent}. They are not at this point of the program: look for a branch "
                    "that depends on the rank, or for an error in their output"
                )
        return [value.decode() for value in self._store.multi_get(keys)]

    def _wait_for(self, keys: list[str]) -> bool:
        """Waits a moment for all keys; whether they are there."""
        try:
            self._store.wait(keys, timedelta(seconds=POLL_SECONDS))
        except RuntimeError:  # timed out, in words that differ by store; a store that is gone raises here again
            return self._store.check(keys)
        return True

    def _say(self, topic: str, mine: str) -> None:
        self._store.set(f"{topic}/{self.rank}", mine)

    def require_same(
        self,
        topic: str,
        entries: Sequence[Entry],
        problem: Exception | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        """Requires that all ranks have the same entries in the same order.

        Digests are compared first; the entries themselves travel only if they differ.

        Args:
            topic: A name used once per wrapper, in the error too.
            entries: What this rank has.
            problem: What is wrong on this rank, so that it cannot go on whatever the others have.
            on_idle: As for :meth:`exchange`.

        Raises:
            Exception: The problem, on the rank that has it.
            PeerFailureError: If another rank has a problem; says which.
            RankMismatchError: On every rank, naming the first entry that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        text = json.dumps([[entry.subject, entry.value] for entry in entries])
        mine = hashlib.sha256(text.encode()).hexdigest() if problem is None else f"{_PROBLEM}{problem}"
        digests = self.exchange(topic, mine, on_idle)
        if problem is not None:
            raise problem
        for rank, digest in enumerate(digests):
            if digest.startswith(_PROBLEM):
                raise PeerFailureError(
                    f"rank {self.rank}: rank {rank} cannot go on with {topic}: {digest.removeprefix(_PROBLEM)}"
                )
        if len(set(digests)) == 1:
            return
        everyone = [json.loads(said) for said in self.exchange(f"{topic} in full", text, on_idle)]
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise RankMismatchError(
            f"rank {self.rank}: ranks disagree on {topic}: {_first_difference(everyone[0], everyone[other], other)}. "
            "Build the same module with the same options on every rank"
        )

    def answer_none(self, topic: str, situation: str) -> None:
        """Ends the wait of ranks that want to agree on a topic about which this rank has nothing to say.

        Args:
            topic: As for :meth:`require_same`.
            situation: What this rank does instead, for the error of the others.

        Raises:
            RankMismatchError: If a rank waits.
        """
        asking = next((rank for rank in range(self.world_size) if self._store.check([f"{topic}/{rank}"])), None)
        if asking is not None:
            self._say(topic, f"{_PROBLEM}{situation}")
            raise RankMismatchError(
                f"rank {self.rank}: rank {asking} wants to agree on {topic}, while this rank {situation}. Run the same "
                "program on every rank: look for a branch that depends on the rank"
            )

    # -- trainable sets ------------------------------------------------------------------------------

    def require_same_trainable(
        self,
        pass_number: int,
        number: int,
        trainable: Sequence[bool],
        names: Sequence[str],
        on_idle: Callable[[], None],
    ) -> None:
        """Requires that all ranks have the same set of trainable parameters at the root of a pass.

        Args:
            pass_number: Which synchronised pass.
            number: Which change of the set, counted the same on every rank.
            trainable: Per parameter, whether this rank trains it.
            names: The parameters' names.
            on_idle: As for :meth:`exchange`.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        topic = _trainable_topic(pass_number, number)
        everyone = self.exchange(topic, _bits(trainable), on_idle)
        if self._last_topic is not None:  # all ranks have read it, or they would not have come here
            self._store.delete_key(f"{self._last_topic}/{self.rank}")
        self._last_topic = topic
        other = next((rank for rank, bits in enumerate(everyone) if bits != everyone[0]), None)
        if other is not None:
            raise RankMismatchError(
                self._trainable_mismatch(pass_number, everyone[0], 0, everyone[other], other, names)
            )

    def answer_trainable(self, pass_number: int, number: int, trainable: Sequence[bool], names: Sequence[str]) -> None:
        """Tells ranks that ask about this pass what is trainable here; does nothing if none asks.

        Args:
            pass_number: The pass that this rank is in.
            number: The agreement that this rank would ask for next.
            trainable: Per parameter, whether this rank trains it.
            names: The parameters' names.

        Raises:
            RankMismatchError: If a rank asks: this rank found nothing to ask about, so they differ.
        """
        topic = _trainable_topic(pass_number, number)
        mine = _bits(trainable)
        for rank in range(self.world_size):
            if not self._store.check([f"{topic}/{rank}"]):
                continue
            theirs = self._store.get(f"{topic}/{rank}").decode()
            if theirs != mine:  # the one that asks; equal ones have come to answer, as this rank does
                self._say(topic, mine)
                raise RankMismatchError(self._trainable_mismatch(pass_number, mine, self.rank, theirs, rank, names))

    def _trainable_mismatch(
        self, pass_number: int, bits: str, rank: int, other_bits: str, other: int, names: Sequence[str]
    ) -> str:
        words = {"0": "frozen", "1": "trainable"}
        where = next((i for i, (a, b) in enumerate(zip(bits, other_bits, strict=False)) if a != b), None)
        difference = (
            f"parameter {names[where]!r} is {words[bits[where]]} on rank {rank} and {words[other_bits[where]]} on "
            f"rank {other}"
            if where is not None
            else f"rank {other} went through another sequence of trainable sets than rank {rank}"
        )
        return (
            f"rank {self.rank}: ranks disagree on which parameters are trainable in pass {pass_number}: {difference}. "
            "Freeze and unfreeze the same parameters at the same step on every rank"
        )

    # -- failures ------------------------------------------------------------------------------------

    def publish_failure(self, pass_number: int | None, cause: str) -> None:
        """Tells the others that this rank failed. The first cause stays; a store that is gone is no error here.

        Args:
            pass_number: The pass in which backward raised, if training may go on should all ranks raise in it; None
                if this rank cannot go on in any case.
            cause: What happened, as the end of a sentence that begins with the rank.
        """
        with suppress(RuntimeError):
            self._store.compare_set(_failure_key(pass_number), "", f"rank {self.rank} {cause}")

    def publish_skip(self, step: int) -> None:
        """Tells ranks that run a backward in ``step`` that this rank ran none."""
        self._store.compare_set(f"skipped/{step}", "", str(self.rank))

    def skipped_by(self, step: int) -> int | None:
        """A rank that ran no backward in ``step``, if there is one."""
        key = f"skipped/{step}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def publish_end(self, pass_number: int, updates: int) -> None:
        """Tells ranks that come to a pass that this rank has ended training; a store that is gone is no error here.

        Args:
            pass_number: The pass.
            updates: After how many steps of sharded optimizers.
        """
        with suppress(RuntimeError):
            self._store.set(f"updates/{pass_number}/{self.rank}", str(updates))
            self._store.compare_set(f"ended/{pass_number}", "", str(self.rank))

    def ended_without_update(self, pass_number: int, updates: int) -> int | None:
        """A rank that has ended training after fewer than ``updates`` steps of sharded optimizers, if there is one."""
        for rank in range(self.world_size):
            key = f"updates/{pass_number}/{rank}"
            if self._store.check([key]) and int(self._store.get(key)) < updates:
                return rank
        return None

    def publish_update(self, pass_number: int, updates: int, what: str) -> None:
        """Tells the others that this rank waits for parameters.

        Args:
            pass_number: The pass that this rank comes to next.
            updates: How many steps of sharded optimizers this rank has made.
            what: For what it waits.
        """
        self._store.set("update", f"{pass_number} {updates} rank {self.rank} waits for {what}")

    def update_beyond(self, pass_number: int, updates: int) -> str | None:
        """Who waits for the parameters of a step that comes after the ``updates``-th, if a rank does."""
        if not self._store.check(["update"]):
            return None
        its_pass, number, who = self._store.get("update").decode().split(" ", 2)
        return who if int(its_pass) == pass_number and int(number) > updates else None

    def ended_before(self, pass_number: int) -> int | None:
        """A rank that has ended training and will not come to a pass, if there is one."""
        key = f"ended/{pass_number}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def publish_exchange(self, pass_number: int, number: int, what: str) -> None:
        """Tells the others that this rank waits for them in an exchange on the way to the end of a pass.

        Args:
            pass_number: The pass.
            number: Which exchange, counted the same on every rank.
            what: What is exchanged.
        """
        self._store.set("exchange", f"{pass_number} {number} rank {self.rank} waits for {what}")

    def exchange_beyond(self, pass_number: int, number: int) -> str | None:
        """Who waits for what in an exchange that comes after the ``number``-th, if a rank does."""
        found, who = self._exchange(pass_number)
        return who if found > number else None

    def waits_in_exchange(self, pass_number: int, number: int) -> str | None:
        """Who waits for what in the ``number``-th exchange, if a rank does."""
        found, who = self._exchange(pass_number)
        return who if found == number else None

    def _exchange(self, pass_number: int) -> tuple[int, str]:
        if not self._store.check(["exchange"]):
            return -1, ""
        its_pass, number, who = self._store.get("exchange").decode().split(" ", 2)
        return (int(number), who) if int(its_pass) == pass_number else (-1, "")

    def silent_after_failure(self) -> list[int]:
        """Says that this rank has heard of a failure, and gives the ranks that do not say so within a moment."""
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        try:
            self._store.set(keys[self.rank], "")
            with suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=4 * POLL_SECONDS))
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:  # the store goes with the rank that serves it
            return []

    def failure(self, pass_number: int) -> str | None:
        """The first failure that concerns a pass, in words, if some rank published one."""
        for key in (_failure_key(pass_number), _failure_key(None)):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None


def _failure_key(pass_number: int | None) -> str:
    return f"failed/{'for good' if pass_number is None else pass_number}"


def _trainable_topic(pass_number: int, number: int) -> str:
    return f"the trainable parameters of pass {pass_number} (change {number})"


def _bits(trainable: Sequence[bool]) -> str:
    return "".join("1" if flag else "0" for flag in trainable)


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
