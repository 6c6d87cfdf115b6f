"""Ranks of a node share memory: what they get is right, whatever is late, and where there is none they use sockets."""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm import gloo, shared_memory, wire
from lightning_bucketddp.comm.gloo import GlooCollectives, collectives_of
from lightning_bucketddp.comm.lane import ThreadLane
from tests.models import Mlp
from tests.pool import case, on_ranks
from tests.reference import TINY, everyones, loss_at, nodes_of_size, raises_soon, seeded

CPU = torch.device("cpu")
NODES = [range(2), range(2, 4)]
SHARED = "_NodeCollectives"


def values(rank: int, message: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(numel).to(dtype) + 100 * rank + 7 * message


@on_ranks(4)
def test_messages_of_any_length_and_dtype_arrive_and_many_may_be_under_way() -> None:
    near, rank = collectives_of(None, CPU).split_by_node(NODES), dist.get_rank()
    assert type(near).__name__ == SHARED
    ranks = NODES[rank // 2]
    lane = ThreadLane(lambda error: None, starts_here=False)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        sizes = [32 * (1 + 5 * message % 7) for message in range(9)]  # larger ones, and smaller ones again
        flats = [values(rank, message, size, dtype) for message, size in enumerate(sizes)]
        for work in [lane.run(near.reduce_scatter(flat, wire.packed(flat))) for flat in flats]:
            work.wait()
        sums = [sum(values(each, message, size, dtype) for each in ranks) for message, size in enumerate(sizes)]
        for flat, total in zip(flats, sums, strict=True):
            with case(dtype, len(flat)):
                torch.testing.assert_close(near.shard(flat), near.shard(total / 2))
        for work in [lane.run(near.gather(flat.view(torch.uint8))) for flat in flats]:
            work.wait()
        for flat, total in zip(flats, sums, strict=True):
            with case(dtype, len(flat)):
                torch.testing.assert_close(flat, total / 2)


class Waits(Exception):
    """A wait for something that is not there yet."""


def messages(log: list[str]) -> tuple[Any, Any]:
    """The collectives of one rank of two, whose meetings never complete by themselves, and what starts a message."""
    group = Mock()
    group.allreduce.side_effect = lambda *_: log.append("meets") or Mock(is_completed=lambda: "all met" in log)
    near: Any = object.__new__(gloo._NodeCollectives)
    near.group, near.world_size, near.rank = group, 2, 0
    near._slots, near._turn, near._met = torch.zeros(2, 2, 16, dtype=torch.uint8), 0, Mock(is_completed=lambda: True)
    near._read = torch.futures.Future()
    near._read.set_result(None)
    return near, lambda: near._message(16, lambda slot: log.append("writes"), lambda slots: log.append("reads"))


def waits_here(handle: Any) -> None:
    if not handle.is_completed():
        raise Waits


def test_a_slot_is_written_again_only_when_all_have_read_it() -> None:
    log: list[str] = []
    _, start = messages(log)
    with patch.object(gloo, "wait_for", waits_here):
        next(start())
        assert log == ["writes", "meets"]
        with pytest.raises(Waits):  # the others may still read the message before this one
            next(start())
        assert log == ["writes", "meets"]


def test_a_rank_meets_the_others_only_when_it_has_read_the_message_before() -> None:
    log: list[str] = []
    _, start = messages(log)
    with patch.object(gloo, "wait_for", waits_here):
        first = start()
        next(first)
        log.append("all met")
        with pytest.raises(Waits):
            next(start())
        assert log == ["writes", "meets", "all met", "writes"]
    log.clear()
    _, start = messages(log)
    log.append("all met")
    with patch.object(gloo, "wait_for", waits_here):
        for _ in range(2):
            assert [len(stage.memory) for stage in start()] == [1]
    assert log == ["all met", *["writes", "meets", "reads"] * 2]


@on_ranks(4)
def test_where_a_rank_cannot_open_the_memory_its_node_uses_sockets() -> None:
    rank = dist.get_rank()
    expected = seeded(Mlp)
    for each in range(4):
        (loss_at(expected, rank=each) / 4).backward()
    cannot = patch.object(shared_memory, "_opened", return_value=None) if rank == 1 else nullcontext()
    with nodes_of_size(2), cannot:
        ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY)
    near = ours._passes.wrapped.context.levels.near  # type: ignore[union-attr]
    assert isinstance(near, GlooCollectives)
    assert everyones(type(near).__name__) == ["GlooCollectives", "GlooCollectives", SHARED, SHARED]
    loss_at(ours).backward()
    for param, other in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)


def test_memory_is_not_taken_from_another_process_that_has_the_number() -> None:
    def exchange(found: list[Any], mine: Any) -> list[Any]:
        found.append(mine)
        return [mine._replace(token=bytes(16)) if isinstance(mine, tuple) else mine]

    found: list[Any] = []
    before = set(os.listdir("/proc/self/fd"))
    assert shared_memory.shared_memory(64, partial(exchange, found), is_maker=True) is None
    assert found[1] is False
    assert set(os.listdir("/proc/self/fd")) <= before, "its handle is closed"
    assert shared_memory.shared_memory(64, lambda mine: [mine], is_maker=True).shape == (64,)  # type: ignore[union-attr]


@on_ranks(4, fresh=True, may_exit=[3])
def test_a_rank_that_is_killed_ends_the_others_with_its_name() -> None:
    with nodes_of_size(2):
        ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY)
    loss_at(ours).backward()
    if dist.get_rank() == 3:
        ours.module.head.weight.register_hook(lambda grad: os._exit(1))
    with raises_soon(RuntimeError, match="rank 3"):
        loss_at(ours).backward()
