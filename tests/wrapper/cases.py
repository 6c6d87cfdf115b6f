"""Jobs of the ranks as tests, and many cases in one job."""

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


def on_ranks(
    count: int, cases: Mapping[str, Sequence[Any]] | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a test that runs on ``count`` ranks, with each case; ``options`` are those of the pool."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def job() -> None:
            check_each({"all": []} if cases is None else cases, check)

        def test(run_ranks: RunRanks) -> None:
            run_ranks(count, job, **options)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.job = job  # type: ignore[attr-defined]
        job.__module__, job.__qualname__ = check.__module__, f"{check.__name__}.job"  # where workers find it
        return test

    return decorate


def backward(model: nn.Module, step: int = 0, dtype: torch.dtype = torch.float32, rank: int | None = None) -> Tensor:
    """A forward and a backward of this rank's batch, or another rank's; the loss."""
    inputs, target = batch(step, dist.get_rank() if rank is None else rank)
    loss = loss_of(model(inputs.to(dtype)), target.to(dtype))
    loss.backward()
    return loss
