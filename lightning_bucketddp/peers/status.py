"""Where a rank is: one record, which others read when they wait for the rank in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple
from zlib import crc32


class Phase(Enum):
    """What a rank waits for. The comment says which number of the position counts it."""

    RUNS = "nothing"
    ROOT = "the others, at the root of a pass"  # pass
    PASS = "gradients, with its backward behind it"  # pass
    EXCHANGE = "BatchNorm statistics or module buffers"  # exchange
    UPDATE = "parameters that others have updated"  # update
    AGREEMENT = "an agreement through the store"  # agreement
    OTHER = "a collective that nobody counts"


class Position(NamedTuple):
    """How far a rank has come in the program. Ranks that run the same program count alike.

    Attributes:
        pass_number: Synchronised passes completed.
        step: Steps begun, if the caller tells.
        backward: Synchronised passes completed in this step.
        forward: Training forwards begun.
        exchange: Exchanges of BatchNorm statistics and of module buffers begun.
        update: Steps of sharded optimizers.
        agreement: Agreements through the store begun.
    """

    pass_number: int = 0
    step: int = 0
    backward: int = 0
    forward: int = 0
    exchange: int = 0
    update: int = 0
    agreement: int = 0


class Status(NamedTuple):
    """One rank's record.

    Attributes:
        rank: The rank.
        position: How far it has come.
        phase: What it waits for.
        waiting_for: The same in words.
        step_ended: Whether all backwards of the step have been run.
        ended: Whether it has ended training.
        failure: Why it cannot go on, in words; empty if it can.
        trainable: A digit per parameter, 1 for those that it trains; empty unless somebody may ask.
        heard: Whether it has answered the last roll call. If not, the record is from before.
    """

    rank: int
    position: Position = Position()
    phase: Phase = Phase.RUNS
    waiting_for: str = ""
    step_ended: bool = False
    ended: bool = False
    failure: str = ""
    trainable: str = ""
    heard: bool = True

    def packed(self) -> list[Any]:
        """The record as JSON can hold it."""
        return [*self._replace(position=list(self.position), phase=self.phase.name)]  # type: ignore[arg-type]

    @classmethod
    def unpacked(cls, values: list[Any], heard: bool) -> Status:
        """The record from what :meth:`packed` gave."""
        status = cls(*values)
        return status._replace(position=Position(*values[1]), phase=Phase[values[2]], heard=heard)


class Here:
    """Where this rank is, as it goes on.

    Args:
        rank: This rank.

    Attributes:
        rank: The same.
        position: How far it has come.
        waits_for: What it waits for, by its kind and in words.
        ended: Whether it has ended training.
        failure: Why it cannot go on, in words; empty if it can.
        names: The names of the parameters, as far as others may ask for those that this rank trains.
        updated: A number that tells which buckets sharded optimizers have updated.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = Position()
        self.waits_for: tuple[Phase, str | Callable[[], str]] = Phase.RUNS, ""
        self.ended = False
        self.failure = ""
        self.names: Sequence[str] = ()
        self.updated = 0
        self._trainable: Sequence[bool] = ()
        self._step_ended = False

    def begin_step(self) -> None:
        """A training step begins, on every rank."""
        self._step_ended = False
        self.position = self.position._replace(step=self.position.step + 1, backward=0)

    def end_step(self) -> None:
        """All backwards of the step have been run."""
        self._step_ended = True

    def begin_forward(self) -> None:
        """A training forward begins."""
        self.position = self.position._replace(forward=self.position.forward + 1)

    def forget_forwards(self) -> None:
        """Ranks have run different numbers of forwards, as they should."""
        self.position = self.position._replace(forward=0)

    def begin_exchange(self) -> None:
        """An exchange of BatchNorm statistics or of module buffers begins, on every rank."""
        self.position = self.position._replace(exchange=self.position.exchange + 1)

    def begin_agreement(self) -> None:
        """An agreement through the store begins, on every rank."""
        self.position = self.position._replace(agreement=self.position.agreement + 1)

    def end_pass(self) -> None:
        """A synchronised pass has been completed."""
        at = self.position
        self.position = at._replace(pass_number=at.pass_number + 1, backward=at.backward + 1)

    def note_trainable(self, names: Sequence[str], trainable: Sequence[bool]) -> None:
        """Keep which parameters this rank trains, for ranks that want to agree on it.

        Args:
            names: The parameters' names.
            trainable: Per parameter, whether it is trained.
        """
        self.names, self._trainable = names, trainable

    def note_update(self, buckets: Sequence[int], complete: bool) -> None:
        """A sharded optimizer has made a step on this rank, or the first stages of one.

        Args:
            buckets: The buckets whose parameters travel after it.
            complete: Whether the step is complete.
        """
        self.position = self.position._replace(update=self.position.update + complete)
        self.updated = crc32(repr((self.updated, self.position.pass_number, buckets)).encode())

    def status(self) -> Status:
        """The record."""
        phase, what = self.waits_for
        with suppress(Exception):  # another thread asks: what is waited for may have come
            what = what if isinstance(what, str) else what()
        asked = phase in (Phase.AGREEMENT, Phase.PASS)
        trainable = "".join("01"[flag] for flag in self._trainable) if asked else ""
        what = what if isinstance(what, str) else "gradients"
        return Status(self.rank, self.position, phase, what, self._step_ended, self.ended, self.failure, trainable)
