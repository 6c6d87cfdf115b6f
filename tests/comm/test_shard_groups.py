"""``shard_group_size``: shards inside groups of ranks, and copies of them across."""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP, RankMismatchError
from tests.inside import upkeep_of
from tests.models import Mlp, batch, loss_of
from tests.reference import largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0005  # MiB: several buckets


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    params = list(module.parameters())
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}], lr=0.01)


def as_one_process(size: int, options: dict[str, Any], tolerance: float) -> list[int]:
    """Compares everything with one process; gives the numbers of elements with state on this rank."""
    groups_before = len(dist.distributed_c10d._world.pg_map)
    torch.manual_seed(0)
    plain = Mlp()
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, shard_group_size=size, bucket_cap_mb=TINY, **options)
    reference, sharded = adamw(plain), adamw(ours.module)
    close = {"rtol": tolerance, "atol": tolerance}
    for step in range(7):
        for module in (plain, ours.module):
            module.layers[1].weight.requires_grad_(step not in (4, 5))
        for at in range(2):  # two passes, the results of which add up
            inputs, target = batch(2 * step + at, dist.get_rank())
            loss_of(ours(inputs), target).backward()
            loss_of(plain(inputs), target).backward()
        for param, grad in zip(plain.parameters(), mean_over_ranks(plain).values(), strict=True):
            param.grad = grad
        if step == 3:
            planner = upkeep_of(ours)._parts.planner  # laid out anew: optimizer state moves
            planner._options = replace(planner._options, bucket_cap_mb=1)
            planner.due = True
        for mine, theirs in zip(ours.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_grad(mine), theirs.grad, **close)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(ours.clip_grad_norm_(0.1), norm, **close)
        for optimizer in (reference, sharded):
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(ours.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    assert largest_difference_between_ranks(ours.module) == 0
    saved = ours.optimizer_state_dict(sharded, every_rank=True)
    assert saved is not None
    torch.testing.assert_close(saved["state"], reference.state_dict()["state"], **close)
    held = sum(state["exp_avg"].numel() for state in sharded.state.values())
    ours.load_optimizer_state_dict(sharded, saved)
    assert sum(state["exp_avg"].numel() for state in sharded.state.values()) == held
    ours.close()
    after = ours.optimizer_state_dict(sharded, every_rank=True)  # for a checkpoint afterwards
    torch.testing.assert_close(after, saved)
    del ours
    gc.collect()
    assert len(dist.distributed_c10d._world.pg_map) == groups_before
    return [held, sum(param.numel() for param in plain.parameters())]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_of_ranks_train_as_one_process(run_ranks: RunRanks, size: int) -> None:
    held = run_ranks(4, as_one_process, size, {}, 1e-5)
    for first in range(0, 4, size):  # each group has all of the state
        assert sum(mine for mine, _ in held[first : first + size]) == held[0][1]


def test_groups_of_ranks_with_a_low_precision_wire(run_ranks: RunRanks) -> None:
    run_ranks(4, as_one_process, 2, {"wire_dtype": "bfloat16"}, 3e-2)


def a_group_of_some() -> None:
    group = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
    ours = BucketDDP(Mlp(), shard_optimizer=True, shard_group_size=2, process_group=group)
    optimizer = adamw(ours.module)
    for step in range(3):
        inputs, target = batch(step, dist.get_rank())
        loss_of(ours(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference_between_ranks(ours.module) == 0
    ours.close()


def test_groups_of_a_group_that_is_not_the_default_one(run_ranks: RunRanks) -> None:
    run_ranks(4, a_group_of_some)


def refusals() -> None:
    for error, options, words in [
        (ValueError, {"shard_optimizer": True, "shard_group_size": 2}, "shard_group_size=2 and 3 ranks"),
        (ValueError, {"shard_group_size": 3}, "cannot be combined with shard_optimizer=False"),
        (
            RankMismatchError,
            {"shard_optimizer": True, "shard_group_size": (1, 3, 3)[dist.get_rank()]},
            "shard_group_size",
        ),
    ]:
        with pytest.raises(error, match=words):
            BucketDDP(Mlp(), **options)


def test_a_size_that_does_not_divide_the_ranks_is_refused(run_ranks: RunRanks) -> None:
    run_ranks(3, refusals)


def overflow_in_one_part() -> None:
    """One element is infinite, which the ranks with its part see: none steps, and every scale shrinks."""
    for options in ({"shard_group_size": 2}, {"scatter_every_pass": True}):
        torch.manual_seed(0)
        ours = BucketDDP(Mlp(), shard_optimizer=True, bucket_cap_mb=TINY, **options)
        optimizer = adamw(ours.module)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        scales = []
        for step in range(6):
            before = [param.detach().clone() for param in ours.parameters()]
            inputs, target = batch(step, dist.get_rank())
            scaler.scale(loss_of(ours(inputs), target)).backward()
            whole = ours.module.head.weight.grad
            if step == 2 and whole.own_part.numel():
                whole.own_part[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = [torch.equal(param, value) for param, value in zip(ours.parameters(), before, strict=True)]
            assert all(same) if step == 2 else not any(same)
            scales.append(scaler.get_scale())
        assert scales == [64, 64, 32, 32, 32, 64]
        assert largest_difference_between_ranks(ours.module) == 0
        ours.close()


def test_an_overflow_in_one_part_concerns_all(run_ranks: RunRanks) -> None:
    run_ranks(4, overflow_in_one_part)
