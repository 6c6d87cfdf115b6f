"""Ranks hear of each other's failures outside of passes, and end."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers import abort_listener, roll_call
from lightning_bucketddp.peers.abort_listener import AbortListener, listen, tell_end_of_rank
from tests.models import Mlp
from tests.pool import RunRanks, on_ranks
from tests.reference import (
    WHERE,
    backward,
    eventually,
    group_store,
    logged,
    raises_soon,
    without_where,
)


def begin(is_stopping: bool = False) -> AbortListener:
    listener = listen(Collectives(None))
    listener.begin_fit(lambda: is_stopping)
    dist.barrier()
    return listener


def look_late(look: Callable[[Any], bytes], store: Any) -> bytes:
    time.sleep(0.5)
    return look(store)


def has_failed(listener: AbortListener) -> bool:
    """Whether a failure of this run is in the store, which this rank may not have heard of."""
    return listener.store.check(["news"]) and f'"run": {listener.run}'.encode() in listener.store.get("news")


@on_ranks(2)
@patch.object(roll_call, "ANSWER_SECONDS", 60)
def test_the_first_failure_is_told_to_the_others() -> None:
    """Four ends that follow each other; in the last two rank 1 fails first."""
    rank, store = dist.get_rank(), group_store()
    for kind in ("none", "same", "different", "consequence"):
        with logged(abort_listener.__name__) as said:
            listener = begin()
            first_failed = kind in ("different", "consequence")
            error: Exception = ValueError(f"seen by {rank}" if first_failed else "no such file")
            if kind == "consequence" and rank == 0:
                error = PeerFailureError("another rank ended")
            if (kind, rank) == ("consequence", 0):
                store.set("consequence", "")
            if (kind, rank) == ("consequence", 1):
                store.wait(["consequence"])
            if (kind, rank) == ("different", 0):  # it hears late
                listener.roll_call.look = partial(look_late, listener.roll_call.look)  # type: ignore[method-assign]
                eventually(partial(has_failed, listener))
            if kind != "none":
                listener.failed(error)
            if first_failed and rank == 1:
                other, _ = listener.roll_call.wait_until(lambda status: True)
                assert other.heard_of == listener.run, "the reason may be gone with this process: it waits"
            assert (listener.failure is not None) == (kind != "none")
            listener.end_fit()
        told = ["rank 0 stops because rank 1 raised ValueError: seen by 1"] if first_failed and rank == 0 else []
        assert [without_where(note) for note in getattr(error, "__notes__", [])] == told, kind
        assert said == [], "the error says it, and is printed"
        dist.barrier()
    listener = begin()
    if rank == 1:
        listener.close()
        assert not listener._thread.is_alive()
    dist.barrier()
    since = time.monotonic()
    if rank == 0:
        listener.failed(OSError("disk full"))
    assert time.monotonic() - since < 30, "a rank that has stopped listening is not told"


@on_ranks(3, fresh=True, may_exit=[2])
@patch.object(roll_call, "ANSWER_SECONDS", 60)
def test_a_rank_whose_process_has_ended_is_named_by_its_launcher() -> None:
    """Rank 0 is the launcher. Nobody waits for the ended rank to hear."""
    rank, listener = dist.get_rank(), begin()
    model = BucketDDP(Mlp())
    backward(model, 0)
    if rank == 2:
        os._exit(3)
    if rank == 0:
        assert tell_end_of_rank(2, 7, "has ended with exit code 3")
    since = time.monotonic()
    with pytest.raises(PeerFailureError, match=f"rank 2{WHERE} has ended with exit code 3") as caught:
        backward(model, 1)
    listener.failed(caught.value)
    assert time.monotonic() - since < 30


@on_ranks(2, fresh=True, may_exit=[1])
def test_a_rank_whose_process_has_ended_is_named_while_ranks_wrap() -> None:
    begin()
    if dist.get_rank() == 1:
        os._exit(3)
    threading.Timer(0.5, tell_end_of_rank, (1, 7, "has ended with exit code 3")).start()
    with raises_soon(PeerFailureError, match=f"rank 1{WHERE} has ended with exit code 3"):
        BucketDDP(Mlp())


def stuck(said: Path) -> float:
    abort_listener.LEAVE_SECONDS, roll_call.ANSWER_SECONDS = 1, 60
    listener = begin()
    since = time.monotonic()
    if dist.get_rank() == 1:
        with said.open("w") as file:
            os.dup2(file.fileno(), 2)
        time.sleep(60)
    listener.failed(OSError("disk full"))
    return time.monotonic() - since


def test_a_rank_that_is_stuck_is_ended(run_ranks: RunRanks, tmp_path: Path) -> None:
    elapsed, nothing = run_ranks(2, stuck, tmp_path / "said", fresh=True, may_exit=[1])
    assert elapsed < 30, "the rank that failed need not wait for it"
    assert nothing is None
    said = without_where((tmp_path / "said").read_text())
    for words in (
        "rank 1 stops because rank 0 raised OSError: disk full",
        "rank 1 has not stopped in 1 s, though rank 0 raised OSError: disk full; its process ends here",
        "in stuck",
    ):
        assert words in said


@on_ranks(2, fresh=True)
def test_a_rank_that_is_stopping_is_left_alone() -> None:
    abort_listener.LEAVE_SECONDS = abort_listener._ABORT_SECONDS = 0.2
    listener = begin(is_stopping=True)
    if dist.get_rank() == 1:
        eventually(lambda: listener.failure)
        time.sleep(1)  # several times as long as others would have
    listener.failed(OSError("disk full"))
    assert listener.failure is not None


@on_ranks(2, fresh=True)
def test_a_rank_blocked_in_a_collective_wakes() -> None:
    """Rank 0 waits for rank 1, which has failed and lives on, its connections open."""
    listener = begin()
    if dist.get_rank() == 1:
        listener.failed(OSError("disk full"))
        listener.store.limited(30).get("woken")
        return
    with raises_soon(RuntimeError):
        dist.broadcast(torch.zeros(1), src=0)
    listener.store.set("woken", "")


@on_ranks(2, fresh=True)
def test_a_fit_may_begin_while_the_thread_is_at_the_last_ones_failure() -> None:
    """All ranks have raised the same. In the next fit rank 0 fails while rank 1 waits for it."""
    listener, end_training = begin(), AbortListener._end_training
    has_begun = threading.Event()

    def late(*given: Any) -> None:
        assert has_begun.wait(60)
        end_training(*given)

    with patch.object(AbortListener, "_end_training", late), patch.object(roll_call, "ANSWER_SECONDS", 0.5):
        listener.failed(ValueError("no such file"))
        listener.end_fit()
        eventually(lambda: listener._run.heard.is_set())
        listener.begin_fit(lambda: False)
        has_begun.set()
    dist.barrier()
    if dist.get_rank() == 1:
        with raises_soon(RuntimeError):
            dist.broadcast(torch.zeros(1), src=0)
        listener.store.set("woken", "")
    else:
        listener.failed(OSError("disk full"))
        listener.store.limited(30).get("woken")


@on_ranks(1)
def test_a_listener_that_was_closed_waits_for_nothing() -> None:
    """What woke it may be gone: two may wake it at once."""
    listener, no_store = listen(Collectives(None)), Any
    listener.close()
    with patch.object(abort_listener, "_serves", lambda store: True):
        assert not listener._wait(no_store, "wake/0")  # type: ignore[arg-type]


@on_ranks(2, fresh=True)
def test_a_group_dropped_in_a_thread_of_ours_does_not_hold_it_up() -> None:
    """Garbage collection runs in any thread. A listener that waits for another one's end would hear of no failure."""
    listener = listen(Collectives(dist.new_group()))
    dist.barrier()
    may_tell, tell_end = threading.Event(), listener._tell_end
    listener._tell_end = lambda: (may_tell.wait(30), tell_end())  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=listener.close, name="bucketddp-abort-listener")
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    may_tell.set()
    assert listener._closed.wait(10)
    listener._thread.join(10)
    assert not listener._thread.is_alive()
