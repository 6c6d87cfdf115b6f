"""What ranks that wait are told: why they wait in vain, and where each of them is.

Both follow from the ranks' records alone, so each test writes some by hand: no process, no store. Most say that rank 0
waits for gradients in pass 6, and rank 1 is elsewhere.
"""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm import collectives, host_copy, work
from lightning_bucketddp.peers.diagnose import diagnose, silent
from lightning_bucketddp.peers.status import COUNTED, Frame, Phase, Position, Status
from lightning_bucketddp.peers.stuck import stuck_report, waits

NAMES = ("stem.weight", "head.weight")


def at(rank: int, phase: Phase = Phase.RUNS, what: str = "", **more: Any) -> Status:
    """A rank's record. It waits in a phase, if any; ``more`` are attributes of its position and of the record."""
    position = {field.name: more.pop(field.name) for field in fields(Position) if field.name in more}
    return Status(rank, Position(**position), phase, what, **more)


def in_pass(rank: int, **more: Any) -> Status:
    return at(rank, Phase.PASS, "the gradients of 'head.weight'", **{"pass_number": 6, **more})


def on_device(rank: int, passes: int, **more: Any) -> Status:
    """The host of an accelerator is so many passes ahead of the device."""
    return at(rank, what=f"the gradients of {passes} pass(es), on the device", on_device=passes, **more)


def at_buffers(rank: int, **more: Any) -> Status:
    return at(rank, Phase.EXCHANGE, "the module buffers", **more)


def at_statistics(rank: int, **more: Any) -> Status:
    return at(rank, Phase.EXCHANGE, "the statistics of 'a'", **more)


def at_update(rank: int, **more: Any) -> Status:
    return at(rank, Phase.UPDATE, "'head.weight'", **more)


def agreeing(rank: int, what: str = "sets", **more: Any) -> Status:
    return at(rank, Phase.AGREEMENT, what, **more)


def in_reduce(rank: int, **more: Any) -> Status:
    calls = [("/strategies/ddp.py", 1, "reduce"), ("a.py", 4, "save")]
    return at(rank, Phase.COLLECTIVE, "the Trainer's reduce", stack=calls, **more)


def in_barrier(rank: int, **more: Any) -> Status:
    return at(rank, Phase.COLLECTIVE, "the Trainer's barrier", **more)


def in_wrappers(*records: Status) -> Status:
    """A rank that has a record for each of several wrappers, as read for the first one."""
    return replace(records[0], records=[Status(0), *(replace(record, rank=0) for record in records)])


# -- why ranks wait in vain --------------------------------------------------------------------------------------------

MAY_COME = {
    "others have not come": [in_pass(0, step=3), at(1, pass_number=6), at(2, pass_number=6, step=3)],
    "all have come": [in_pass(0), in_pass(1), in_pass(2)],
    "one is further": [in_pass(0, exchange=4), at_buffers(1, pass_number=6, exchange=4), at(2, pass_number=7)],
    "one agreed a moment ago": [
        in_pass(0, agreement=2),
        agreeing(1, pass_number=6, agreement=2),
        at(2, pass_number=7, agreement=2),
    ],
    "one has ended after this pass": [
        in_pass(0),
        at(1, what="the norm of the gradients", pass_number=6),
        at(2, ended=True, pass_number=7),
    ],
    "a device is behind, others in its step": [on_device(0, 2, pass_number=8, step=9), at(1, pass_number=6, step=9)],
    "a device is behind, others after its step": [
        on_device(0, 2, pass_number=8, step=9),
        at(1, pass_number=6, step=10, step_ended=True, agreement=1),
    ],
    "a third rank does not wait": [
        in_reduce(0, pass_number=6, collective=3),
        in_pass(1, collective=2),
        at(2, pass_number=6),
    ],
    "a third rank is silent": [
        in_reduce(0, pass_number=6, collective=3),
        in_pass(1, collective=2),
        in_pass(2, collective=2, silent_for=1.0),
    ],
    "one has left the collective": [in_reduce(0, pass_number=6, collective=3), at(1, collective=3, pass_number=7)],
    "one has not begun it": [in_reduce(0, pass_number=6, collective=3), at(1, collective=2, pass_number=6)],
    "all are in it": [in_reduce(0, pass_number=6, collective=3), in_reduce(1, collective=3)],
    "all have ended training": [at_buffers(0, exchange=1, ended=True), at(1, ended=True)],
    "one is silent": [in_pass(0), at(1), at(2, silent_for=1.0)],
    "after a step of manual optimisation": [
        agreeing(0, "keys", agreement=2, step=3, step_ended=True),
        at(1, agreement=1, step=3, step_ended=True),
    ],
}


@pytest.mark.parametrize("ranks", MAY_COME.values(), ids=MAY_COME)
def test_ranks_that_may_still_come_are_left_alone(ranks: list[Status]) -> None:
    assert diagnose(ranks) is None


NO_SYNC = (
    "look for a backward in a branch that depends on the rank or on its data. A backward averages gradients on all "
    "ranks: put one that only some ranks run (for saliency), with its forward, inside no_sync()"
)
MISTAKES = {
    "a backward too few": (
        f"rank 1 ran 2 backwards in step 3, in which rank 0 is in pass 6, backward 3 of the step: {NO_SYNC}",
        in_pass(0, step=3, backward=2),
        at(1, step=3, backward=2, step_ended=True, pass_number=6),
    ),
    "one backward too few": (
        f"rank 1 ran 1 backward in step 3, in which rank 0 is in pass 6, backward 2 of the step: {NO_SYNC}",
        in_pass(0, step=3, backward=1),
        at(1, step=3, backward=1, step_ended=True, pass_number=6),
    ),
    "no backward": (
        "rank 1 ran no backward in step 3, in which rank 0 is in pass 6",
        in_pass(0, step=3),
        at_buffers(1, step=4, exchange=1, pass_number=6),
    ),
    "a forward too few": (
        "rank 1 has left step 3, in which rank 0 waits for the module buffers in pass 0",
        at_buffers(0, step=3, exchange=2),
        at(1, step=4, exchange=1),
    ),
    "no loss for a layer": (
        "rank 1 is in pass 6 and has ended its backward, while rank 0 waits for the statistics of 'a' in pass 6: look "
        "for a loss that does not reach that layer",
        at_statistics(0, exchange=2, pass_number=6),
        in_pass(1, exchange=1),
    ),
    "different exchanges": (
        "rank 0 waits for the module buffers in pass 0, while rank 1 waits for the statistics of 'a' in pass 0: look "
        "for a forward",
        at_buffers(0, exchange=2),
        at_statistics(1, exchange=2),
    ),
    "an optimizer step too few": (
        "rank 0 is in pass 6 and has ended its backward after 3 optimizer steps, while rank 1 waits for 'head.weight' "
        "of optimizer step 4: look for an optimizer",
        in_pass(0, updates=(3, 7)),
        at_update(1, updates=(4, 9), pass_number=6),
    ),
    "other optimizer steps": (
        "after other optimizer steps, while rank 1 waits for 'head.weight' of optimizer step 4: look for an optimizer",
        in_pass(0, updates=(4, 8)),
        at_update(1, updates=(4, 9), pass_number=6),
    ),
    "other trainable parameters": (
        "parameter 'head.weight' is trainable on rank 0 and frozen on rank 1",
        in_pass(0, trainable=(True, True), names=NAMES),
        agreeing(1, agreement=1, trainable=(True, False), names=NAMES),
    ),
    "an agreement on one rank": (
        "rank 0 is in pass 6 and has ended its backward, while rank 1 wants to agree on sets",
        in_pass(0),
        agreeing(1, agreement=1, pass_number=6),
    ),
    "an agreement after the step": (
        "rank 1 has left step 3, in which rank 0 wants to agree on keys: look for such a call in a branch",
        agreeing(0, "keys", agreement=2, step=3),
        at(1, agreement=1, step=3, step_ended=True),
    ),
    "an agreement in the step before": (
        "rank 1 has left step 3, in which rank 0 wants to agree on keys: look for such a call in a branch",
        agreeing(0, "keys", agreement=2, step=3, step_ended=True),
        at(1, agreement=1, step=4, step_ended=True),
    ),
    "a collective on one rank": (
        "rank 0 is in pass 6 and has ended its backward, while rank 1 waits for the Trainer's reduce, number 3 (in "
        "save, a.py:4): look for ranks with different numbers of batches",
        in_pass(0, collective=2),
        in_reduce(1, pass_number=6, collective=3),
    ),
    "different collectives": (
        "rank 0 waits for the Trainer's barrier, number 3, while rank 1 waits for the Trainer's reduce, number 3",
        in_barrier(0, collective=3),
        in_reduce(1, collective=3),
    ),
    "a validation on one rank": (
        "rank 1 has begun a validation, while rank 0 is in pass 6",
        in_pass(0),
        at(1, validation=1),
    ),
    "a device is behind": (
        "rank 0 is in pass 6 and has ended its backward, while rank 1 waits for the Trainer's reduce, number 4",
        on_device(0, 2, pass_number=8, collective=2, step=9),
        in_reduce(1, pass_number=6, collective=4, step=7),
    ),
    "passes of different wrappers": (
        "rank 0 is in pass 6 and has ended its backward, while rank 1 is in pass 2 and has ended its backward in "
        "another wrapper",
        in_wrappers(in_pass(0), at(0, pass_number=2)),
        in_wrappers(at(1, pass_number=6), in_pass(1, pass_number=2)),
    ),
    "a wrapper on one rank": (
        "rank 0 is in pass 6 and has ended its backward, while rank 1 wants to agree on sets in another wrapper or run",
        in_wrappers(in_pass(0)),
        in_wrappers(at(1, pass_number=6), agreeing(1, agreement=1)),
    ),
}


@pytest.mark.parametrize(("words", "first", "second"), MISTAKES.values(), ids=MISTAKES)
def test_ranks_that_never_meet_are_told_where_both_are(words: str, first: Status, second: Status) -> None:
    for order in ((first, second), (second, first)):
        found = diagnose(order)
        assert found is not None
        assert found.mismatch
        assert words in found.text


@pytest.mark.parametrize(
    ("waiting", "pass_number"), [(in_pass(0), 6), (on_device(0, 1, pass_number=6), 5)], ids=["host", "device"]
)
def test_a_rank_that_has_ended_training_is_named(waiting: Status, pass_number: int) -> None:
    ended = at(1, ended=True, pass_number=3)
    for order in ((waiting, ended), (ended, waiting)):
        found = diagnose(order)
        assert found is not None
        assert not found.mismatch, "a failure of one rank"
        assert f"rank 1 has ended training after 3 pass(es), while rank 0 is in pass {pass_number}" in found.text


def test_silent_ranks_are_named_and_those_that_ended_training() -> None:
    silent_rank = at(2, silent_for=1.0, process=("node17", 4711))
    ended = at(1, silent_for=1.0, ended=True, process=("node17", 4712))
    assert silent([in_pass(0), at(1)]) == ""
    assert silent([in_pass(0), ended, silent_rank]) == (
        "nothing is heard of rank 2 (host node17, pid 4711): look whether a process was killed or stopped, in its "
        "output and the system's log; rank 1 (host node17, pid 4712) ended training before"
    )


def test_a_silent_rank_does_not_speak_for_one_at_the_same_point() -> None:
    late = {"step": 3, "step_ended": True, "pass_number": 6}
    found = diagnose([in_pass(0, step=3), at(1, silent_for=1.0, **late), at(2, **late)])
    assert found is not None
    assert found.text.startswith("rank 2 ran no backward in step 3")


def walk(rank: int, program: Sequence[tuple[int, Phase]], behind: int) -> list[Status]:
    """A rank's records in two wrappers.

    Args:
        rank: The rank.
        program: The waits that it has begun, in one wrapper or the other. It is in the last one.
        behind: How many passes its device is behind, if it has one.
    """
    records = []
    *past, (current_wrapper, current_phase) = program
    for wrapper in range(2):
        begun = [phase for where, phase in program if where == wrapper]
        passes, steps = past.count((wrapper, Phase.PASS)), begun.count(Phase.UPDATE)
        counts = {phase.value: begun.count(phase) for phase in COUNTED}
        counts |= {"on_device": min(behind, passes) if current_phase is Phase.RUNS else 0, "pass_number": passes}
        waits = (current_phase, "something") if wrapper == current_wrapper else ()
        records.append(at(rank, *waits, updates=(steps, hash(steps)), **counts))
    return [replace(record, records=[replace(each, rank=0) for each in records]) for record in records]


def test_ranks_of_one_program_are_never_taken_for_a_mistake() -> None:
    """Random programs, and three ranks that have come to any points of one: their records are of different moments."""
    draw, apart = random.Random(0), 0
    for _ in range(600):
        phases = draw.choices([phase for phase in Phase if phase is not Phase.ROOT], k=8)
        program = [(draw.randrange(2), phase) for phase in phases]
        moments = [draw.randrange(1, 9) for _ in range(3)]
        ranks = [walk(rank, program[:moment], draw.randrange(3)) for rank, moment in enumerate(moments)]
        for records_of_a_wrapper in zip(*ranks, strict=True):
            assert diagnose(records_of_a_wrapper) is None, program
        apart += len(set(moments)) > 1
    assert apart > 400, "programs in which ranks are at different points"


# -- where ranks are ---------------------------------------------------------------------------------------------------

USER = [(__file__, 1, "training_step"), ("/no/such/file.py", 7, "<module>")]
"""A stack, the innermost call first."""
C10D = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")
BARRIER = (C10D, 1, "barrier")


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


@pytest.mark.parametrize("file", [C10D, *(str(module.__file__) for module in (work, collectives, host_copy))])
def test_a_rank_waits_if_its_innermost_call_is_in_a_collective(file: str) -> None:
    assert waits(Status(0, stack=[(file, 1, "barrier"), *USER]))
    assert not waits(Status(0, stack=[*USER, (file, 1, "run")])), "a launcher"


def test_the_file_of_torch_s_collectives_has_the_name_that_is_looked_for() -> None:
    assert dist.distributed_c10d.__file__ == C10D


def test_a_rank_waits_if_its_record_says_for_what() -> None:
    assert waits(at(0, what="the norm"))
    assert not waits(at(0, stack=USER))
    assert not waits(at(0, Phase.PASS, "'a'", silent_for=1.0)), "it may have been there long ago"


def test_a_rank_that_writes_a_checkpoint_does_not_wait() -> None:
    file = str(Path(C10D).parent / "checkpoint" / "filesystem.py")
    assert not waits(Status(0, stack=[(file, 1, "write")])), "all ranks may write for minutes"


def test_a_report_says_who_has_not_come_and_where_each_rank_is() -> None:
    here = {"pass_number": 6, "step": 7}
    ranks = [at(rank, Phase.PASS, "the gradients of 'a'", stack=[BARRIER, *USER], **here) for rank in (0, 1, 2, 5)]
    ranks += [at(3, stack=USER, **here), at(4, silent_for=58.2, pass_number=4)]
    ranks += [at(6, ended=True, silent_for=1.0, **here), at(7, stack=[BARRIER, *USER], **here)]
    first_line = Path(__file__).read_text().splitlines()[0]
    calls = ["    /no/such/file.py:7 in <module>: ?", f"    {__file__}:1 in training_step: {first_line}"]
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


def test_a_report_names_host_and_process() -> None:
    report = stuck_report([at(3, process=("node17", 4711)), in_pass(0)], 0, 5)
    assert "rank 3 (host node17, pid 4711) did not come" in report


def test_a_report_says_that_all_ranks_wait() -> None:
    assert "5 s: all ranks wait, for different things" in stuck_report([in_pass(0), in_barrier(1)], 0, 5)


def calls_shown(stack: Sequence[Frame], waiting_for: str = "") -> list[str]:
    """The calls that a report shows of a stack, the innermost last."""
    _, _, *lines = stuck_report([at(0, what=waiting_for, stack=stack)], 1, 1).splitlines()
    return [line.strip().split(": ")[0] for line in lines]


def test_a_report_shows_the_last_calls_and_the_user_s_own() -> None:
    stack = [("own.py", 1, "f"), *[(C10D, 1, "g")] * 5, ("own.py", 1, "h")]
    assert calls_shown(stack) == ["own.py:1 in h", *[f"{C10D}:1 in g"] * 3, "own.py:1 in f"]


def test_a_report_takes_the_package_for_an_installed_one_and_leaves_out_where_it_waits() -> None:
    """In an editable install it is in no folder of packages."""
    package = str(Path(work.__file__).parent.parent / "reducer" / "passes.py")
    stack = [("own.py", 1, "f"), *[(package, 1, "g")] * 5, ("own.py", 1, "h")]
    expected = ["own.py:1 in h", *[f"{package}:1 in g"] * 3, "own.py:1 in f"]
    innermost = [(work.__file__, 1, "wait"), (contextlib.__file__, 1, "__exit__"), (package, 1, "finish")]
    assert calls_shown(stack) == expected
    assert calls_shown([*innermost, *stack], waiting_for="x") == expected


def test_a_report_shows_eight_stacks_at_most() -> None:
    many = [at(rank, stack=[("a.py", rank, "f")]) for rank in range(100)]
    assert stuck_report(many, 0, 1).count("a.py") == 8
