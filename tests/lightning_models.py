"""LightningModules that tests train, and a Trainer that runs in the worker pool's processes."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.models import ConvBatchNorm, Mlp


class PoolEnvironment(LightningEnvironment):
    """The ranks that the pool has started already."""

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


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet Trainer over all ranks of the pool."""
    defaults = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,  # it would shuffle
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def data(batches: int = 6, batch_size: int = 4) -> DataLoader[Any]:
    """``batches`` batches for each rank."""
    generator = torch.Generator().manual_seed(11)
    count = batches * batch_size * dist.get_world_size()
    dataset = TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 4, generator=generator))
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=False))


class Regression(pl.LightningModule):
    """Records the gradients that ``on_after_backward`` and ``on_before_optimizer_step`` see."""

    def __init__(self, net: str = "mlp", optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Mlp() if net == "mlp" else ConvBatchNorm()
        self.optimizer = optimizer
        self.after_backward: list[dict[str, Tensor]] = []
        self.before_step: list[dict[str, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def _grads(self) -> dict[str, Tensor]:
        return {n: p.grad.detach().clone() for n, p in self.named_parameters() if p.grad is not None}

    def on_after_backward(self) -> None:
        self.after_backward.append(self._grads())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.append(self._grads())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
