"""``shard_optimizer=True``: parity with one process, shards of state, what is waited for and what is refused."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.models import MODELS, batch
from tests.reference import largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0005  # MiB: several buckets

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adam_amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005, momentum=0.9, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003, "weight_decay": 0.0}]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs, target = batch(step, rank)
    output = model(inputs)
    output = output if isinstance(output, Tensor) else output.logits
    return nn.functional.mse_loss(output, target)


def whole(plain: nn.Module) -> None:
    """The gradients that one process would have."""
    expected = mean_over_ranks(plain)
    for name, param in plain.named_parameters():
        param.grad = expected[name]


def parity(model: str, optimizer: str, steps: int, options: dict[str, Any], clip: float | None) -> float:
    plain = seeded(MODELS[model])
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, **options)
    reference = OPTIMIZERS[optimizer](two_groups(plain))
    sharded = OPTIMIZERS[optimizer](two_groups(ours.module))
    rank = dist.get_rank()
    for step in range(steps):
        for at in range(2 if step % 3 == 2 else 1):  # accumulation now and then
            with ours.no_sync() if step % 3 == 2 and at == 0 else nullcontext():
                loss_of(ours, 2 * step + at, rank).backward()
            loss_of(plain, 2 * step + at, rank).backward()
        whole(plain)
        if clip is not None:
            mine = ours.clip_grad_norm_(clip)
            theirs = nn.utils.clip_grad_norm_(plain.parameters(), clip)
            torch.testing.assert_close(mine, theirs.float(), rtol=5e-3 if model == "mixed_dtypes" else 1e-4, atol=1e-6)
        for it in (reference, sharded):
            it.step()
            it.zero_grad()
    worst = 0.0
    for (name, mine), theirs in zip(ours.module.named_parameters(), plain.parameters(), strict=True):
        tolerance = 2e-2 if mine.dtype is torch.bfloat16 else 2e-4
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        worst = max(worst, float((mine - theirs).detach().abs().max()))
    ours.synchronise_module_buffers(always=True)
    assert largest_difference_between_ranks(ours.module) == 0
    ours.close()
    return worst


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_parity_with_one_process(run_ranks: RunRanks, world_size: int, optimizer: str) -> None:
    run_ranks(world_size, parity, "mlp", optimizer, 40, {"bucket_cap_mb": TINY}, None)


@pytest.mark.parametrize("model", list(MODELS))
def test_parity_for_all_kinds_of_modules(run_ranks: RunRanks, model: str) -> None:
    run_ranks(3, parity, model, "adamw", 8, {"bucket_cap_mb": TINY}, 0.1)
