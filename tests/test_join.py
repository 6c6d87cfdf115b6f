"""Ranks with different numbers of batches: torch's join protocol."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.inside import passes_of
from tests.models import Branches, ConvBatchNorm, Mlp, batch, loss_of
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003


def batches_of(rank: int) -> int:
    """Rank 1 has the most."""
    return [3, 6, 4][rank]


def train(wrapped: nn.Module, by_initial: bool) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    rank = dist.get_rank()
    with wrapped.join(divide_by_initial_world_size=by_initial):
        for step in range(batches_of(rank)):
            inputs, target = batch(step, rank)
            optimizer.zero_grad()
            loss_of(wrapped(inputs), target).backward()
            optimizer.step()


def as_torch_ddp(by_initial: bool, with_buffers: bool) -> float:
    torch.manual_seed(1)
    module = ConvBatchNorm() if with_buffers else Mlp()
    reference = DistributedDataParallel(copy.deepcopy(module))
    train(reference, by_initial)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    train(ours, by_initial)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, reference.module.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")
    assert ours.passes == max(batches_of(rank) for rank in range(dist.get_world_size()))
    difference = largest_difference_between_ranks(module)
    inputs, target = batch(9, dist.get_rank())
    if dist.get_rank() == 0:  # outside of join a forward is nobody else's business
        with torch.no_grad():
            ours.eval()(inputs)
            ours.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (ours, reference):  # and on as before
            model.zero_grad()
            loss_of(model(inputs), target).backward()
    for param, other in zip(module.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
    ours.close()
    return difference


@pytest.mark.parametrize("with_buffers", [False, True], ids=["plain", "module_buffers"])
@pytest.mark.parametrize("by_initial", [True, False], ids=["initial", "active"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_inputs_end_as_with_torch_ddp(
    run_ranks: RunRanks, world_size: int, by_initial: bool, with_buffers: bool
) -> None:
    assert run_ranks(world_size, as_torch_ddp, by_initial, with_buffers) == [0.0] * world_size


def one_process(by_initial: bool) -> None:
    """Accumulation, a branch that only some ranks take, and unused parameters, against one process."""
    torch.manual_seed(1)
    module = Branches()
    alone = copy.deepcopy(module)
    rank, world = dist.get_rank(), dist.get_world_size()
    takes = ["left", "right", "none"]
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ours.join(divide_by_initial_world_size=by_initial):
        for step in range(batches_of(rank)):
            inputs, _ = batch(step, rank)
            with ours.no_sync() if step % 2 == 0 else nullcontext():
                ours(inputs, take=takes[rank]).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    full = torch.optim.SGD(alone.parameters(), lr=0.1)
    for cycle in range(3):
        active = [r for r in range(world) if batches_of(r) > 2 * cycle + 1]  # in the synchronised pass
        held = [r for r in range(world) if batches_of(r) > 2 * cycle]
        for r in held:
            for step in range(2 * cycle, min(2 * cycle + 2, batches_of(r))):
                if r not in active:
                    continue  # what a rank accumulated before it ran out is of no use to anyone
                inputs, _ = batch(step, r)
                alone(inputs, take=takes[r]).square().mean().div(world if by_initial else len(active)).backward()
        full.step()
        full.zero_grad()
    for (name, param), other in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, other, msg=lambda m, n=name: f"{n}: {m}")
    assert largest_difference_between_ranks(module) == 0
    ours.close()


@pytest.mark.parametrize("by_initial", [True, False], ids=["initial", "active"])
def test_uneven_inputs_with_accumulation_and_branches(run_ranks: RunRanks, by_initial: bool) -> None:
    run_ranks(3, one_process, by_initial)


def gradients_around_two_joins(make: str, cleared: bool) -> list[Any]:
    """``.grad`` behind a join that rank 0 leaves first, and behind the first pass of another one."""
    torch.manual_seed(1)
    module = nn.Linear(1, 1, bias=False)
    wrapped = BucketDDP(module) if make == "ours" else DistributedDataParallel(module)
    rank = dist.get_rank()
    seen: list[Any] = []
    for batches in ([2, 4], [1, 1]):
        with wrapped.join():
            for step in range(batches[rank]):
                wrapped(torch.full((1, 1), 10.0 * (rank + 1) + step)).sum().backward()
                last = module.weight.grad.clone()
                if cleared:
                    wrapped.zero_grad()
        seen += [last.item(), None if module.weight.grad is None else module.weight.grad.item()]
    if make == "ours":
        wrapped.close()
    return seen


@pytest.mark.parametrize("cleared", [True, False])
def test_a_joined_rank_keeps_its_gradients(run_ranks: RunRanks, cleared: bool) -> None:
    ours = run_ranks(2, gradients_around_two_joins, "ours", cleared)
    assert ours[0][1] == (None if cleared else ours[0][0]), "what the first join left in .grad"
    assert ours[0][2] == ours[1][2] or not cleared
    assert ours == run_ranks(2, gradients_around_two_joins, "torch", cleared)


def with_zero_redundancy() -> float:
    """The shard of a rank without data must be stepped with the others' gradients: one process shows the truth."""
    torch.manual_seed(1)
    module = Mlp()
    alone = copy.deepcopy(module)
    rank, world = dist.get_rank(), dist.get_world_size()
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.05)
    with Join([ours, optimizer]):
        for step in range(batches_of(rank)):
            inputs, target = batch(step, rank)
            loss_of(ours(inputs), target).backward()
            optimizer.step()
            ours.zero_grad()
    full = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(max(batches_of(r) for r in range(world))):
        full.zero_grad()
        for r in range(world):
            if step < batches_of(r):
                inputs, target = batch(step, r)
                loss_of(alone(inputs), target).div(world).backward()
        full.step()
    for (name, param), other in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, other, msg=lambda m, n=name: f"{n}: {m}")
    difference = largest_difference_between_ranks(module)
    ours.close()
    return difference


@pytest.mark.parametrize("world_size", [2, 3])
def test_together_with_a_zero_redundancy_optimizer(run_ranks: RunRanks, world_size: int) -> None:
    assert run_ranks(world_size, with_zero_redundancy) == [0.0] * world_size


def early_termination() -> tuple[str, int]:
    ours = BucketDDP(Mlp())
    rank = dist.get_rank()
    done = 0
    try:
        with ours.join(throw_on_early_termination=True):
            for step in range(batches_of(rank)):
                inputs, target = batch(step, rank)
                loss_of(ours(inputs), target).backward()
                done += 1
    except RuntimeError as error:
        inputs, target = batch(9, rank)  # and on, together
        loss_of(ours(inputs), target).backward()
        assert ours.passes == done + 1
        assert not passes_of(ours).peers.failure()
        ours.close()
        return str(error), done
    return "no error", done


def test_early_termination_may_raise_on_all_ranks(run_ranks: RunRanks) -> None:
    for message, done in run_ranks(2, early_termination):
        assert "exhausted all inputs" in message.lower() or "uneven inputs" in message.lower() or "Detected" in message
        assert done == 3


def disabled() -> None:
    ours = BucketDDP(Mlp())
    with ours.join(enable=False):
        for step in range(2):
            inputs, target = batch(step, dist.get_rank())
            loss_of(ours(inputs), target).backward()
    assert ours.passes == 2
    ours.close()


def test_join_can_be_disabled(run_ranks: RunRanks) -> None:
    run_ranks(2, disabled)


def eval_forwards() -> None:
    """Forwards without gradients inside the context ask nothing of the ranks that have joined."""
    module = Mlp()
    ours = BucketDDP(module)
    rank = dist.get_rank()
    seen: list[Tensor] = []
    with ours.join():
        for step in range(batches_of(rank)):
            inputs, target = batch(step, rank)
            with torch.no_grad():
                seen.append(ours(inputs))
            loss_of(ours(inputs), target).backward()
    assert len(seen) == batches_of(rank)
    assert ours.passes == 6
    ours.close()


def test_forwards_without_gradients_inside_join(run_ranks: RunRanks) -> None:
    run_ranks(2, eval_forwards)


def mean_of_module_buffers() -> list[float]:
    """Only ranks with data count in the mean."""
    module = ConvBatchNorm()
    ours = BucketDDP(module, module_buffers="mean")
    module.norm.momentum = 0.0
    rank = dist.get_rank()
    seen = []
    with ours.join():
        for step in range([1, 3, 3][rank]):
            module.norm.running_mean.fill_([100.0, 1.0, 3.0][rank])
            inputs, target = batch(step, rank)
            loss_of(ours(inputs), target).backward()
            seen.append(float(module.norm.running_mean[0]))
    ours.close()
    return seen


def test_the_mean_of_module_buffers_leaves_out_ranks_without_data(run_ranks: RunRanks) -> None:
    first, second, third = run_ranks(3, mean_of_module_buffers)
    everyone = pytest.approx(104 / 3)
    assert first == [everyone]
    assert second == third == [everyone, 2.0, 2.0]


def divisor_that_does_not_fit() -> None:
    ours = BucketDDP(Mlp(), gradient_divide_by=1)
    with pytest.raises(ValueError, match="divide_by_initial_world_size=False, found gradient_divide_by=1"):
        with ours.join(divide_by_initial_world_size=False):
            pass
    ours.close()


def test_dividing_by_the_ranks_with_data_needs_a_mean(run_ranks: RunRanks) -> None:
    run_ranks(2, divisor_that_does_not_fit)


def tokens_without_a_backward() -> float:
    """Rank 0 counts a batch that it does not train on, and leaves its loop."""
    torch.manual_seed(1)
    module = Mlp()
    alone = copy.deepcopy(module)
    ours = BucketDDP(module, gradient_divide_by="tokens")
    rank = dist.get_rank()
    inputs, target = batch(0, 1)
    with ours.join():
        if rank == 0:
            ours.count_tokens(1000)
        else:
            ours.count_tokens(4)
            (ours(inputs) - target).square().sum().backward()
    (alone(inputs) - target).square().sum().div(4).backward()
    for param, other in zip(module.parameters(), alone.parameters(), strict=True):
        if rank == 0:
            assert param.grad is None, "a joined rank keeps its gradients"
        else:
            torch.testing.assert_close(param.grad, other.grad)
    ours.close()
    return 0.0


def test_a_rank_without_data_counts_no_tokens(run_ranks: RunRanks) -> None:
    assert run_ranks(2, tokens_without_a_backward) == [0.0, 0.0]


def reduction_by_hand() -> None:
    """Refused on every rank that has data, before anything is sent that ranks without data would not answer."""
    ours = BucketDDP(Mlp())
    inputs, target = batch(0, dist.get_rank())
    with ours.join():
        with ours.no_sync():
            loss_of(ours(inputs), target).backward()
        with pytest.raises(RuntimeError, match="found a reduction by hand"):
            ours.allreduce_gradients()
    ours.allreduce_gradients()
    assert ours.passes == 1
    ours.close()


def test_a_reduction_by_hand_inside_join_is_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, reduction_by_hand)
