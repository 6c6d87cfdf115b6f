"""``gradient_divide_by="samples"``: ranks with batches of different sizes, and one process on all samples."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.models import Mlp, batch
from tests.pool import on_ranks
from tests.reference import TINY, Twins, assert_grads, everyones, grads, loss_at, run_backward

WINDOWS = ((1,), (2, 2), (3, 1, 2))
"""Micro-batches between two steps. Rank r has r + 2 times as many samples in each."""


def micro_batch(micro: int, size: int, rank: int) -> tuple[Tensor, Tensor]:
    return batch(micro, rank, size=size * (rank + 2))


def loss_of(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(inputs.to(dtype)).float(), target)


OPTIONS: dict[str, list[Any]] = {  # and whether backward is inside backward_pass()
    "dense": [{}, False],
    "coalesced": [{"use_contiguous_buffers": False}, True],
    "sharded": [{"shard_optimizer": True}, False],
    "sharded, bf16 wire": [{"shard_optimizer": True, "wire_dtype": "bfloat16"}, True],
    "bf16 wire": [{"wire_dtype": "bfloat16"}, False],
}


@on_ranks(2, 3, cases=OPTIONS)
def test_gradients_are_those_of_one_process_on_all_samples(options: dict[str, Any], guarded: bool) -> None:
    alone, rank, world = Mlp(), dist.get_rank(), dist.get_world_size()
    ours = BucketDDP(copy.deepcopy(alone), bucket_cap_mb=TINY, gradient_divide_by="samples", **options)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if "wire_dtype" in options else {"rtol": 1e-5, "atol": 1e-6}
    for window in WINDOWS:
        ours.zero_grad()
        alone.zero_grad()
        for micro, size in enumerate(window):
            inputs, target = micro_batch(micro, size, rank)
            ours.count_samples(len(inputs))
            with ours.no_sync() if micro < len(window) - 1 else nullcontext():
                run_backward(ours, loss_of(ours, inputs, target), guarded)
            everything = zip(*(micro_batch(micro, size, r) for r in range(world)), strict=True)
            loss_of(alone, *map(torch.cat, everything)).backward()
        for (name, param), expected in zip(ours.module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                ours.full_grad(param), expected.grad, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@on_ranks(2)
def test_the_mean_over_ranks_is_not_that_over_samples() -> None:
    alone, rank = Mlp(), dist.get_rank()
    twins = Twins(alone)
    twins.step(lambda model: loss_of(model, *micro_batch(0, 1, rank)))
    alone.zero_grad()
    loss_of(alone, *map(torch.cat, zip(*(micro_batch(0, 1, r) for r in range(2)), strict=True))).backward()
    with pytest.raises(AssertionError, match="not close"):
        assert_grads(twins.ours.module, grads(alone))


@on_ranks(2)
def test_bf16_parameters_with_fp32_gradients_are_weighted_in_fp32() -> None:
    rank, plain = dist.get_rank(), Mlp().bfloat16()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY, gradient_divide_by="samples", grad_dtype="float32")
    expected = [torch.zeros(param.shape) for param in plain.parameters()]
    sizes = [sum(WINDOWS[2]) * (r + 2) for r in range(2)]
    for micro, size in enumerate(WINDOWS[2]):
        for r in range(2):
            found = torch.autograd.grad(loss_of(plain, *micro_batch(micro, size, r)), list(plain.parameters()))
            for total, grad in zip(expected, found, strict=True):
                total += grad.float() * sizes[r] / sum(sizes)
        inputs, target = micro_batch(micro, size, rank)
        ours.count_samples(len(inputs))
        with ours.no_sync() if micro < 2 else nullcontext():
            loss_of(ours, inputs, target).backward()
    for param, total in zip(ours.module.parameters(), expected, strict=True):
        torch.testing.assert_close(param.main_grad, total)


@on_ranks(2)
def test_a_rank_without_samples_does_not_count() -> None:
    alone, rank = Mlp(), dist.get_rank()
    ours = BucketDDP(copy.deepcopy(alone), bucket_cap_mb=TINY, gradient_divide_by="samples")
    for counts in ((0, 4), (0, 0)):
        ours.zero_grad()
        ours.count_samples(counts[rank])
        loss = loss_of(ours, *batch(0, rank, size=4))
        (loss if counts[rank] else loss * torch.nan).backward()  # as of a mean over no element
        alone.zero_grad()
        loss_of(alone, *batch(0, 1, size=4)).backward()
        expected = {name: grad if any(counts) else torch.zeros_like(grad) for name, grad in grads(alone).items()}
        assert_grads(ours.module, expected)


@on_ranks(2)
def test_the_loss_is_averaged_as_its_gradients_are() -> None:
    ours, rank = BucketDDP(Mlp(), gradient_divide_by="samples"), dist.get_rank()
    ours.count_samples(1 + 2 * rank)
    loss = loss_at(ours, 0)
    loss.backward()
    first, second = everyones(loss.item())
    torch.testing.assert_close(ours.average_loss(loss).item(), (first + 3 * second) / 4)


@on_ranks(2)
def test_what_is_not_known_is_an_error() -> None:
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by="samples")
    with pytest.raises(RuntimeError, match=r"rank \d: expected count_samples\(\) before each synchronised backward"):
        loss_at(ours, 0).backward()
    with pytest.raises(ValueError, match=r"expected a whole number of samples from 0, found 1\.5"):
        ours.count_samples(1.5)
    with pytest.raises(RuntimeError, match='expected gradient_divide_by="tokens" where count_tokens'):
        ours.count_tokens(3)
    with pytest.raises(RuntimeError, match='expected gradient_divide_by="samples" where count_samples'):
        BucketDDP(Mlp(depth=1)).count_samples(3)
    with pytest.raises(ValueError, match="samples of all passes since the last step"):
        BucketDDP(Mlp(), gradient_divide_by="samples", shard_optimizer=True, scatter_every_pass=True)
