"""The scenarios with a Trainer or Fabric, whose own collectives are recorded too."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPFabricStrategy
from tests.lightning_models import Gan, PoolEnvironment, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, Mlp
from tests.traces.recorder import mark
from tests.traces.scenarios import TINY, adamw, add, loss_in, scenario, sgd


class Marks(pl.Callback):
    """Names the parts of a fit."""

    def on_train_epoch_start(self, runs: pl.Trainer, module: pl.LightningModule) -> None:
        mark(f"epoch {runs.current_epoch}")

    def on_train_batch_start(self, runs: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        mark(f"epoch {runs.current_epoch}, batch {index}")

    def on_validation_start(self, runs: pl.Trainer, module: pl.LightningModule) -> None:
        mark("validation")

    def on_train_end(self, runs: pl.Trainer, module: pl.LightningModule) -> None:
        mark("end of fit")


class Model(pl.LightningModule):
    """Two parts, so that one may be frozen, and a loss that is logged for all ranks in validation."""

    def __init__(self, net: nn.Module | None = None, optimizer: str = "sgd") -> None:
        super().__init__()
        self.backbone = Mlp() if net is None else net
        self.head = nn.Linear(4, 4)
        self.optimizer = optimizer

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)
        if self.optimizer == "adamw":
            return adamw(self)
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], lr=0.05)


def fit(
    model: pl.LightningModule, train_data: Any = None, options: dict[str, Any] | None = None, **settings: Any
) -> None:
    """Two steps and no validation, unless the settings of the Trainer say so; ``options`` are the strategy's."""
    mark("start of fit")
    callbacks = [Marks(), *settings.pop("callbacks", [])]
    runs = trainer(ours(**(options or {})), callbacks=callbacks, **settings)
    train_data = data(batches=2) if train_data is None else train_data
    runs.fit(model, train_data, data(batches=1) if settings.get("limit_val_batches") else None)


def uneven() -> DataLoader[Any]:
    """Batches of which rank 1 has one more."""
    inputs = torch.ones(4 * (1 + dist.get_rank()), 8)
    return DataLoader(TensorDataset(inputs, inputs[:, :4]), batch_size=4)


@scenario()
def trainer_nothing_on_one_rank() -> None:
    class Skips(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx == dist.get_rank() else self.loss(batch)

    fit(Skips())


@scenario()
def trainer_branch_by_rank() -> None:
    class ByRank(Model):
        def loss(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.backbone(batch[0], ["left", "right"][dist.get_rank()]), batch[1])

    fit(ByRank(Branches()))


def fabric(accumulate: int, clip: bool, **options: Any) -> None:
    mark("launch")
    strategy = BucketDDPFabricStrategy(cluster_environment=PoolEnvironment(), bucket_cap_mb=TINY, **options)
    runs = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    runs.launch()
    mark("setup")
    module = ConvBatchNorm()
    model, optimizer = runs.setup(module, adamw(module) if "shard_optimizer" in options else sgd(module))
    for step in range(4):
        mark(f"backward {step}")
        last = step % accumulate == accumulate - 1
        with runs.no_backward_sync(model, enabled=not last):
            runs.backward(loss_in(model, step))
        if last:
            mark(f"step {step}")
            if clip:
                runs.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
    mark("teardown")
    strategy.teardown()


add(
    trainer_with_validation=lambda: fit(Model(ConvBatchNorm()), limit_val_batches=1, num_sanity_val_steps=1),
    trainer_accumulation_and_clipping=lambda: fit(
        Model(), data(batches=4), accumulate_grad_batches=2, gradient_clip_val=0.1
    ),
    trainer_manual_optimisation=lambda: fit(Gan()),
    trainer_lbfgs=lambda: fit(Model(optimizer="lbfgs")),
    trainer_unfreezes_a_backbone=lambda: fit(
        Model(), callbacks=[BackboneFinetuning(1, backbone_initial_lr=0.05)], max_epochs=2
    ),
    trainer_sharded_with_clipping_and_validation=lambda: fit(
        Model(optimizer="adamw"), options={"shard_optimizer": True}, gradient_clip_val=0.1, limit_val_batches=1
    ),
    trainer_sync_batchnorm=lambda: fit(Model(ConvBatchNorm()), sync_batchnorm=True),
    trainer_uneven_inputs_by_world_size=lambda: fit(
        Model(ConvBatchNorm()), uneven(), {"uneven_inputs": "world_size"}, max_epochs=2
    ),
    trainer_uneven_inputs_by_active_ranks=lambda: fit(Model(), uneven(), {"uneven_inputs": "active_ranks"}),
    fabric_plain=lambda: fabric(1, False),
    fabric_accumulation_and_clipping=lambda: fabric(2, True),
    fabric_sharded_with_clipping=lambda: fabric(1, True, shard_optimizer=True),
)
