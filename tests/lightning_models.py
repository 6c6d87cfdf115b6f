"""LightningModules that tests train; a Trainer and a Fabric that run in the worker pool's processes."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

from lightning_bucketddp import BucketDDPFabricStrategy, BucketDDPStrategy
from tests.models import ConvBatchNorm, Mlp


class PoolEnvironment(LightningEnvironment):
    creates_processes_externally = True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    local_rank = global_rank

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...

    def teardown(self) -> None: ...


def ours(**options: Any) -> BucketDDPStrategy:
    return BucketDDPStrategy(**{"cluster_environment": PoolEnvironment(), "bucket_cap_mb": 0.0003, **options})


def ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(cluster_environment=PoolEnvironment(), **options)


def scaler(init_scale: float, **options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale, **options))


def close_to(first: pl.LightningModule, second: pl.LightningModule) -> None:
    for (name, value), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, msg=lambda m, n=name: f"{n}: {m}")


QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    defaults = {**QUIET, "accelerator": "cpu", "devices": dist.get_world_size(), "max_epochs": 1}
    defaults["use_distributed_sampler"] = False  # it would shuffle
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def start_fabric(kind: str = "bucketddp", precision: Any = None, plugins: Any = None, **options: Any) -> Fabric:
    make = FabricDDPStrategy if kind == "ddp" else BucketDDPFabricStrategy
    options = options if kind == "ddp" else {"bucket_cap_mb": 0.0003, **options}
    strategy = make(cluster_environment=PoolEnvironment(), **options)
    world = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision, plugins=plugins)
    fabric.launch()
    return fabric


def data(batches: int = 6, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    count = batches * batch_size * dist.get_world_size()
    dataset = TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 4, generator=generator))
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=False))


class Regression(pl.LightningModule):
    """Records the gradients that ``on_after_backward`` and ``on_before_optimizer_step`` see, unless told not to."""

    records = True  # False where they are sharded
    lr = 1e-2  # AdamW's

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
        params = self.named_parameters() if self.records else ()
        return {name: param.grad.detach().clone() for name, param in params if param.grad is not None}

    def on_after_backward(self) -> None:
        self.after_backward.append(self._grads())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.append(self._grads())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.optimizer == "zero":
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=self.lr)
        return torch.optim.AdamW(self.parameters(), self.lr)


def norms(module: pl.LightningModule) -> dict[str, Tensor]:
    """Some gradient norms: that of the first parameter, and of all. To log one takes Lightning long."""
    first, *_, total = grad_norm(module, norm_type=2).items()
    return dict([first, total])


class Citizen(Regression):
    """Logs in every way there is; ``schedule`` names a scheduler."""

    def __init__(self, net: str = "mlp", optimizer: str = "sgd", schedule: str = "") -> None:
        super().__init__(net, optimizer)
        self.schedule, self.mean = schedule, MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):  # of several loaders
            return self.loss(batch["first"]) + self.loss(batch["second"])
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mine", loss, on_step=True, rank_zero_only=True)
        return {"loss": loss, "extra": 1}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log_dict(norms(self))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.mean(loss)
        self.log("valid", loss, sync_dist=True)
        self.log("mean", self.mean)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", self.loss(batch), sync_dist=True, on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.loss(batch) if isinstance(batch, dict) else self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.schedule == "epoch":
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.3)]
        if self.schedule == "step":
            one = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
            return [optimizer], [{"scheduler": one, "interval": "step"}]
        if self.schedule == "plateau":
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "valid"}}
        return optimizer


class Relay(BaseFinetuning):
    """In the second epoch the first layers take over from the head, which is frozen then."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.freeze(pl_module.net.head)
            self.unfreeze_and_add_param_group(pl_module.net.layers, optimizer, lr=0.005)


class Memory(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))


class Gan(pl.LightningModule):
    """Two toggled optimizers with schedulers, clipping and a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator_optimizer, critic_optimizer = self.optimizers()
        real, noise = batch
        with self.toggled_optimizer(critic_optimizer):
            self.fake = self.generator(noise).detach()
            critic_loss = (self.critic(self.fake) - self.critic(real)).mean() + self.penalty(real)
            critic_optimizer.zero_grad()
            self.manual_backward(critic_loss)
            self.clip_gradients(critic_optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            critic_optimizer.step()
        with self.toggled_optimizer(generator_optimizer):
            generator_loss = -self.critic(self.generator(noise)).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(generator_loss)
            generator_optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"critic": critic_loss, "generator": generator_loss}, on_epoch=True)
        return {"loss": critic_loss, "fake": self.fake}

    def penalty(self, real: Tensor) -> Tensor:
        mix = torch.lerp(real, self.fake, 0.3).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mix).sum(), mix, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(norms(self))

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]
        return optimizers, [lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
