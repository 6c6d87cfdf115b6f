"""The ways of training data-parallel that are compared, each through a Trainer where it has a strategy for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy


class StartedRanks(LightningEnvironment):
    """Ranks that have been started, and have a process group, already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...

    def teardown(self) -> None: ...


@dataclass(frozen=True)
class Peer:
    """One way of training.

    Attributes:
        name: What tables call it.
        strategy: Makes the Trainer's strategy; None for a loop in plain PyTorch, as there is no strategy.
        optimizer: Makes the optimizer.
        wrap: In plain PyTorch, prepares the module.
    """

    name: str
    strategy: Callable[[], Any] | None
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-4)
    wrap: Callable[[nn.Sequential], nn.Module] | None = None


def _ddp(**options: Any) -> Callable[[], DDPStrategy]:
    return lambda: DDPStrategy(cluster_environment=StartedRanks(), **options)


def _ours(**options: Any) -> Callable[[], BucketDDPStrategy]:
    return lambda: BucketDDPStrategy(cluster_environment=StartedRanks(), **options)


def _zero(params: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-4)


def _fsdp2(module: nn.Sequential) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def peers() -> list[Peer]:
    """All of them."""
    return [
        Peer("unsynchronised", lambda: SingleDeviceStrategy("cpu")),
        Peer("ddp as shipped", _ddp()),
        *(
            Peer(
                f"ddp, best flags, {cap} MiB", _ddp(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=cap)
            )
            for cap in (1, 2, 4, 8)
        ),
        Peer("ddp + ZeroRedundancyOptimizer", _ddp(gradient_as_bucket_view=True, bucket_cap_mb=2), _zero),
        Peer("FSDP2 (plain loop)", None, wrap=_fsdp2),
        Peer("bucketddp", _ours()),
    ]


class _Trained(pl.LightningModule):
    def __init__(self, net: nn.Module, peer: Peer) -> None:
        super().__init__()
        self.net, self.peer = net, peer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.peer.optimizer(self.parameters())


class _Clock(pl.Callback):
    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.at.append(time.perf_counter())


def step_times(peer: Peer, net: nn.Sequential, steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps, the first ones included."""
    if peer.strategy is None:
        return _plain_steps(peer, net, steps)
    clock = _Clock()
    data = DataLoader(TensorDataset(torch.zeros(steps + 1, 1)))
    trainer = pl.Trainer(
        strategy=peer.strategy(),
        accelerator="cpu",
        devices=1 if peer.name == "unsynchronised" else dist.get_world_size(),
        max_steps=steps + 1,
        max_epochs=1,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(_Trained(net, peer), data)
    return [end - begin for begin, end in pairwise(clock.at)]


def _plain_steps(peer: Peer, net: nn.Sequential, steps: int) -> list[float]:
    assert peer.wrap is not None
    module = peer.wrap(net)
    optimizer = peer.optimizer(module.parameters())
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        module(torch.zeros(1, 1)).mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times
