"""Why ranks wait for each other in vain: from their records, without a process or a store.

All ranks run the same program. So if one has come to a point that another has not, while the other has come to a point
that the first has not, they will never meet, whenever the records were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from lightning_bucketddp.peers.status import Phase, Status

LOOK_FOR_STEPS = (
    "look for an optimizer.step() in a branch that depends on the rank, or for one that raised. The parameters of the "
    "ranks are no longer the same; restart from a checkpoint"
)


class Kind(Enum):
    """What is wrong."""

    FAILED = auto()
    """A rank cannot go on."""
    ENDED = auto()
    """A rank has ended training."""
    SKIPPED = auto()
    """A rank has left a step without a backward that another one waits for."""
    ELSEWHERE = auto()
    """Two ranks wait for each other at different points of the program."""
    STUCK = auto()
    """Some ranks do not answer. They may still come."""


class Diagnosis(NamedTuple):
    """What is wrong, in words that name ranks: a sentence without its full stop."""

    kind: Kind
    text: str


def diagnose(statuses: Sequence[Status], names: Sequence[str] = ()) -> Diagnosis | None:
    """Find out why ranks wait.

    Args:
        statuses: The records of all ranks, in any order.
        names: The parameters' names.

    Returns:
        None if those that are waited for may still come.
    """
    for status in statuses:
        if status.failure:
            return Diagnosis(Kind.FAILED, f"rank {status.rank} {status.failure}")
    # Most ranks of a large world are at the same point: one of them speaks for all.
    kinds = {status._replace(rank=0): status for status in sorted(statuses, reverse=True, key=lambda it: it.rank)}
    pairs = [(a, b) for a in kinds.values() for b in kinds.values() if a.heard and not _has_come(b, a)]
    for find in (_ended, _skipped, _elsewhere):
        for waiting, other in pairs:
            if (diagnosis := find(waiting, other, names)) is not None:
                return diagnosis
    silent = ", ".join(str(status.rank) for status in statuses if not status.heard)
    return Diagnosis(Kind.STUCK, f"nothing is heard of rank(s) {silent}") if silent else None


def _has_come(other: Status, waiting: Status) -> bool:
    """Whether a rank has come to what another one waits for, as far as is known."""
    here, there = waiting.position, other.position
    match waiting.phase:
        case Phase.PASS | Phase.ROOT:
            arrived = other.phase is Phase.PASS or other.phase is waiting.phase
            return (there.pass_number, arrived) >= (here.pass_number, True)
        case Phase.EXCHANGE | Phase.AGREEMENT:
            counted = (lambda at: at.exchange) if waiting.phase is Phase.EXCHANGE else (lambda at: at.agreement)
            same = other.phase is not waiting.phase or other.waiting_for == waiting.waiting_for
            return (counted(there), same) >= (counted(here), True)
        case Phase.UPDATE:
            return there.update >= here.update
    return True


def _ended(waiting: Status, other: Status, _: Sequence[str]) -> Diagnosis | None:
    if not other.ended or waiting.ended:  # what follows training is run by all that have ended it
        return None
    hint = 'look for ranks with different numbers of batches, which need uneven_inputs="world_size"'
    if waiting.phase is Phase.UPDATE:
        hint = LOOK_FOR_STEPS
    passes = other.position.pass_number
    return Diagnosis(
        Kind.ENDED, f"rank {other.rank} has ended training after {passes} passes, while {_describe(waiting)}; {hint}"
    )


def _skipped(waiting: Status, other: Status, _: Sequence[str]) -> Diagnosis | None:
    here, there = waiting.position, other.position
    if not other.heard or (there.step, other.step_ended) < (here.step, True):
        return None
    text = f"rank {other.rank} has left step {here.step}, in which {_describe(waiting)}"
    if waiting.phase is Phase.PASS:
        ran = here.backward - (there.backward if there.step > here.step else 0)
        count = f"{ran} backwards" if ran > 1 else "1 backward" if ran else "no backward"
        text = f"rank {other.rank} ran {count} in step {here.step}, in which rank {waiting.rank} is in pass "
        text += f"{here.pass_number}" + (f", backward {here.backward + 1} of the step" if here.backward else "")
    return Diagnosis(Kind.SKIPPED, f"{text}: look for a backward in a branch that depends on the rank or on its data")


def _elsewhere(waiting: Status, other: Status, names: Sequence[str]) -> Diagnosis | None:
    if not other.heard or other.phase is Phase.RUNS or _has_come(waiting, other):
        return None
    first, second = sorted((waiting, other), key=lambda status: (status.phase is not Phase.PASS, status.rank))
    phases = {first.phase, second.phase}
    if Phase.AGREEMENT in phases and first.trainable != second.trainable and first.trainable and second.trainable:
        return Diagnosis(Kind.ELSEWHERE, other_trainable(first, second, names))
    hint = "run the same program on every rank: look for a branch that depends on the rank or on its data"
    if Phase.UPDATE in phases:
        hint = LOOK_FOR_STEPS
    elif phases == {Phase.EXCHANGE}:
        hint = (
            "look for a forward in training mode that not all ranks run (one that makes samples on rank 0 alone); put "
            "the module into eval mode for it"
        )
    elif phases == {Phase.PASS, Phase.EXCHANGE}:
        hint = (
            "look for a loss that does not reach that layer on every rank (a training_step that returns None), or for "
            "a branch that depends on the rank"
        )
    return Diagnosis(Kind.ELSEWHERE, f"{_describe(first, second)}, while {_describe(second, first)}: {hint}")


def _describe(status: Status, other: Status | None = None) -> str:
    """Where a rank waits."""
    at = status.position
    text = {
        Phase.ROOT: f"is at the root of pass {at.pass_number}",
        Phase.PASS: f"is in pass {at.pass_number} and has ended its backward",
        Phase.EXCHANGE: f"waits for {status.waiting_for} in pass {at.pass_number}",
        Phase.UPDATE: f"waits for {status.waiting_for} of optimizer step {at.update}",
        Phase.AGREEMENT: f"wants to agree on {status.waiting_for}",
    }[status.phase]
    after = f" after {at.update} optimizer steps" if other is not None and other.phase is Phase.UPDATE else ""
    return f"rank {status.rank} {text}{after}"


def other_trainable(first: Status, second: Status, names: Sequence[str]) -> str:
    """How two ranks differ in which parameters they train.

    Args:
        first: One rank's record.
        second: The other's.
        names: The parameters' names.
    """
    words = {"0": "frozen", "1": "trainable"}
    pairs = zip(names, first.trainable, second.trainable, strict=False)
    difference = next(
        (
            f"parameter {name!r} is {words[mine]} on rank {first.rank} and {words[theirs]} on rank {second.rank}"
            for name, mine, theirs in pairs
            if mine != theirs
        ),
        f"rank {second.rank} went through another sequence of trainable sets than rank {first.rank}",
    )
    return (
        f"ranks disagree on which parameters are trainable in pass {first.position.pass_number}: {difference}. Freeze "
        "and unfreeze the same parameters at the same step on every rank"
    )
