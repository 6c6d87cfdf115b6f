"""A module and its wrapped copy, and backwards of both."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.models import Mlp, batch
from tests.reference import assert_grads, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB; makes several buckets of the small test models


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a job a test that runs it on as many ranks, perhaps with a folder; ``options`` are the worker pool's."""

    def decorate(job: Callable[..., None]) -> Callable[..., None]:
        def test(run_ranks: RunRanks, world_size: int, tmp_path: Path) -> None:
            run_ranks(world_size, job, *[str(tmp_path) for _ in signature(job).parameters], **options)

        test.__name__ = job.__name__
        test.job = job  # type: ignore[attr-defined]
        job.__qualname__ = f"{job.__name__}.job"  # where workers find it
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Names the case of a job that fails."""
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"in the case {values}") from error


def pair(build: Callable[[], nn.Module] = Mlp, cap: float = 1, **options: Any) -> tuple[nn.Module, BucketDDP]:
    """A module that stays as it is, and a wrapped copy."""
    torch.manual_seed(3)
    plain = build()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=cap, timeout=timedelta(seconds=20), **options)
    return plain, ours


def inputs_of(step: int) -> Tensor:
    return batch(step, dist.get_rank())[0]


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, BucketDDP) else model


def both(models: Iterable[nn.Module], *args: Any, only: Iterable[str] | None = None, zero: bool = True) -> None:
    """One backward of each; ``only`` names the parameters that get a gradient."""
    for model in models:
        if zero:
            model.zero_grad()
        inputs = None if only is None else [inner(model).get_parameter(name) for name in only]
        model(*args).square().mean().backward(inputs=inputs)


def run_backward(ours: BucketDDP, loss: Tensor, guarded: bool, **options: Any) -> None:
    with ours.backward_pass(loss) if guarded else nullcontext():
        loss.backward(**options)


def warm_up(plain: nn.Module, ours: BucketDDP) -> None:
    """Two passes, after which the order of gradients is known."""
    for step in (100, 101):
        both([plain, ours], inputs_of(step))
        assert_grads(ours.module, mean_over_ranks(plain))
    plain.zero_grad()
    ours.zero_grad()
