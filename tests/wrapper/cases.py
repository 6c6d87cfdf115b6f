"""Many cases in one job of the ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import batch, loss_of

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB: several buckets in the smallest models


def check_each(cases: Mapping[str, Sequence[Any]], check: Callable[..., None]) -> None:
    """Runs ``check(*case)`` for each case. An error names its case."""
    for name, case in cases.items():
        try:
            check(*case)
        except BaseException as error:
            raise AssertionError(f"case {name!r}") from error


def backward(model: nn.Module, step: int = 0, dtype: torch.dtype = torch.float32, rank: int | None = None) -> Tensor:
    """A forward and a backward of this rank's batch, or another rank's; the loss."""
    inputs, target = batch(step, dist.get_rank() if rank is None else rank)
    loss = loss_of(model(inputs.to(dtype)), target.to(dtype))
    loss.backward()
    return loss
