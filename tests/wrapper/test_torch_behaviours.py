"""Things that training code does around a data-parallel module, as with torch DDP or as in one process."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.models import ConvBatchNorm, Mlp, batch, loss_of
from tests.reference import TINY, assert_grads, grads, largest_difference_between_ranks, mean_over_ranks
from tests.wrapper.cases import RunRanks, backward, on_ranks

KINDS = ["no_grad in train mode", "no_grad in eval mode", "between forward and backward", "dropped"]


@on_ranks(2, {kind: [kind] for kind in KINDS})
def test_forwards_that_are_not_trained_on(kind: str) -> None:
    module, rank = ConvBatchNorm(), dist.get_rank()
    ddp = DistributedDataParallel(copy.deepcopy(module))
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    for step in range(3):
        more, _ = batch(2 * step + 1, rank)
        outputs = []

        def evaluate(wrapper: nn.Module, inputs: Tensor = more, found: list[Tensor] = outputs) -> None:
            wrapper.train(kind == "no_grad in train mode")
            with torch.no_grad():
                found.append(wrapper(inputs))
            wrapper.train()

        for wrapper in (ours, ddp):
            wrapper.zero_grad()
            if kind == "dropped":
                wrapper(more)
            elif kind != "between forward and backward":
                evaluate(wrapper)
            inputs, target = batch(2 * step, rank)
            loss = loss_of(wrapper(inputs), target)
            if kind == "between forward and backward":
                evaluate(wrapper)  # train mode would move statistics that backward needs
            loss.backward()
        if outputs and (rank == 0 or "train" in kind):  # in eval mode only rank 0 has the statistics of DDP's rank 0
            torch.testing.assert_close(*outputs)
        assert_grads(ours.module, grads(ddp.module))
    if rank == 0:
        torch.testing.assert_close(dict(ours.module.named_buffers()), dict(ddp.module.named_buffers()))
    ours.synchronise_module_buffers()
    assert largest_difference_between_ranks(ours) == 0
    assert ours.passes == 3
    ours.close()


@on_ranks(4)
def test_wrappers_over_different_groups_in_one_graph() -> None:
    """A trunk that all ranks share and a head per pair of ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    with pytest.raises(ValueError, match=f"process {rank} is not a member"):
        BucketDDP(Mlp(), process_group=groups[1 - rank // 2])
    trunk, head = Mlp(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    ours = BucketDDP(trunk, bucket_cap_mb=TINY), BucketDDP(head, process_group=group, bucket_cap_mb=TINY)
    for step in range(3):
        plain = copy.deepcopy(trunk), copy.deepcopy(head)
        for module in ours:
            module.zero_grad()
        for first, second in (plain, ours):
            inputs, target = batch(step, rank)
            loss_of(second(first(inputs)), target).backward()
        assert_grads(trunk, mean_over_ranks(plain[0]))
        for param in plain[1].parameters():
            dist.all_reduce(param.grad, group=group)
        assert_grads(head, {name: param.grad / 2 for name, param in plain[1].named_parameters()})
    for wrapper in ours:
        assert wrapper.passes == 3
        wrapper.close()


def groups_of(members: list[list[int]]) -> list[str]:
    names = []
    for ranks in members:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            names.append(group.group_name)
            ours = BucketDDP(Mlp(), process_group=group, timeout=timedelta(seconds=10))
            backward(ours, rank=0)
            assert ours.passes == 1
            ours.close()
    return names


def test_groups_may_be_made_anew_with_other_members(run_ranks: RunRanks) -> None:
    first = run_ranks(3, groups_of, [[0, 2]])
    second = run_ranks(3, groups_of, [[0, 1]])  # in the same processes, after destroy_process_group()
    assert first[0] == second[0] == second[1], "torch gives the groups other names now: nothing is tested here"
