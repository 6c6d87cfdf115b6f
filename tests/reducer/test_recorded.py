"""Recorded gradients are marked as ready, and complete buckets, without a process group."""

import threading
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import nn

from lightning_bucketddp.comm.lane import Streams
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.state import Contribution, Origin, Pass, Role


def open_pass(count: int) -> tuple[Reducer, Pass]:
    """A pass over parameters of 64 bytes, three in each bucket; the first one has no slot."""
    table = SlotTable([(f"p{at}", nn.Parameter(torch.ones(16))) for at in range(count)], ["p0"])
    planner = LayoutPlanner(table, Options(bucket_cap_mb=3 * 64 / 2**20), world_size=3, one_machine=True)
    buckets = Buckets(table, planner)
    storage = Contiguous(table, buckets, planner.plan(), Streams())
    context = MagicMock(lock=threading.RLock(), **{"ranks.peers.failure": None})
    reducer = Reducer(table, planner, buckets, storage, Mock(), Mock(), [], context)
    this_pass = Pass(0, True, table.trainable_now(), Origin.BACKWARD, Role.ACTIVE, Contribution.OWN)
    reducer.open(this_pass)
    return reducer, this_pass


def mark(reducer: Reducer, this_pass: Pass, slots: list[int]) -> list[int]:
    this_pass.recorded += [reducer.table.params[slot] for slot in slots]
    return [progress.bucket.index for progress in reducer._mark_recorded(this_pass)]


@pytest.mark.parametrize(
    ("before", "recorded", "full"),
    [
        ([], [0, 1, 2], [0]),
        ([], [2, 0, 1], [0]),
        ([0], [1, 2], [0]),
        ([2], [1, 2], []),
        ([], [0, 1], []),
        ([0], [1, 2, 3, 4, 5], [0, 1]),
        ([], [4, 5], []),
        ([3], [4, 5], [1]),
    ],
)
def test_recorded_gradients_are_marked_in_any_order(before: list[int], recorded: list[int], full: list[int]) -> None:
    reducer, this_pass = open_pass(7)
    assert [bucket.slots for bucket in reducer.buckets.all] == [(0, 1, 2), (3, 4, 5)]
    for slot in before:
        assert mark(reducer, this_pass, [slot]) == []
    assert mark(reducer, this_pass, recorded) == full
    assert reducer.table.pending == {*before, *recorded}
    missing = {slot for progress in this_pass.buckets for slot in progress.missing}
    assert missing == set(range(6)) - {*before, *recorded}


def test_a_recorded_parameter_that_has_been_frozen_has_no_gradient() -> None:
    reducer, this_pass = open_pass(4)
    reducer.table.params[1].requires_grad_(False)
    assert mark(reducer, this_pass, [0, 1, 2]) == []
    assert reducer.table.pending == {0, 2}


def test_the_reducer_is_notified_when_a_bucket_may_be_full() -> None:
    reducer, this_pass = open_pass(7)
    assert this_pass.notify_after == 3
    mark(reducer, this_pass, [0])
    assert this_pass.notify_after == 2
    mark(reducer, this_pass, [1, 2])
    assert this_pass.notify_after == 3, "those of the next bucket"


def test_a_parameter_without_a_slot_keeps_its_place_when_it_gets_one() -> None:
    table = SlotTable([("a", nn.Parameter(torch.ones(2))), ("b", nn.Parameter(torch.ones(2), requires_grad=False))])
    table.pending |= {table.key(0), table.key(1)}
    assert table.pending == {0, ~1}
    assert table.pending_slots() == {0}
    assert table.pending_indices() == {0, 1}
    table.add((True, True))
    assert table.pending == {0, 1}
