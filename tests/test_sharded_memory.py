"""``shard_optimizer=True``: what a rank keeps and steps on is one part in world size of it, within 2 %."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_bucketddp import BucketDDP, declare_element_wise

RunRanks = Callable[..., list[Any]]
WIDTHS = (257, 191, 313, 127, 211)  # primes: nothing divides


def of_odd_sizes() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(wide, narrow) for wide, narrow in pairwise(WIDTHS)))


class Counting(Optimizer):
    """Plain SGD that counts the elements it steps on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.stepped: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.add_(param.grad, alpha=-1e-3)
        self.stepped.append(sum(param.numel() for param in params))


declare_element_wise(Counting)


def train(model: nn.Module, optimizer: Optimizer, dtype: torch.dtype) -> None:
    for _ in range(3):  # buckets follow the order of gradients from the second step on
        model(torch.ones(2, WIDTHS[0], dtype=dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_bytes(optimizer: Optimizer) -> int:
    packed = optimizer.state_dict()
    tensors = [*packed.get("master_params", {}).values()]
    tensors += [value for state in packed["state"].values() for value in state.values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def kept_and_stepped(dtype: torch.dtype, bucket_cap_mb: float | None) -> tuple[int, int, int]:
    """Bytes of the state of a sharded optimizer, and of one that is not, and how many elements are stepped on."""
    found: list[Any] = []
    options: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb}
    if dtype is torch.bfloat16:
        options["grad_dtype"] = torch.float32
    for shard, make in ((True, AdamW), (False, AdamW), (True, Counting)):
        ours = BucketDDP(of_odd_sizes().to(dtype), shard_optimizer=shard, **options)
        optimizer = make(ours.parameters())
        train(ours, optimizer, dtype)
        found.append(optimizer.stepped[-1] if isinstance(optimizer, Counting) else state_bytes(optimizer))
        ours.close()
    return found[0], found[1], found[2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_state_and_step_are_divided_by_the_number_of_ranks(run_ranks: RunRanks, world_size: int) -> None:
    elements = sum(param.numel() for param in of_odd_sizes().parameters())
    for dtype, cap in ((torch.float32, None), (torch.float32, 0.1), (torch.bfloat16, 0.1)):
        found = run_ranks(world_size, kept_and_stepped, dtype, cap)
        for mine, whole, stepped in found:
            per_element = 12 if dtype is torch.bfloat16 else 8  # two moments, and the masters
            assert whole >= elements * per_element
            assert mine == pytest.approx(whole / world_size, rel=0.02)
            assert stepped == pytest.approx(elements / world_size, rel=0.02)
        assert sum(stepped for _, _, stepped in found) == elements
