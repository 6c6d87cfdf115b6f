"""Jobs of the ranks as tests, and many cases in one job."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.inside import open_wrappers
from tests.models import batch, loss_of

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB: several buckets in the smallest models


def check_each(cases: Mapping[str, Sequence[Any]], check: Callable[..., None]) -> None:
    """Runs ``check(*case)`` for each case, and closes its wrappers. An error names its case."""
    before = open_wrappers()  # of other tests
    for name, case in cases.items():
        try:
            check(*case)
        except BaseException as error:
            raise AssertionError(f"case {name!r}") from error
        finally:
            for wrapper in set(open_wrappers()) - set(before):
                wrapper.close()


def on_ranks(
    count: int, cases: Mapping[str, Sequence[Any]] | None = None, fresh: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a test that runs on ``count`` ranks, with all cases in one job, or each in a ``fresh`` one."""
    given = {"all": ()} if cases is None else cases
    jobs = {name: [name] for name in given} if fresh else {"all": list(given)}

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def job(names: list[str]) -> None:
            check_each({name: given[name] for name in names}, check)

        def test(run_ranks: RunRanks, names: list[str]) -> None:
            run_ranks(count, job, names, fresh=fresh)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.job = job  # type: ignore[attr-defined]
        job.__module__, job.__qualname__ = check.__module__, f"{check.__name__}.job"  # where workers find it
        return pytest.mark.parametrize("names", jobs.values(), ids=jobs)(test)

    return decorate


def everyones(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def backward(model: nn.Module, step: int = 0, dtype: torch.dtype = torch.float32, rank: int | None = None) -> Tensor:
    """A forward and a backward of this rank's batch, or another rank's; the loss."""
    inputs, target = batch(step, dist.get_rank() if rank is None else rank)
    loss = loss_of(model(inputs.to(dtype)), target.to(dtype))
    loss.backward()
    return loss
