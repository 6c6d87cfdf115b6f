"""Where a rank is: one record, which others read when they wait for the rank in vain."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


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
