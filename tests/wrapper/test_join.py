"""Ranks with different numbers of batches: torch's join protocol."""

from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from tests.models import Branches, ConvBatchNorm, Mlp, batch
from tests.pool import on_ranks
from tests.reference import TINY, assert_grads, backward, both, drift, everyones, grads, local_if, pair, taking, train

BATCHES = [3, 6, 4]  # by rank


@on_ranks(3)
def test_uneven_inputs_end_as_with_torch_ddp() -> None:
    plain, ours = pair(ConvBatchNorm, TINY)
    reference, rank = DistributedDataParallel(plain), dist.get_rank()
    for wrapped in (reference, ours):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        with wrapped.join():
            train(wrapped, optimizer, range(BATCHES[rank]))
    torch.testing.assert_close(ours.module.state_dict(), plain.state_dict())
    assert ours.passes == max(BATCHES)
    assert drift(ours.module) == 0
    if rank == 0:  # which may evaluate alone
        with torch.no_grad():
            ours.eval()(batch(9, 0)[0])
        ours.train()
    both((ours, reference), batch(9, rank)[0])  # and on as before
    assert_grads(ours.module, grads(plain))


@on_ranks(3, cases=(True, False))
def test_uneven_inputs_accumulate_as_in_one_process(by_initial: bool) -> None:
    alone, ours = pair(Branches, TINY)
    rank, takes = dist.get_rank(), ["left", "right", "none"]
    optimizer, full = (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, alone))
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
    torch.testing.assert_close(ours.module.state_dict(), alone.state_dict())


@on_ranks(3)
def test_a_zero_redundancy_optimizer_steps_for_joined_ranks() -> None:
    """The shard of a rank without data is stepped with the others' gradients: one process shows the truth."""
    alone, ours = pair(cap=TINY)
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.05)
    with Join([ours, optimizer]):
        train(ours, optimizer, range(BATCHES[dist.get_rank()]))
    full = torch.optim.SGD(alone.parameters(), lr=0.05 / 3)
    for step in range(max(BATCHES)):
        for r in range(3):
            if step < BATCHES[r]:
                backward(alone, step, rank=r)
        full.step()
        full.zero_grad()
    torch.testing.assert_close(ours.module.state_dict(), alone.state_dict())


@on_ranks(2)
def test_masters_go_on_from_the_same_bits_on_all_ranks() -> None:
    ours = BucketDDP(Mlp().bfloat16(), grad_dtype=torch.float32)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    for steps, context in ((range(1 + 4 * dist.get_rank()), ours.join()), (range(10, 20), nullcontext())):
        with context:
            train(ours, optimizer, steps)
    assert drift(ours) == 0


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


@on_ranks(2, cases=[2, 3])
def test_after_join_ranks_go_on_together_wherever_they_have_ended(batches: int) -> None:
    """Rank 1 has ended after a local pass, rank 0 after a reduced one or a local one. Then all freeze a layer."""
    ours = BucketDDP(ConvBatchNorm())
    with ours.join():
        for step in range(1 if dist.get_rank() else batches):
            with nullcontext() if step % 2 else ours.no_sync():
                backward(ours, step)
    ours.zero_grad()
    ours.module.conv2.requires_grad_(False)
    backward(ours, 5)
    reduced = [param.grad for param in ours.parameters() if param.grad is not None]
    assert len(reduced) == 3
    assert all(map(torch.equal, reduced, everyones(reduced)[0]))


STORED = [{}, {"use_contiguous_buffers": False}, {"sparse_parameters": ["weight"]}]


@on_ranks(2, cases=[*product(STORED, [True]), ({}, False)])
def test_means_of_earlier_passes_stay_where_a_rank_has_run_out(options: dict[str, Any], by_active: bool) -> None:
    """Divided by all ranks, it sends what earlier passes have left, which the other has too; else nothing."""
    table, rank = nn.Embedding(2, 1, sparse="sparse_parameters" in options), dist.get_rank()
    ours = BucketDDP(table, **options)
    if by_active:
        ours._uneven.divide_by_active()
    for values, active in (((2.0, 6.0), [0, 1]), ((2.0, 8.0), [1])):
        ours._uneven.set_active(active)
        loss = (ours(torch.tensor([1])) * values[rank]).sum()
        loss = loss if ours._passes.joining.counts() else loss.detach()
        with ours.backward_pass(loss):
            if loss.requires_grad:
                loss.backward()
    assert table.weight.grad.to_dense()[1].item() == (2.0 + 6.0) / 2 + 8.0 / (1 if by_active else 2)


@on_ranks(2)
def test_module_buffers_of_a_repeated_batch_do_not_stay() -> None:
    ours, rank = BucketDDP(ConvBatchNorm()), dist.get_rank()
    mean = ours.module.norm.running_mean
    ours._uneven.set_active([1])
    with ours.no_sync():
        ours(batch(0, rank)[0])
    mean.fill_(5.0 - 4.0 * rank)
    ours._uneven.set_active([0, 1])
    assert mean.eq(1.0).all()


@on_ranks(2, fresh=True)
def test_a_rank_raises_its_own_error_inside_join() -> None:
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=6))  # for how long the other rank waits inside torch's Join
    ours = BucketDDP(Mlp(), process_group=group, timeout=timedelta(seconds=20))
    with pytest.raises(ValueError, match="no more of this") if rank == 1 else suppress(Exception), ours.join():
        for step in range(2 + 3 * rank):
            if step == 3:
                raise ValueError("no more of this")
            backward(ours, step)


def skip_a_backward(ours: BucketDDP) -> None:
    with ours.join():
        for step in range(3):
            output = ours(batch(step, 0)[0])
            if dist.get_rank() == 0 or step != 1:
                output.sum().backward()


@on_ranks(2, fresh=True)
def test_a_skipped_backward_is_an_error_inside_join() -> None:
    with pytest.raises((RankMismatchError, PeerFailureError), match="a forward without its backward"):
        skip_a_backward(BucketDDP(Mlp()))


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
