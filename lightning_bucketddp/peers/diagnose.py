"""Why ranks wait for each other in vain: from their records, without a process or a store.

All ranks run the same program. Suppose that rank A has come to a point that rank B has not, and rank B to a point that
rank A has not. Then they never meet, whenever the records were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_bucketddp.peers.names import in_words
from lightning_bucketddp.peers.status import COUNTED, Frame, Phase, Status

LOOK_FOR_BATCHES = (
    "look for an exception in its output; else look for ranks with different numbers of batches, which need "
    'uneven_inputs="active_ranks" in a Trainer, and "with model.join():" in plain PyTorch'
)
LOOK_FOR_STEPS = (
    "look for an optimizer.step() in a branch that depends on the rank, or for one that raised. The parameters of the "
    "ranks are no longer the same; restart from a checkpoint"
)
LOCAL_BACKWARD = (
    "A backward averages gradients on all ranks: put one that only some ranks run (for saliency), with its forward, "
    "inside no_sync()"
)
_LOOK_FOR_BRANCH = "run the same program on every rank: look for a branch that depends on the rank or on its data"
_LOOK_FOR_ENDS = (
    "look for ranks with different numbers of batches (an IterableDataset, limit_train_batches), which need "
    'uneven_inputs="active_ranks", and for trainer.should_stop or a callback that ends training on some ranks alone'
)
_HINTS = {
    frozenset({Phase.EXCHANGE}): (
        "look for a forward in training mode that not all ranks run (one that makes samples on rank 0 alone); put "
        "the module into eval mode for it"
    ),
    frozenset({Phase.PASS, Phase.EXCHANGE}): (
        "look for a loss that does not reach that layer on every rank (a training_step that returns None), for a "
        f"forward without its backward, or for a branch that depends on the rank. {LOCAL_BACKWARD}"
    ),
    frozenset({Phase.PASS, Phase.COLLECTIVE}): f"{_LOOK_FOR_ENDS}. {LOCAL_BACKWARD}",
    frozenset({Phase.COLLECTIVE}): _LOOK_FOR_ENDS,
}
"""Hints for the user, by the phases in which two ranks wait."""

_INNER = ("/torch/", "/lightning_bucketddp/", "/strategies/", "/core/module.py", "/lightning_utilities/", "/fabric/")
"""Files through which the Trainer's collectives are called."""


ALL_RUNS = 2**31
"""The run of a failure that ends all runs, later ones too."""


@dataclass(frozen=True)
class Failure:
    """Why ranks cannot go on.

    Attributes:
        text: A sentence without its full stop. It names the rank that is the cause. Empty if there is no failure.
        mismatch: True if the ranks are at different points of the program; False if one of them failed.
        run: The run that it ends, and with it all earlier ones; 0 for the present one.
    """

    text: str = ""
    mismatch: bool = False
    run: int = 0


def diagnose(statuses: Sequence[Status]) -> Failure | None:
    """Find out why ranks wait.

    Args:
        statuses: The records of all ranks, in any order.

    Returns:
        None if the awaited ranks may still come.
    """
    # Most ranks of a large world are at the same point: the first of them speaks for all.
    by_rank = sorted(statuses, key=lambda status: status.rank, reverse=True)
    distinct = {(status.heard, repr(replace(status, rank=0))): status for status in by_rank}.values()
    heard = [_where_the_device_is(status) for status in distinct if status.heard]
    pairs = [(a, b) for a in heard for b in distinct if not _has_come(b, a)]
    all_wait = all(status.heard and status.waiting_for for status in statuses)
    for find in (_ended, _skipped, _validates, _elsewhere, _in_another_wrapper):
        for waiting, other in pairs:
            # A user's own code may mix the Trainer's collectives and torch's: then they must all wait.
            if Phase.COLLECTIVE in (waiting.phase, other.phase) and not (all_wait and find is _elsewhere):
                continue
            if text := find(waiting, other):
                run = ALL_RUNS if find is _in_another_wrapper else 0
                return Failure(text, mismatch=find is not _ended, run=run)
    return None


def silent(statuses: Sequence[Status]) -> str:
    """Which ranks have not answered, in words; empty if all have. They may still come."""
    away = {status.rank: status.process for status in statuses if not (status.heard or status.ended)}
    ended = {status.rank: status.process for status in statuses if status.ended and not status.heard}
    hint = "look whether a process was killed or stopped, in its output and the system's log"
    told = [f"nothing is heard of {in_words(sorted(away), away)}: {hint}"] if away else []
    told += [f"{in_words(sorted(ended), ended)} ended training before"] if ended else []
    return "; ".join(told)


def absent(statuses: Sequence[Status]) -> str:
    """Which ranks do not wait, though another one has waited for them in vain, in words; empty if all do."""
    away = {status.rank: status.process for status in statuses if status.heard and not status.waiting_for}
    return f"{in_words(sorted(away), away)} did not come" if away else ""


def _where_the_device_is(status: Status) -> Status:
    """The record of a rank whose host is ahead of its device, which waits in an earlier pass. Others as they are."""
    if not isinstance(status.on_device, int) or status.on_device == 0:
        return status
    at = replace(status.position, pass_number=status.position.pass_number - status.on_device)
    return replace(status, position=at, phase=Phase.PASS)


def _has_come(other: Status, waiting: Status) -> bool:
    """Whether a rank has come to where another one waits, as far as is known."""
    here, there, phase = waiting.position, other.position, waiting.phase
    # Each case asks: has it come further, or just as far and to the same thing?
    if phase in (Phase.PASS, Phase.ROOT):
        return (there.pass_number, other.phase in (Phase.PASS, phase)) >= (here.pass_number, True)
    if phase in COUNTED:
        same = other.phase is not phase or other.waiting_for == waiting.waiting_for
        return (getattr(there, phase), same) >= (getattr(here, phase), True)
    return phase is Phase.RUNS or there.update > here.update or there.updates == here.updates


def _ended(waiting: Status, other: Status) -> str:
    """``other`` has ended training."""
    if not other.ended or waiting.ended:  # all ranks that have ended training run what follows it
        return ""
    hint = LOOK_FOR_STEPS if waiting.phase is Phase.UPDATE else LOOK_FOR_BATCHES
    passes = other.position.pass_number
    return f"{other.name} has ended training after {passes} pass(es), while {_describe(waiting)}; {hint}"


def _skipped(waiting: Status, other: Status) -> str:
    """``other`` has left a step in which ``waiting`` runs one more backward."""
    here, there = waiting.position, other.position
    if not other.heard or waiting.on_device or (there.step, other.step_ended) < (here.step, True):
        return ""  # of a device nobody knows in which step it is
    if waiting.phase is Phase.AGREEMENT and waiting.step_ended and there.step == here.step:
        return ""  # both have: it waits after the step
    text = f"{other.name} has left step {here.step}, in which {_describe(waiting)}"
    if waiting.phase is Phase.PASS:
        ran = here.backward - (there.backward if there.step > here.step else 0)
        count = f"{ran} backwards" if ran > 1 else "1 backward" if ran else "no backward"
        text = f"{other.name} ran {count} in step {here.step}, in which {waiting.name} is in pass "
        text += f"{here.pass_number}" + (f", backward {here.backward + 1} of the step" if here.backward else "")
    what = "such a call" if waiting.phase is Phase.AGREEMENT else "a backward"
    text += f": look for {what} in a branch that depends on the rank or on its data"
    return f"{text}. {LOCAL_BACKWARD}" if waiting.phase is Phase.PASS else text


def _validates(waiting: Status, other: Status) -> str:
    """``other`` has begun a validation that ``waiting`` has not come to."""
    if other.position.validation <= waiting.position.validation:
        return ""
    return f"{other.name} has begun a validation, while {_describe(waiting)}; {LOOK_FOR_BATCHES}"


def _elsewhere(waiting: Status, other: Status) -> str:
    """Two ranks wait for each other at different points of the program."""
    if not other.heard or other.phase is Phase.RUNS or _has_come(waiting, other):
        return ""
    first, second = sorted((waiting, other), key=lambda status: (status.phase is not Phase.PASS, status.rank))
    phases = frozenset({first.phase, second.phase})
    if Phase.AGREEMENT in phases and first.trainable != second.trainable and first.trainable and second.trainable:
        return other_trainable(first, second)
    hint = LOOK_FOR_STEPS if Phase.UPDATE in phases else _HINTS.get(phases, _LOOK_FOR_BRANCH)
    return f"{_describe(first, second)}, while {_describe(second, first)}: {hint}"


def _in_another_wrapper(waiting: Status, other: Status) -> str:
    """``other`` waits in another wrapper, at a point that ``waiting`` has not come to."""
    for number, there in enumerate(other.records if other.heard else ()):
        here = waiting.records[number] if number < len(waiting.records) else Status(waiting.rank)
        if there.phase not in (Phase.RUNS, Phase.COLLECTIVE) and not _has_come(here, there):
            there = replace(there, rank=other.rank)
            return f"{_describe(waiting)}, while {_describe(there)} in another wrapper or run: {_LOOK_FOR_BRANCH}"
    return ""


def _describe(status: Status, other: Status | None = None) -> str:
    """Where a rank waits."""
    at = status.position
    text = {
        Phase.ROOT: f"is at the root of pass {at.pass_number}",
        Phase.PASS: f"is in pass {at.pass_number} and has ended its backward",
        Phase.EXCHANGE: f"waits for {status.waiting_for} in pass {at.pass_number}",
        Phase.UPDATE: f"waits for {status.waiting_for} of optimizer step {at.update}",
        Phase.AGREEMENT: f"wants to agree on {status.waiting_for}",
        Phase.COLLECTIVE: f"waits for {status.waiting_for}, number {at.collective}{_called_in(status.stack)}",
    }[status.phase]
    after = ""
    if other is not None and other.phase is Phase.UPDATE:
        after = f" after {at.update if at.update != other.position.update else 'other'} optimizer steps"
    return f"{status.name} {text}{after}"


def _called_in(stack: Sequence[Frame]) -> str:
    """Who called a collective of the Trainer's, in words."""
    for file, line, name in stack:
        if not any(inner in file for inner in _INNER):
            return f" (in {name}, {file}:{line})"
    return ""


def other_trainable(first: Status, second: Status) -> str:
    """How two ranks differ in the parameters that they train.

    Args:
        first: One rank's record.
        second: The other's.
    """
    difference = f"{second.name} went through another sequence of trainable sets than {first.name}"
    for name, *flags in zip(first.names, first.trainable, second.trainable, strict=False):
        if flags[0] != flags[1]:
            mine, theirs = ("trainable" if flag else "frozen" for flag in flags)
            difference = f"parameter {name!r} is {mine} on {first.name} and {theirs} on {second.name}"
            break
    return (
        f"ranks disagree on which parameters are trainable in pass {first.position.pass_number}: {difference}. Freeze "
        "and unfreeze the same parameters at the same step on every rank"
    )
