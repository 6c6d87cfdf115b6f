"""Groups that are made of a group's ranks."""

import inspect
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.comm import groups
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.gloo import collectives_of
from lightning_bucketddp.comm.groups import Group
from lightning_bucketddp.comm.shard_groups import ShardGroups
from tests.models import Mlp
from tests.pool import RunRanks, on_ranks
from tests.reference import group_store, raises_soon


@on_ranks(2, fresh=True)
def test_what_is_left_behind_in_a_part_is_left_behind_in_the_group() -> None:
    whole = Collectives(None)
    part = whole.split([range(2)])
    other = whole.split(part.made_of)
    whole.require_nothing_left_behind()
    other.leave_behind("rank 1 raised KeyError")
    with pytest.raises(RuntimeError, match=r"without unfinished collectives.*rank 1 raised KeyError"):
        Group(None).require_nothing_left_behind()
    whole.end_subgroups()
    other.all_reduce_sum(torch.ones(1)).wait()  # has not been destroyed
    dist.destroy_process_group(other.group)


@on_ranks(2, fresh=True)
def test_parts_end_with_the_group_that_they_are_made_of() -> None:
    whole = Collectives(None)
    part = whole.split([range(2)])
    part.all_reduce_sum(torch.ones(1)).wait()  # no rank connects any more
    whole.end_subgroups()
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(part.group)


@on_ranks(2)
def test_groups_are_made_of_all_processes_only() -> None:
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=r"of all processes .* found one of 1 of 2 processes"):
        Collectives(own).split([range(1)])
    turned = dist.new_group([1, 0], sort_ranks=False)
    assert Collectives(turned).rank == 1 - dist.get_rank()
    assert not Collectives(turned).has_all_processes(), "parts of it would have other ranks"


@on_ranks(3)
def test_parts_may_end_at_once() -> None:
    """While other ranks are not back from making them, say."""
    whole = collectives_of(None, torch.device("cpu"))
    for _ in range(100):
        whole.split([range(3)])
        whole.end_subgroups()


@on_ranks(3, fresh=True)
def test_an_abort_wakes_a_rank_though_its_neighbour_has_closed_its_connections() -> None:
    """Rank 2 waits for rank 1, which lives; rank 0 aborts first."""
    world, store = dist.group.WORLD, group_store()
    dist.barrier()
    if dist.get_rank() == 0:
        groups.abort(world)  # type: ignore[arg-type]
        store.set("rank 0 has aborted", "")
    elif dist.get_rank() == 2:

        def abort() -> None:
            store.wait(["rank 0 has aborted"])
            groups.abort(world)  # type: ignore[arg-type]

        threading.Thread(target=abort, daemon=True).start()
        with raises_soon(RuntimeError):
            dist.recv(torch.empty(1), 1)
        store.set("rank 2 is awake", "")
    store.wait(["rank 2 is awake"])


class Named(SimpleNamespace):
    __hash__ = object.__hash__


def test_an_abort_that_stands_still_holds_no_other_up() -> None:
    group: Any = Named()
    parts: Any = [Named(), Named()]
    release, aborted = threading.Event(), list[Any]()

    def abort_alone(one: Any) -> None:
        if one is group:
            release.wait(20)
        aborted.append(one)

    with (
        patch.dict(groups._subgroups, {group: WeakSet(parts)}),
        patch.object(groups, "_abort_alone", abort_alone),
        patch.object(groups, "ABORT_SECONDS", 0.2),
    ):
        groups.abort(group)
    assert len(aborted) == 2
    assert all(part in aborted for part in parts)
    release.set()


def calls_for_64_machines(by_split: bool) -> tuple[list[list[list[int]]], int, list[list[int]]]:
    """Parts that were split off, how many groups were made one by one, and the ranks of each part of rank 13."""
    split: list[list[list[int]]] = []
    new_group = dist.new_group

    def split_group(parent: dist.ProcessGroup, ranks: list[list[int]], **options: Any) -> dist.ProcessGroup:
        split.append(ranks)
        return new_group(next(part for part in ranks if 13 in part))

    dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=512)
    with (
        patch.object(groups, "splits", lambda group: by_split),
        patch.object(dist, "split_group", split_group),
        patch.object(distributed_c10d, "new_group", side_effect=new_group) as made,
    ):
        found = ShardGroups(Collectives(None, torch.device("cpu")), 8)
    parts = [found.inside, found.gathering, found.across]
    return split, made.call_count, [dist.get_process_group_ranks(each.group) for each in parts if each is not None]


@pytest.mark.parametrize("by_split", [False, True])
def test_all_parts_are_made_by_one_call_where_the_backend_splits(run_ranks: RunRanks, by_split: bool) -> None:
    ((split, made, ranks),) = run_ranks(1, calls_for_64_machines, by_split, bare=True)
    machine = [*range(8, 16)]
    assert ranks == [machine, machine, [*range(5, 512, 8)]]
    assert made == (0 if by_split else 64 + 64 + 8)
    assert [len(parts) for parts in split] == ([64, 64, 8] if by_split else [])


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("accelerator", "bound", "config", "supported", "expected"),
    [
        (CUDA, 0, "cuda:nccl", True, True),
        (CUDA, None, "cuda:nccl", True, False),
        (CUDA, 0, "cuda:nccl", False, False),
        (CUDA, 0, "cpu:gloo,cuda:nccl", True, False),
        (None, None, "cpu:gloo", True, False),
    ],
)
def test_a_group_is_split_if_it_is_an_accelerators_and_bound(
    accelerator: torch.device | None, bound: int | None, config: str, supported: bool, expected: bool
) -> None:
    group: Any = Named(_get_backend=lambda device: SimpleNamespace(supports_splitting=supported))
    with (
        patch.object(torch.accelerator, "current_accelerator", lambda: accelerator),
        patch.object(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound))),
        patch.object(dist, "get_backend_config", lambda group: config),
        patch.object(dist, "get_backend", lambda group: "nccl"),
    ):
        assert groups.splits(group) is expected


def test_torch_still_tells_what_decides_whether_a_group_is_split() -> None:
    assert isinstance(dist.ProcessGroup.bound_device_id, property)
    assert isinstance(torch._C._distributed_c10d.Backend.supports_splitting, property)
    assert {"parent_pg", "split_ranks", "timeout"} <= {*inspect.signature(dist.split_group).parameters}


@on_ranks(2, fresh=True)
def test_a_rank_that_cannot_take_part_in_a_split_is_named() -> None:
    told = group_store()

    def split_group(parent: dist.ProcessGroup, ranks: list[list[int]], **options: Any) -> dist.ProcessGroup:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory for a communicator")
        told.wait(["rank 1 has raised"])
        raise RuntimeError("NCCL error: remote process exited or there was a network error")

    words = r"the process groups of this wrapper.*no memory for a communicator"
    with (
        patch.object(groups, "splits", lambda group: True),
        patch.object(dist, "split_group", split_group),
        raises_soon(PeerFailureError, match=rf"(?s)rank 0: .*rank 1 .*{words}" if dist.get_rank() == 0 else words),
    ):
        BucketDDP(Mlp(), shard_optimizer=True)
    told.set("rank 1 has raised", "")
