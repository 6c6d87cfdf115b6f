"""Why ranks wait in vain, and what a report of it says, from their records alone."""

import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm import collectives, host_copy, work
from lightning_bucketddp.peers.diagnose import diagnose, silent
from lightning_bucketddp.peers.status import Phase, Position, Status
from lightning_bucketddp.peers.stuck import stuck_report, waits

NAMES = ("stem.weight", "head.weight")
IN_PASS = {"phase": Phase.PASS, "what": "the gradients of 'head.weight'", "pass_number": 6}
CALLS = [("/strategies/ddp.py", 1, "reduce"), ("a.py", 4, "save")]
REDUCE = {"phase": Phase.COLLECTIVE, "what": "the Trainer's reduce", "stack": CALLS}
BUFFERS = {"phase": Phase.EXCHANGE, "what": "the module buffers"}


def at(rank: int, phase: Phase = Phase.RUNS, what: str = "", **more: object) -> Status:
    numbers = {name: more.pop(name) for name in list(more) if name in Position.__annotations__}
    return Status(rank, Position(**numbers), phase, what, **more)  # type: ignore[arg-type]


def test_a_snapshot_stays_as_it_was() -> None:
    status = Status(3, trainable=(True,), names=NAMES)
    for _ in range(2):
        status.begin_step()
        for _ in range(3):
            status.end_pass()
    with status.waiting(lambda: "'head.weight'", Phase.PASS):
        before = status.snapshot()
    status.end_pass()
    assert before == at(3, Phase.PASS, "'head.weight'", pass_number=6, step=2, backward=3, trainable=(True,))
    assert status.snapshot().trainable == (), "others ask for it in a pass or an agreement alone"


def test_ranks_that_may_still_come_are_left_alone() -> None:
    for others in [
        [at(1, pass_number=6), at(2, pass_number=6, step=3)],
        [at(1, **IN_PASS), at(2, **IN_PASS)],
        # Records that were written a little earlier or later than rank 0's.
        [at(1, pass_number=6, exchange=4, **BUFFERS), at(2, pass_number=7)],
        [at(1, Phase.AGREEMENT, "sets", pass_number=6, agreement=2), at(2, pass_number=7, agreement=2)],
        [at(1, Phase.RUNS, "the norm of the gradients", pass_number=6), at(2, ended=True, pass_number=7)],
    ]:
        assert diagnose([at(0, exchange=4, agreement=2, step=3, **IN_PASS), *others]) is None
    behind = at(0, what="the gradients of 2 pass(es), on the device", on_device=2, pass_number=8, step=9)
    for second in (at(1, pass_number=6, step=9), at(1, pass_number=6, step=10, step_ended=True, agreement=1)):
        assert diagnose([behind, second]) is None
    in_reduce, in_pass = at(0, pass_number=6, collective=3, **REDUCE), at(1, collective=2, **IN_PASS)
    for third in (at(2, pass_number=6), at(2, collective=2, silent_for=1.0, **IN_PASS)):
        assert diagnose([in_reduce, in_pass, third]) is None, "not all ranks wait"
    for second in (
        at(1, collective=3, pass_number=7),
        at(1, collective=2, pass_number=6),
        at(1, collective=3, **REDUCE),
    ):
        assert diagnose([in_reduce, second]) is None
    assert diagnose([at(0, exchange=1, ended=True, **BUFFERS), at(1, ended=True)]) is None
    ranks = [at(0, **IN_PASS), at(1), at(2, silent_for=1.0)]
    assert diagnose(ranks) is None
    assert silent(ranks).startswith("nothing is heard of rank 2: look")
    assert silent(ranks[:2]) == ""
    ranks[1:] = [replace(status, process=("node17", 4711), silent_for=1.0) for status in ranks[1:]]
    ranks[1].ended = True
    hint = "look whether a process was killed or stopped, in its output and the system's log"
    of_rank_2 = f"nothing is heard of rank 2 (host node17, pid 4711): {hint}"
    assert silent(ranks) == f"{of_rank_2}; rank 1 (host node17, pid 4711) ended training before"


def test_after_a_step_of_manual_optimisation_ranks_may_still_come_to_an_agreement() -> None:
    waits, late = {"agreement": 2, "step": 3, "phase": Phase.AGREEMENT, "what": "keys"}, {"agreement": 1}
    assert diagnose([at(0, step_ended=True, **waits), at(1, step=3, step_ended=True, **late)]) is None
    said = "rank 1 has left step 3, in which rank 0 wants to agree on keys: look for such a call in a branch"
    for ended, step in [(False, 3), (True, 4)]:
        found = diagnose([at(0, step_ended=ended, **waits), at(1, step=step, step_ended=True, **late)])
        assert found is not None
        assert found.text.startswith(said)


STATISTICS = {"phase": Phase.EXCHANGE, "what": "the statistics of 'a'"}
SETS = {"phase": Phase.AGREEMENT, "what": "sets", "agreement": 1}
MISTAKES: dict[str, tuple[Status, Status]] = {
    "rank 1 ran 2 backwards in step 3, in which rank 0 is in pass 6, backward 3 of the step": (
        at(0, step=3, backward=2, **IN_PASS),
        at(1, step=3, backward=2, step_ended=True, pass_number=6),
    ),
    "rank 1 ran no backward in step 3, in which rank 0 is in pass 6": (
        at(0, step=3, **IN_PASS),
        at(1, step=4, exchange=1, pass_number=6, **BUFFERS),
    ),
    "look for a backward in a branch that depends on the rank or on its data. A backward averages gradients on all "
    "ranks: put one that only some ranks run (for saliency), with its forward, inside no_sync()": (
        at(0, step=3, backward=1, **IN_PASS),
        at(1, step=3, backward=1, step_ended=True, pass_number=6),
    ),
    "rank 1 has left step 3, in which rank 0 waits for the module buffers in pass 0": (
        at(0, step=3, exchange=2, **BUFFERS),
        at(1, step=4, exchange=1),
    ),
    "rank 1 is in pass 6 and has ended its backward, while rank 0 waits for the statistics of 'a' in pass 6: "
    "look for a loss that does not reach that layer": (
        at(0, exchange=2, pass_number=6, **STATISTICS),
        at(1, exchange=1, **IN_PASS),
    ),
    "rank 0 waits for the module buffers in pass 0, while rank 1 waits for the statistics of 'a' in pass 0: look for a "
    "forward": (at(0, exchange=2, **BUFFERS), at(1, exchange=2, **STATISTICS)),
    "after 3 optimizer steps, while rank 1 waits for 'head.weight' of optimizer step 4: look for an optimizer": (
        at(0, updates=(3, 7), **IN_PASS),
        at(1, Phase.UPDATE, "'head.weight'", updates=(4, 9), pass_number=6),
    ),
    "after other optimizer steps, while rank 1 waits for 'head.weight' of optimizer step 4: look for an optimizer": (
        at(0, updates=(4, 8), **IN_PASS),
        at(1, Phase.UPDATE, "'head.weight'", updates=(4, 9), pass_number=6),
    ),
    "parameter 'head.weight' is trainable on rank 0 and frozen on rank 1": (
        at(0, trainable=(True, True), names=NAMES, **IN_PASS),
        at(1, trainable=(True, False), names=NAMES, **SETS),
    ),
    "rank 0 is in pass 6 and has ended its backward, while rank 1 wants to agree on sets": (
        at(0, **IN_PASS),
        at(1, pass_number=6, **SETS),
    ),
    "rank 0 is in pass 6 and has ended its backward, while rank 1 waits for the Trainer's reduce, number 3 "
    "(in save, a.py:4): look for ranks with different numbers of batches": (
        at(0, collective=2, **IN_PASS),
        at(1, pass_number=6, collective=3, **REDUCE),
    ),
    "rank 0 waits for the Trainer's barrier, number 3, while rank 1 waits for the Trainer's reduce, number 3": (
        at(0, Phase.COLLECTIVE, "the Trainer's barrier", collective=3),
        at(1, collective=3, **REDUCE),
    ),
    "rank 1 has begun a validation, while rank 0 is in pass 6": (at(0, **IN_PASS), at(1, validation=1)),
    "rank 0 is in pass 6 and has ended its backward, while rank 1 waits for the Trainer's reduce, number 4": (
        at(0, what="the gradients of 2 pass(es), on the device", on_device=2, pass_number=8, collective=2, step=9),
        at(1, pass_number=6, collective=4, step=7, **REDUCE),
    ),
}


def in_wrappers(*records: Status) -> Status:
    """A rank, as read for wrapper 1."""
    return replace(records[0], records=[Status(0), *(replace(record, rank=0) for record in records)])


MISTAKES |= {
    "rank 0 is in pass 6 and has ended its backward, while rank 1 is in pass 2 and has ended its backward in another": (
        in_wrappers(at(0, **IN_PASS), at(0, pass_number=2)),
        in_wrappers(at(1, pass_number=6), at(1, Phase.PASS, "'a'", pass_number=2)),
    ),
    "rank 0 is in pass 6 and has ended its backward, while rank 1 wants to agree on sets in another wrapper or run": (
        in_wrappers(at(0, **IN_PASS)),
        in_wrappers(at(1, pass_number=6), at(1, **SETS)),
    ),
}
ENDED = at(1, ended=True, pass_number=3)
FAILURES = {
    "rank 1 has ended training after 3 pass(es), while rank 0 is in pass 6": (at(0, **IN_PASS), ENDED),
    "rank 1 has ended training after 3 pass(es), while rank 0 is in pass 5": (
        at(0, what="gradients", on_device=1, pass_number=6),
        ENDED,
    ),
}


@pytest.mark.parametrize("words", [*MISTAKES, *FAILURES])
def test_a_diagnosis_names_both_ranks(words: str) -> None:
    first, second = {**MISTAKES, **FAILURES}[words]
    for order in ((first, second), (second, first)):
        found = diagnose(order)
        assert found is not None
        assert found.mismatch == (words in MISTAKES)
        assert words in found.text


def test_a_silent_rank_does_not_speak_for_one_at_the_same_point() -> None:
    late = {"step": 3, "step_ended": True, "pass_number": 6}
    found = diagnose([at(0, step=3, **IN_PASS), at(1, silent_for=1.0, **late), at(2, **late)])
    assert found is not None
    assert found.text.startswith("rank 2 ran no backward in step 3")


def walk(rank: int, program: list[tuple[int, Phase]], moments: int, behind: int) -> list[Status]:
    """Where a rank is in two wrappers that has come to some point of a program, and its device to an earlier one."""
    counted = {Phase.EXCHANGE: "exchange", Phase.UPDATE: "updates", Phase.AGREEMENT: "agreement"}
    counted[Phase.COLLECTIVE] = "collective"
    records = []
    for wrapper in range(2):
        counts = dict.fromkeys(("pass_number", "exchange", "agreement", "collective", "updates"), 0)
        for moment, (where, phase) in enumerate(program[:moments]):
            if where == wrapper and phase in counted:
                counts[counted[phase]] += 1
            elif where == wrapper and phase is Phase.PASS and moment + 1 < moments:  # counts when it is complete
                counts["pass_number"] += 1
        steps = counts.pop("updates")
        where, phase = program[moments - 1]
        waits = (phase, "something") if where == wrapper else ()
        on_device = min(behind, counts["pass_number"]) if phase is Phase.RUNS else 0
        records.append(at(rank, *waits, updates=(steps, hash(steps)), on_device=on_device, **counts))
    return [replace(record, records=[replace(each, rank=0) for each in records]) for record in records]


def test_ranks_of_one_program_are_never_taken_for_a_mistake() -> None:
    """Ranks wait at any two neighbouring points, as none leaves one before all have come; records are of any moment."""
    draw, compared = random.Random(0), 0
    for _ in range(600):
        program = [(draw.randrange(2), phase) for phase in draw.choices([Phase.RUNS, *[*Phase][2:]], k=8)]
        moments = [draw.randrange(1, 9) for _ in range(3)]  # records are written one after the other
        ranks = [walk(rank, program, moment, draw.randrange(3)) for rank, moment in enumerate(moments)]
        for of_one_wrapper in zip(*ranks, strict=True):
            assert diagnose(of_one_wrapper) is None, program
        compared += len(set(moments)) > 1
    assert compared > 400


TRAINS = [(__file__, 1, "training_step"), ("/no/such/file.py", 7, "<module>")]
C10D = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")


def test_a_rank_waits_if_it_says_so_or_is_in_a_collective() -> None:
    assert dist.distributed_c10d.__file__ == C10D, "where torch's collectives are"
    for innermost in (C10D, *(str(module.__file__) for module in (work, collectives, host_copy))):
        assert waits(Status(0, stack=[(innermost, 1, "barrier"), *TRAINS]))
        assert not waits(Status(0, stack=[*TRAINS, (innermost, 1, "run")])), "a launcher"
    assert waits(Status(0, Position(), Phase.RUNS, "the norm"))
    assert not waits(Status(0, stack=TRAINS))
    assert not waits(Status(0, Position(), Phase.PASS, "'a'", silent_for=1.0)), "it may have been there long ago"
    checkpoint = str(Path(C10D).parent / "checkpoint" / "filesystem.py")
    assert not waits(Status(0, stack=[(checkpoint, 1, "write")])), "all ranks may write for minutes"


def test_a_report_says_who_has_not_come_and_where_each_rank_is() -> None:
    at = Position(pass_number=6, step=7)
    waiting = [(C10D, 1, "barrier"), *TRAINS]
    ranks = [Status(rank, at, Phase.PASS, "the gradients of 'a'", stack=waiting) for rank in (0, 1, 2, 5)]
    ranks += [Status(3, at, stack=TRAINS), Status(4, Position(pass_number=4), silent_for=58.2)]
    ranks += [Status(6, at, ended=True, silent_for=1.0), Status(7, at, stack=waiting)]
    outer, inner = (f"    {file}:{line} in {name}: " for file, line, name in TRAINS[::-1])
    calls = [f"{outer}?", f'{inner}"""{__doc__}"""']
    assert stuck_report(ranks, 2, 60.2).splitlines() == [
        "rank 2 has waited for 60 s: ranks 3 to 4, 6 did not come. Where ranks are (the innermost call last):",
        "  rank 3: not waiting, in step 7, pass 6",
        *calls,
        "  rank 4: silent for 58 s; its last record, which may be old, says in pass 4",
        "  rank 6: ended training",
        "  ranks 0 to 2, 5: waiting for the gradients of 'a', in step 7, pass 6",
        *calls,
        "  rank 7: waiting in barrier(), in step 7, pass 6",
        *calls,
    ]
    late = [replace(ranks[4], process=("node17", 4711)), ranks[0]]
    assert "rank 3 (host node17, pid 4711) did not come" in stuck_report(late, 0, 5)
    assert "5 s: all ranks wait, for different things" in stuck_report(ranks[:4], 0, 5)
    deep = [("own.py", 1, "f"), *[(C10D, 1, "g")] * 5, ("own.py", 1, "h")]
    calls = ["own.py:1 in h", *[f"{C10D}:1 in g"] * 3, "own.py:1 in f"]
    assert [
        line.strip().split(": ")[0] for line in stuck_report([Status(0, stack=deep)], 1, 1).splitlines()[2:]
    ] == calls
    of_package = str(Path(work.__file__).parent.parent / "reducer" / "passes.py")  # as in an editable install
    outer = [("own.py", 1, "f"), *[(of_package, 1, "g")] * 5, ("own.py", 1, "h")]
    innermost = [(work.__file__, 1, "wait"), (contextlib.__file__, 1, "__exit__"), (of_package, 1, "finish")]
    for status in (Status(0, stack=outer), Status(0, waiting_for="x", stack=[*innermost, *outer])):
        calls = [line.strip().split(": ")[0] for line in stuck_report([status], 1, 1).splitlines()[2:]]
        assert calls == ["own.py:1 in h", *[f"{of_package}:1 in g"] * 3, "own.py:1 in f"]
    many = [Status(rank, stack=[("a.py", rank, "f")]) for rank in range(100)]
    assert stuck_report(many, 0, 1).count("a.py") == 8, "at most so many stacks"
