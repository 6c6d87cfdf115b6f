"""The compared ways to train data-parallel, through a Trainer if there is a strategy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDP, BucketDDPStrategy
from lightning_bucketddp.reducer.record import PassRecord


class StartedRanks(LightningEnvironment):
    """The environment of ranks that are running already and have a process group.

    Attributes:
        num_nodes: How many nodes there are, each with equally many ranks.
    """

    num_nodes = 1

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank() % (dist.get_world_size() // self.num_nodes)

    def node_rank(self) -> int:
        return dist.get_rank() // (dist.get_world_size() // self.num_nodes)

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...

    def teardown(self) -> None: ...


LEARNING_RATE = 1e-4
WARM_UP = 3
"""First steps, which do not count: peers learn orders and make state."""


def adamw(params: Any) -> torch.optim.Optimizer:
    """The optimizer of every peer. Peers with a sharded optimizer divide its work.

    It is fused. Each layer is a timed sleep, which imitates a GPU. The optimizer runs on the processor, so it should
    be short. The default implementation takes three to six times as long, as it allocates intermediate results.
    """
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


Wrap = Callable[[nn.Sequential, Callable[[Any], torch.optim.Optimizer]], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True)
class Peer:
    """One way of training.

    Attributes:
        name: What tables call it.
        strategy: Makes the Trainer's strategy; None for a loop in plain PyTorch.
        optimizer: Makes the optimizer.
        wrap: In plain PyTorch, prepares the module, then makes the optimizer with the second argument, or the other way
            round.
        synchronised: Whether gradients are averaged.
        needs: A package that may be missing.
    """

    name: str
    strategy: Callable[[], Any] | None
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    wrap: Wrap | None = None
    synchronised: bool = True
    needs: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a loop in plain PyTorch, without a Trainer."""
        return self.strategy is None

    def why_not(self) -> str | None:
        """Why this peer cannot run here, or with this version of the package; None if it can."""
        if self.needs is not None and find_spec(self.needs) is None:
            return f"needs {self.needs}, which is not installed"
        try:
            if self.strategy is not None:
                self.strategy()
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def _ddp(**options: Any) -> Callable[[], DDPStrategy]:
    return lambda: DDPStrategy(cluster_environment=StartedRanks(), **options)


def _ours(**options: Any) -> Callable[[], BucketDDPStrategy]:
    return lambda: BucketDDPStrategy(cluster_environment=StartedRanks(), **options)


def _zero(params: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)


def _wrapped(wrapper: Callable[[nn.Sequential], nn.Module]) -> Wrap:
    """Wrap first, and give the optimizer the wrapper's parameters."""

    def wrap(net: nn.Sequential, optimizer: Callable[[Any], Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = wrapper(net)
        return module, optimizer(module.parameters())

    return wrap


def _fsdp2(reshard: bool) -> Wrap:
    def shard(net: nn.Sequential) -> nn.Module:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in net:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        return fully_shard(net, mesh=mesh, reshard_after_forward=reshard)

    return _wrapped(shard)


def _fairscale(**options: Any) -> Wrap:
    """FairScale's ShardedDDP, which reduces each gradient to the rank whose part of the optimizer owns it.

    Works with torch 2.13 as it is, on gloo too. Lightning's strategy for it was removed in Lightning 2.0.
    """

    def wrap(net: nn.Sequential, _: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        optimizer = OSS(net.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
        return ShardedDataParallel(net, optimizer, **options), optimizer

    return wrap


ONE_LEVEL = "one level"
"""In the names of peers that need hosts of several ranks."""

_BEST_FLAGS = {"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True}


def peers() -> list[Peer]:
    """All peers."""
    return [
        Peer("unsynchronised", lambda: SingleDeviceStrategy("cpu"), synchronised=False),
        Peer("ddp as shipped", _ddp()),
        *(Peer(f"ddp, best flags, {cap} MiB", _ddp(**_BEST_FLAGS, bucket_cap_mb=cap)) for cap in (1, 2, 4, 8)),
        Peer("ddp + ZeroRedundancyOptimizer", _ddp(gradient_as_bucket_view=True, bucket_cap_mb=2), _zero),
        Peer("bucketddp", _ours()),
        Peer("bucketddp_sharded", _ours(shard_optimizer=True)),
        Peer(f"bucketddp, {ONE_LEVEL}", _ours(hierarchical=False)),
        Peer(f"bucketddp_sharded, {ONE_LEVEL}", _ours(shard_optimizer=True, hierarchical=False)),
        *_low_precision_peers(),
        *_plain_peers(),
    ]


def _low_precision_peers() -> list[Peer]:
    """Peers that send 16 bits per element. Lightning's ``ddp`` ignores communication hooks on the CPU."""
    return [
        *(Peer(f"bucketddp, {hook} hook", _ours(comm_hook=hook)) for hook in ("fp16", "bf16")),
        Peer("bucketddp, bf16 wire", _ours(wire_dtype="bfloat16")),
        Peer("bucketddp, int8 wire", _ours(wire_dtype="int8")),
        Peer("bucketddp_sharded, bf16 wire", _ours(shard_optimizer=True, wire_dtype="bfloat16")),
    ]


def _plain_peers() -> list[Peer]:
    """Loops in plain PyTorch: peers without a Lightning strategy, and the peers to compare them with."""

    def torch_ddp(**options: Any) -> Wrap:
        return _wrapped(lambda net: DistributedDataParallel(net, **options))

    def torch_ddp_with(hook: Callable[..., Any], **options: Any) -> Wrap:
        def wrapper(net: nn.Sequential) -> nn.Module:
            module = DistributedDataParallel(net, **options)
            module.register_comm_hook(None, hook)
            return module

        return _wrapped(wrapper)

    def bucketddp(**options: Any) -> Wrap:
        return _wrapped(lambda net: BucketDDP(net, **options))

    found = [
        Peer("unsynchronised", None, wrap=_wrapped(lambda net: net), synchronised=False),
        Peer("torch DDP as shipped", None, wrap=torch_ddp()),
        *(
            Peer(f"torch DDP, best flags, {cap} MiB", None, wrap=torch_ddp(**_BEST_FLAGS, bucket_cap_mb=cap))
            for cap in (1, 2, 4)
        ),
        *(
            Peer(
                f"torch DDP, fp16 hook, {cap} MiB",
                None,
                wrap=torch_ddp_with(fp16_compress_hook, gradient_as_bucket_view=True, bucket_cap_mb=cap),
            )
            for cap in (1, 2, 4, 8)
        ),
        Peer("FSDP2", None, wrap=_fsdp2(reshard=True)),
        Peer("FSDP2, reshard_after_forward=False", None, wrap=_fsdp2(reshard=False)),
        Peer("FairScale ShardedDDP + OSS", None, wrap=_fairscale(), needs="fairscale"),
        Peer("FairScale, reduce_buffer_size=0", None, wrap=_fairscale(reduce_buffer_size=0), needs="fairscale"),
        Peer("BucketDDP", None, wrap=bucketddp()),
        Peer("BucketDDP, sharded", None, wrap=bucketddp(shard_optimizer=True)),
        *(Peer(f"BucketDDP, {hook} hook", None, wrap=bucketddp(comm_hook=hook)) for hook in ("fp16", "bf16")),
        Peer("BucketDDP, bf16 wire", None, wrap=bucketddp(wire_dtype="bfloat16")),
    ]
    return [replace(peer, name=f"{peer.name} (plain loop)") for peer in found]


class _Trained(pl.LightningModule):
    def __init__(self, net: nn.Module, peer: Peer) -> None:
        super().__init__()
        self.net, self.peer = net, peer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.peer.optimizer(self.parameters())


class _Clock(pl.Callback):
    """Notes when batches begin, without the time for reading the passes' records."""

    def __init__(self, passes: list[PassRecord], busy: list[float]) -> None:
        self.at: list[float] = []
        self.passes, self.busy = passes, busy
        self._reading = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.at.append(time.perf_counter() - self._reading)
        self.busy.append(time.process_time())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        begin = time.perf_counter()
        _read_pass(getattr(trainer.strategy, "bucket_ddp", None), self.passes)
        self._reading += time.perf_counter() - begin


def _read_pass(module: nn.Module | None, passes: list[PassRecord]) -> None:
    if isinstance(module, BucketDDP) and (record := module.last_pass()) is not None:
        passes.append(record)


def step_times(
    peer: Peer,
    net: nn.Sequential,
    steps: int,
    passes: list[PassRecord] | None = None,
    num_nodes: int = 1,
    busy: list[float] | None = None,
) -> list[float]:
    """Train, and return the seconds of each of ``steps`` steps, the first ones included.

    Args:
        peer: How to train.
        net: What to train; its layers take a tensor of (1, 1).
        steps: How many.
        passes: Gets the record of each pass, for peers of this package.
        num_nodes: How many nodes a Trainer is told of.
        busy: Gets the processor time of this process, in seconds, as each step begins, and at the end.
    """
    passes, busy = [] if passes is None else passes, [] if busy is None else busy
    if peer.strategy is None:
        return _plain_steps(peer, net, steps, passes, busy)
    clock = _Clock(passes, busy)
    data = DataLoader(TensorDataset(torch.zeros(steps + 1, 1)))
    strategy = peer.strategy()
    if peer.synchronised:
        strategy.cluster_environment.num_nodes = num_nodes
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size() // num_nodes if peer.synchronised else 1,
        num_nodes=num_nodes if peer.synchronised else 1,
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


def _plain_steps(
    peer: Peer, net: nn.Sequential, steps: int, passes: list[PassRecord], busy: list[float]
) -> list[float]:
    assert peer.wrap is not None
    module, optimizer = peer.wrap(net, peer.optimizer)
    times = []
    for _ in range(steps):
        busy.append(time.process_time())
        begin = time.perf_counter()
        # Not the optimizer's zero_grad(): FairScale's buckets would keep the gradients of the last step.
        module.zero_grad()
        module(torch.zeros(1, 1)).mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        _read_pass(module, passes)
    busy.append(time.process_time())
    if isinstance(module, BucketDDP):
        module.close()
    return times
