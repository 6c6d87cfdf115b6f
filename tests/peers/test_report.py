"""What a report of ranks that wait says, from their records alone."""

from pathlib import Path

import torch
import torch.distributed as dist

from lightning_bucketddp.comm import work
from lightning_bucketddp.peers.report import report, waits
from lightning_bucketddp.peers.status import Phase, Position, Status

TRAINS = [(__file__, 1, "training_step"), ("/no/such/file.py", 7, "<module>")]
C10D = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")


def test_a_rank_waits_if_it_says_so_or_is_in_a_collective() -> None:
    assert dist.distributed_c10d.__file__ == C10D, "where torch's collectives are"
    for innermost in (C10D, str(work.__file__)):
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
    (first, second), source = ((f"    {file}:{line} in {name}") for file, line, name in TRAINS[::-1]), __doc__
    assert report(ranks, 2, 60.2).splitlines() == [
        "rank 2 has waited for 60 s: ranks 3 to 4, 6 have not come. Where ranks are (the innermost call last):",
        "  rank 3: not waiting, in step 7, pass 6",
        first,
        f'{second}: """{source}"""',
        "  rank 4: silent for 58 s; its last record, which may be old, says in pass 4",
        "  rank 6: ended training",
        "  ranks 0 to 2, 5: waiting for the gradients of 'a', in step 7, pass 6",
        first,
        f'{second}: """{source}"""',
        "  rank 7: waiting in barrier(), in step 7, pass 6",
        first,
        f'{second}: """{source}"""',
    ]
    assert "5 s: all ranks wait, for different things" in report(ranks[:4], 0, 5)
    many = [Status(rank, stack=[("a.py", rank, "f")]) for rank in range(100)]
    assert report(many, 0, 1).count("a.py") == 8, "at most so many stacks"
