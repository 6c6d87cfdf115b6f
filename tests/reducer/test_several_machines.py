"""Ranks on several machines, as ``LOCAL_WORLD_SIZE`` says: a thread launches buckets, in a group of their own."""

import threading
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.comm.groups import timeout_of
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reference import TINY, backward, local_if, loss_at, noted, raises_soon, seeded, several_machines

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 wire": {"wire_dtype": torch.bfloat16},
    "8 bits": {"wire_dtype": torch.int8},
    "fp16 hook": {"comm_hook": "fp16"},
    "PowerSGD": {"comm_hook": "powersgd"},
    "sharded": {"shard_optimizer": True},
    "sharded, bf16 wire": {"shard_optimizer": True, "wire_dtype": torch.bfloat16},
    "groups of shards": {"shard_optimizer": True, "shard_group_size": 1},
    "coalesced": {"use_contiguous_buffers": False},
}


def starter(_: str, group: dist.ProcessGroup) -> tuple[str, bool]:
    """Which thread starts a collective, and whether it does so in the default group."""
    return threading.current_thread().name, group is dist.group.WORLD


def trained(several: bool, options: dict[str, Any]) -> tuple[list[Tensor], list[tuple[str, bool]]]:
    """The weights after some steps, accumulated ones among them; and who has started the collectives of backward."""
    made: list[tuple[str, bool]] = []
    with several_machines() if several else nullcontext():
        ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY, **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(6):
        loss = loss_at(ours, step)
        with local_if(ours, step % 4 == 2), noted("allreduce", "all_to_all_single", look=starter) as calls:
            loss.backward()
        made += calls
        if step % 4 != 2:
            optimizer.step()
            optimizer.zero_grad()
    weights = [param.detach().clone() for param in ours.parameters()]
    ours.close()
    return weights, made


QUICK = ["8 bits", "fp16 hook", "PowerSGD", "groups of shards", "coalesced", "sharded, bf16 wire"]
"""Each option occurs."""


@on_ranks(2, 3, cases={name: name for name in OPTIONS}, quick=QUICK)
def test_a_thread_launches_buckets_and_weights_stay_the_same(name: str) -> None:
    weights, before = trained(False, OPTIONS[name])
    same, made = trained(True, OPTIONS[name])
    torch.testing.assert_close(same, weights, rtol=0, atol=0)
    assert {thread for thread, in_world in before if in_world} == {"MainThread"}
    if "hook" not in name and name != "PowerSGD":  # hooks are called as ever
        assert {thread for thread, in_world in made if in_world} <= {"MainThread"}
        apart = [thread for thread, in_world in made if not in_world]
        assert "bucketddp-lane" in apart
        assert "MainThread" not in apart or name == "groups of shards"


AMONG_OTHERS = {name: name for name in ("bf16 wire", "sharded", "sharded, bf16 wire")}


@on_ranks(3, cases=AMONG_OTHERS, quick=["sharded, bf16 wire"])
def test_ranks_among_others_train_in_their_one_group(name: str) -> None:
    """torch makes further groups of them only together with all processes."""
    group = [dist.new_group([0, 1]), dist.new_group([2])][dist.get_rank() // 2]
    exact, _ = trained(True, {"process_group": group})
    weights, made = trained(True, {**OPTIONS[name], "process_group": group})
    torch.testing.assert_close(weights, exact, rtol=0, atol=2e-3 if "wire" in name else 1e-6)
    assert {thread for thread, _ in made} <= {"MainThread"}
    everyones = [weights] * dist.get_world_size(group)
    dist.all_gather_object(everyones, weights, group)
    assert all(torch.equal(*pair) for pair in zip(everyones[0], everyones[-1], strict=True))
    if dist.get_world_size(group) > 1:
        with pytest.raises(ValueError, match="shard_group_size with a process group of all processes, found shard_gr"):
            BucketDDP(Mlp(), process_group=group, shard_optimizer=True, shard_group_size=1)


@on_ranks(2)
def test_collectives_of_others_may_come_between() -> None:
    with several_machines():
        first, second = (BucketDDP(seeded(Mlp), bucket_cap_mb=TINY) for _ in range(2))
    sums: list[float] = []

    def exchange(_: Tensor) -> None:
        mine = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(mine)
        sums.append(mine.mean().item())

    for param in [*first.parameters(), *second.parameters()]:
        param.register_hook(exchange)
    for step in range(3):
        (loss_at(first, step) + loss_at(second, step)).backward()
    alone = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY)
    for step in range(3):
        backward(alone, step)
    for ours in (first, second):
        grads = [param.grad for param in ours.parameters()]
        torch.testing.assert_close(grads, [param.grad for param in alone.parameters()], rtol=0, atol=0)
    assert set(sums) == {3.0}
    assert len(sums) == 3 * 2 * len(list(alone.parameters()))


@on_ranks(2, fresh=True)
def test_an_error_in_the_thread_ends_all_ranks() -> None:
    with several_machines():
        ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY)
    for step in range(2):
        backward(ours, step)
        ours.zero_grad()
    loss, copies, copy = loss_at(ours, 2), [], torch._foreach_copy_

    def fail(targets: list[Tensor], sources: list[Tensor]) -> None:
        if threading.current_thread() is threading.main_thread():  # packs the bucket with the control vector
            copy(targets, sources)
            return
        copies.append(len(targets))
        raise RuntimeError("no memory for this")

    rank = dist.get_rank()
    fails = patch.object(torch, "_foreach_copy_", fail) if rank else nullcontext()
    with fails, raises_soon(PeerFailureError, match="no memory for this"):
        loss.backward()
    assert len(copies) == rank, "nothing is launched after it"


@on_ranks(2)
def test_groups_wait_as_long_as_the_one_that_they_are_made_for() -> None:
    group = dist.new_group(timeout=timedelta(seconds=77))
    with several_machines():
        ours = BucketDDP(nn.Linear(8, 4), process_group=group, wire_dtype="bfloat16")
    collectives = ours._runtime.collectives
    for other in (collectives.stage(0), collectives.split([range(2)])):
        assert other.group is not group
        assert timeout_of(other.group) == timedelta(seconds=77)
