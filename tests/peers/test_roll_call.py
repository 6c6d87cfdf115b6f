"""What a rank says of itself."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from lightning_bucketddp.peers.roll_call import RollCall
from lightning_bucketddp.peers.status import Status
from tests.pool import on_ranks


def test_records_show_the_thread_that_trains() -> None:
    """In Ray that is not the main thread."""
    waits = threading.Event()

    def trains() -> None:
        waits.wait(20)

    with ThreadPoolExecutor(1) as pool:
        roll_call = pool.submit(RollCall, HashStore(), 0, 1, 60).result()
        pool.submit(trains)
        deadline = time.monotonic() + 20
        while "trains" not in (functions := [function for _, _, function in roll_call.records()[0].stack]):
            assert time.monotonic() < deadline, functions
        waits.set()


def test_a_rank_needs_no_answer_from_its_own_listener() -> None:
    assert [status.heard for status in RollCall(HashStore(), 0, 2, 60).ask(0)] == [True, False]


def test_ranks_that_call_at_once_make_one_call() -> None:
    store = HashStore()
    ranks = [RollCall(store, rank, 3, 60) for rank in range(3)]
    with patch("lightning_bucketddp.peers.roll_call.ANSWER_SECONDS", 0.1):
        for rank in ranks:  # they have heard of no call
            assert [status.rank for status in rank.ask(0) if status.heard] == [rank.rank]
        assert [rank.news.number for rank in ranks] == [1, 1, 1]
    for rank in ranks:
        rank.write(store)
    assert all(status.heard for status in ranks[0].wait_until(lambda status: False, call=1))


def test_a_rank_that_has_ended_in_one_wrapper_is_waited_for() -> None:
    """It may wait in the next one. A rank that has ended in all of them answers no more."""
    store = HashStore()
    asking, other = (RollCall(store, rank, 2, 60) for rank in range(2))
    for rank in (asking, other):
        rank.enter(Status(rank.rank))
    other.statuses[1].end_training()
    other.write(store)
    with ThreadPoolExecutor(1) as pool, patch("lightning_bucketddp.peers.roll_call.ANSWER_SECONDS", 20):
        asked = pool.submit(asking.ask, 1)
        while not other.news.number:
            other.look(store)
        other.write(store)
        assert [status.heard for status in asked.result(timeout=20)] == [True, True]
        other.end(store)
        since = time.monotonic()
        assert [status.heard for status in asking.ask(1)] == [True, False]
    assert time.monotonic() - since < 10


class Garbage:
    """Starts a thread when it is collected, as a group's end does."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        threading.Thread(target=int).start()


@on_ranks(1)
def test_garbage_may_be_collected_while_a_rank_looks_where_it_is() -> None:
    roll_call, before = RollCall(HashStore(), 0, 1, 60), gc.get_threshold()
    for number in range(400):
        gc.disable()
        Garbage()
        gc.set_threshold(number % 40 + 1)
        gc.enable()
        roll_call.stack()
    gc.set_threshold(*before)


@on_ranks(2)
def test_ranks_look_where_they_are_while_gloos_threads_call_python() -> None:
    """Those threads have a Python state for a moment, through which a dump by faulthandler crashed."""
    roll_call, ended = RollCall(HashStore(), 0, 1, 60), threading.Event()
    stacks = []

    def look() -> None:
        while not ended.is_set():
            stacks.append(roll_call.stack())

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(150):
        dist.all_reduce(torch.ones(3))
    ended.set()
    thread.join()
    assert all(stack[-1][0] == "<frozen runpy>" for stack in stacks), stacks[-1][-1]
    assert any(stack[0][0].endswith("distributed_c10d.py") for stack in stacks)


def test_a_thread_that_has_ended_is_nowhere() -> None:
    made: list[RollCall] = []
    thread = threading.Thread(target=lambda: made.append(RollCall(HashStore(), 0, 1, 60)))
    thread.start()
    thread.join()
    assert made[0].stack() == []


def test_a_rank_that_has_not_made_the_wrapper_yet_has_not_ended() -> None:
    store = HashStore()
    first, second = (RollCall(store, rank, 2, 60) for rank in range(2))
    for roll_call in (first, second):
        roll_call.enter(status := Status(roll_call.rank))
        status.end_training()
        roll_call.write(store)
    found = first.wait_until(lambda status: True, wrapper=first.enter(Status(0)))
    assert not any(status.ended for status in found)
