"""Ranks with different numbers of batches: torch's join protocol."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.models import Branches, ConvBatchNorm, Mlp, batch
from tests.pool import on_ranks
from tests.reference import TINY, assert_grads, backward, grads, largest_difference_between_ranks, local_if, taking

BATCHES = [3, 6, 4]  # by rank


def same_values(module: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(module.state_dict(), other.state_dict())


def evaluate(ours: BucketDDP) -> None:
    with torch.no_grad():
        ours.eval()(batch(9, 0)[0])
    ours.train()


@on_ranks(3)
def test_uneven_inputs_end_as_with_torch_ddp() -> None:
    module, rank = ConvBatchNorm(), dist.get_rank()
    reference = DistributedDataParallel(copy.deepcopy(module))
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    for wrapped in (reference, ours):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        with wrapped.join():
            for step in range(BATCHES[rank]):
                if wrapped is ours:
                    evaluate(ours)
                optimizer.zero_grad()
                backward(wrapped, step)
                optimizer.step()
    same_values(module, reference.module)
    assert ours.passes == max(BATCHES)
    assert largest_difference_between_ranks(module) == 0
    if rank == 0:
        evaluate(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrapped in (ours, reference):  # and on as before
            wrapped.zero_grad()
            backward(wrapped, 9)
    assert_grads(module, grads(reference.module))


@on_ranks(3, cases=(True, False))
def test_uneven_inputs_accumulate_as_in_one_process(by_initial: bool) -> None:
    module = Branches()
    alone = copy.deepcopy(module)
    rank, takes = dist.get_rank(), ["left", "right", "none"]
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    optimizer, full = (torch.optim.SGD(it.parameters(), lr=0.05, momentum=0.9) for it in (module, alone))
    with ours.join(divide_by_initial_world_size=by_initial):
        for step in range(BATCHES[rank]):
            with local_if(ours, step % 2 == 0):
                taking(step, takes[rank])(ours).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    for cycle in range(3):  # a rank that runs out before the synchronised pass has accumulated in vain
        active = [r for r in range(3) if BATCHES[r] > 2 * cycle + 1]
        for r in active:
            for step in (2 * cycle, 2 * cycle + 1):
                loss = alone(batch(step, r)[0], take=takes[r]).square().mean()
                (loss / (3 if by_initial else len(active))).backward()
        full.step()
        full.zero_grad()
    same_values(module, alone)


@on_ranks(3)
def test_a_zero_redundancy_optimizer_steps_for_joined_ranks() -> None:
    """The shard of a rank without data is stepped with the others' gradients: one process shows the truth."""
    module = Mlp()
    alone = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.05)
    with Join([ours, optimizer]):
        for step in range(BATCHES[dist.get_rank()]):
            backward(ours, step)
            optimizer.step()
            ours.zero_grad()
    full = torch.optim.SGD(alone.parameters(), lr=0.05 / 3)
    for step in range(max(BATCHES)):
        for r in range(3):
            if step < BATCHES[r]:
                backward(alone, step, rank=r)
        full.step()
        full.zero_grad()
    same_values(module, alone)


@on_ranks(2)
def test_masters_go_on_from_the_same_bits_on_all_ranks() -> None:
    bf16 = torch.bfloat16
    ours = BucketDDP(Mlp().to(bf16), grad_dtype=torch.float32)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)

    def train(steps: range) -> None:
        for step in steps:
            ours.zero_grad()
            backward(ours, step, bf16)
            optimizer.step()

    with ours.join():
        train(range(1 + 4 * dist.get_rank()))
    train(range(10, 20))
    assert largest_difference_between_ranks(ours) == 0


@on_ranks(3)
def test_module_buffers_are_the_mean_of_ranks_with_data() -> None:
    module = ConvBatchNorm()
    ours = BucketDDP(module, module_buffers="mean")
    module.norm.momentum = 0.0
    rank, seen = dist.get_rank(), []
    with ours.join():
        for step in range([1, 3, 3][rank]):
            module.norm.running_mean.fill_([100.0, 1.0, 3.0][rank])
            backward(ours, step)
            seen.append(float(module.norm.running_mean[0]))
    assert seen == [pytest.approx(104 / 3), 2.0, 2.0][: len(seen)], "only ranks with data count"


@on_ranks(2, cases=(True, False))
def test_a_joined_rank_keeps_its_gradients(cleared: bool) -> None:
    rank, seen = dist.get_rank(), []
    for make in (BucketDDP, DistributedDataParallel):
        wrapped = make(nn.Linear(1, 1, bias=False))
        weight = wrapped.module.weight
        for batches in ([2, 4], [1, 1]):
            with wrapped.join():
                for step in range(batches[rank]):
                    wrapped(torch.full((1, 1), 10.0 * (rank + 1) + step)).sum().backward()
                    seen.append(weight.grad.item())
                    if cleared:
                        wrapped.zero_grad()
            seen.append(None if weight.grad is None else weight.grad.item())
    assert rank == 1 or seen[2] == (None if cleared else seen[1])
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@on_ranks(2)
def test_tokens_of_a_joined_rank_do_not_count() -> None:
    """Rank 0 counts a batch that it does not train on, and leaves its loop."""
    module = Mlp()
    alone = copy.deepcopy(module)
    ours = BucketDDP(module, gradient_divide_by="tokens")
    inputs, target = batch(0, 1)
    with ours.join():
        ours.count_tokens(4 if dist.get_rank() else 1000)
        if dist.get_rank() == 1:
            (ours(inputs) - target).square().sum().backward()
    (alone(inputs) - target).square().sum().div(4).backward()
    assert_grads(module, grads(alone) if dist.get_rank() else dict.fromkeys(grads(alone)))


@on_ranks(2)
def test_what_cannot_be_joined_is_refused() -> None:
    """On every rank that has data, before anything is sent that ranks without data would not answer."""
    ours = BucketDDP(Mlp())
    with ours.join():
        with ours.no_sync():
            backward(ours)
        with pytest.raises(RuntimeError, match="found start_grad_sync"):
            ours.allreduce_gradients()
    ours.allreduce_gradients()
    assert ours.passes == 1
    ours = BucketDDP(Mlp(), gradient_divide_by=1)
    with pytest.raises(ValueError, match="divide_by_initial_world_size=False, found gradient_divide_by=1"):
        with ours.join(divide_by_initial_world_size=False):
            pass
