"""Ranks hear of each other's failures outside of passes, and end."""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers import abort_listener
from lightning_bucketddp.peers.abort_listener import AbortListener, listen
from tests.models import Mlp

RunRanks = Callable[..., list[Any]]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def begin(is_stopping: bool = False) -> AbortListener:
    listener = listen(Collectives(None))
    listener.begin(lambda: is_stopping)
    dist.barrier()
    return listener


def one_after_the_other() -> list[tuple[list[str], list[str]]]:
    """What each rank says, and the notes that its error gets, in four ends that follow each other."""
    rank = dist.get_rank()
    found = []
    for fit, kind in enumerate(("none", "same", "different", "consequence"), 1):
        lines = Lines()
        logging.getLogger(abort_listener.__name__).addHandler(lines)
        listener = begin()
        error: Exception = ValueError("no such file" if kind == "same" else f"seen by {rank}")
        if kind == "consequence" and rank == 0:
            error = PeerFailureError("another rank ended")
        if (kind, rank) in {("different", 0), ("consequence", 1)}:
            time.sleep(0.2)
        if kind != "none":
            listener.failed(error)
        if kind in ("different", "consequence") and rank == 1:
            assert listener.store.check([f"heard/{fit}/0"]), "the reason may be gone with this process: it waits"
        assert (listener.failure is not None) == (kind != "none")
        listener.end()
        logging.getLogger(abort_listener.__name__).removeHandler(lines)
        found.append((lines.lines, list(getattr(error, "__notes__", []))))
        dist.barrier()
    listener.close()
    assert not listener._thread.is_alive()
    return found


def test_the_first_failure_is_told_to_the_others(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, one_after_the_other)
    assert second == [([], [])] * 4, "the rank that failed first has nothing to be told"
    told = "rank 0 stops because rank 1 raised ValueError: seen by 1"
    notes = [told] if sys.version_info >= (3, 11) else []
    assert first == [([], []), ([], []), ([told], notes), ([told], notes)]


def stuck(said: Path) -> float:
    abort_listener.LEAVE_SECONDS = 1
    listener = begin()
    since = time.monotonic()
    if dist.get_rank() == 1:
        with said.open("w") as file:
            os.dup2(file.fileno(), 2)
        time.sleep(60)
    listener.failed(OSError("disk full"))
    return time.monotonic() - since


def test_a_rank_that_is_stuck_is_ended(run_ranks: RunRanks, tmp_path: Path) -> None:
    elapsed, nothing = run_ranks(2, stuck, tmp_path / "said", fresh=True, may_exit=[1], timeout=30)
    assert elapsed < abort_listener.LINGER_SECONDS, "the rank that failed need not wait for it"
    assert nothing is None
    said = (tmp_path / "said").read_text()
    assert "rank 1 stops because rank 0 raised OSError: disk full" in said
    assert "rank 1 has not stopped in 1 s, though rank 0 raised OSError: disk full; its process ends here" in said
    assert "in stuck" in said, "where it was stuck"


def saving() -> bool:
    """Rank 1 takes its time on its way out."""
    abort_listener.LEAVE_SECONDS = abort_listener._ABORT_SECONDS = 0.2
    listener = begin(is_stopping=True)
    if dist.get_rank() == 1:
        time.sleep(2)
    listener.failed(OSError("disk full"))
    return listener.failure is not None


def test_a_rank_that_is_stopping_is_left_alone(run_ranks: RunRanks) -> None:
    assert run_ranks(2, saving, fresh=True) == [True, True]


def blocked() -> tuple[float, bool]:
    """Rank 0 waits for rank 1, which has failed and lives on, its connections open."""
    listener = begin()
    since = time.monotonic()
    if dist.get_rank() == 1:
        listener.failed(OSError("disk full"))
        time.sleep(8)
    else:
        with pytest.raises(RuntimeError):
            dist.broadcast(torch.zeros(1), src=0)
    return time.monotonic() - since, dist.is_initialized()


def test_a_rank_blocked_in_a_collective_wakes(run_ranks: RunRanks) -> None:
    (seconds, initialised), _ = run_ranks(2, blocked, fresh=True)
    assert seconds < 6
    assert initialised


def many_wrappers() -> tuple[int, int]:
    """Threads while wrappers are open, and after they were made and dropped many times."""
    gc.collect()  # wrappers that were dropped may hold their group, and so its listener, until then
    wrappers = [BucketDDP(Mlp()) for _ in range(3)]
    during = [thread.name for thread in threading.enumerate()]
    for _ in range(5):
        BucketDDP(Mlp()).close()
        BucketDDP(Mlp())
    after = [thread.name for thread in threading.enumerate()]
    assert len(wrappers) == 3
    return during.count("bucketddp-abort-listener"), after.count("bucketddp-abort-listener")


def test_all_wrappers_of_a_group_have_one_listener(run_ranks: RunRanks) -> None:
    for _ in range(2):  # those of groups that have ended are gone
        assert run_ranks(2, many_wrappers) == [(1, 1)] * 2
