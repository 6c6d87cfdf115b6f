"""``shard_group_size``: shards inside groups of ranks, and copies of them across."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP, RankMismatchError
from tests.models import Mlp, batch, loss_of
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0005  # MiB: several buckets


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    params = list(module.parameters())
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}], lr=0.01)


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
        (ValueError, {"shard_group_size": 3}, "cannot be had with shard_optimizer=False"),
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
    for options in ({}, {"shard_group_size": 2}, {"scatter_every_pass": True}):
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
