"""Groups that are made of a group's ranks."""

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm import groups
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.gloo import collectives_of
from lightning_bucketddp.comm.groups import Group
from tests.pool import on_ranks


@on_ranks(2, fresh=True)
def test_what_is_left_behind_in_a_part_is_left_behind_in_the_group() -> None:
    whole = Collectives(None)
    part = whole.split([range(2)])
    other = whole.split(part.made_of)
    whole.require_nothing_left_behind()
    other.leave_behind("rank 1 raised KeyError")
    with pytest.raises(RuntimeError, match=r"without unfinished collectives.*rank 1 raised KeyError"):
        Group(None).require_nothing_left_behind()
    whole.end_parts()
    other.all_reduce_sum(torch.ones(1)).wait()  # has not been destroyed
    dist.destroy_process_group(other.group)


@on_ranks(2, fresh=True)
def test_parts_end_with_the_group_that_they_are_made_of() -> None:
    whole = Collectives(None)
    part = whole.split([range(2)])
    part.all_reduce_sum(torch.ones(1)).wait()  # no rank connects any more
    whole.end_parts()
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
        whole.end_parts()


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
        patch.dict(groups._parts, {group: WeakSet(parts)}),
        patch.object(groups, "_abort_alone", abort_alone),
        patch.object(groups, "ABORT_SECONDS", 0.2),
    ):
        groups.abort(group)
    assert len(aborted) == 2
    assert all(part in aborted for part in parts)
    release.set()
