"""Ways to train data-parallel in a plain PyTorch loop, each by wrapping a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP

LEARNING_RATE = 1e-3


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, fused: it needs no memory besides its state."""
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


def _zero(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)


def _clip(model: nn.Module, max_norm: float) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)


def _clip_sharded(model: nn.Module, max_norm: float) -> object:
    assert isinstance(model, BucketDDP)
    return model.clip_grad_norm_(max_norm)


@dataclass(frozen=True)
class Wrapping:
    """One way of training.

    Attributes:
        name: What tables call it.
        wrap: Prepares a module that is on its device.
        optimizer: Makes the optimizer for the parameters of the wrapped module.
        synchronises: Whether the ranks' gradients are averaged.
        clip: Clips the gradients of the wrapped module to a norm.
    """

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    synchronises: bool = True
    clip: Callable[[nn.Module, float], object] = _clip


def unwrapped() -> Wrapping:
    return Wrapping("unwrapped", lambda module: module, synchronises=False)


def ddp(name: str, **options: Any) -> Wrapping:
    return Wrapping(name, lambda module: DistributedDataParallel(module, **options))


def zero(name: str, **options: Any) -> Wrapping:
    return Wrapping(name, lambda module: DistributedDataParallel(module, **options), _zero)


def bucketddp(name: str, **options: Any) -> Wrapping:
    clip = _clip_sharded if options.get("shard_optimizer") else _clip
    return Wrapping(name, lambda module: BucketDDP(module, **options), clip=clip)


def fairscale(name: str) -> Wrapping:
    """FairScale's ShardedDDP, and the optimizer that it is made with."""
    made: list[torch.optim.Optimizer] = []

    def wrap(module: nn.Module) -> nn.Module:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        made.append(OSS(module.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True))
        return ShardedDataParallel(module, made[-1])

    return Wrapping(name, wrap, lambda _: made.pop())


def fsdp2() -> Wrapping:
    """FSDP2, with a group per block and one for the rest."""

    def wrap(module: nn.Module) -> nn.Module:
        device = next(module.parameters()).device
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for block in _blocks(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module

    return Wrapping("FSDP2", wrap)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif isinstance(module, nn.Sequential) and any(True for _ in child.parameters()):
            yield child


def try_wrap(wrapping: Wrapping, module: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the wrapped module; or None, and why: a package is missing, or refuses the options."""
    try:
        return wrapping.wrap(module), ""
    except (ImportError, TypeError, ValueError) as error:
        return None, f"{wrapping.name}: left out, {type(error).__name__}: {str(error).splitlines()[0]}"


def local_pass(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which passes are local: gradients stay on the rank that computed them."""
    if isinstance(model, FSDPModule):
        return _fsdp2_local(model)
    return model.no_sync() if isinstance(model, BucketDDP | DistributedDataParallel) else nullcontext()


@contextmanager
def _fsdp2_local(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
