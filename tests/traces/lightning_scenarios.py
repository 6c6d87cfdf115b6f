"""The scenarios with a Trainer or Fabric, whose own collectives are recorded too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning_models import Gan, data, ours, start_fabric, trainer
from tests.models import Branches, ConvBatchNorm, Mlp
from tests.reference import loss_at
from tests.traces.recorder import mark
from tests.traces.scenarios import SCENARIOS, Scenario, adamw, sgd

MARKS = LambdaCallback(
    on_train_epoch_start=lambda runs, _: mark(f"epoch {runs.current_epoch}"),
    on_train_batch_start=lambda runs, _, batch, index: mark(f"epoch {runs.current_epoch}, batch {index}"),
    on_validation_start=lambda *_: mark("validation"),
    on_train_end=lambda *_: mark("end of fit"),
)


class Model(pl.LightningModule):
    def __init__(self, build: Callable[[], nn.Module] = Mlp, optimizer: str = "sgd") -> None:
        super().__init__()
        self.backbone, self.head = build(), nn.Linear(4, 4)
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


class Skips(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == dist.get_rank() else self.loss(batch)


class BranchByRank(Model):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.backbone(batch[0], ["left", "right"][dist.get_rank()]), batch[1])


def uneven() -> DataLoader[Any]:
    inputs = torch.ones(4 * (1 + dist.get_rank()), 8)
    return DataLoader(TensorDataset(inputs, inputs[:, :4]), batch_size=4)


def fits(
    name: str,
    build: Callable[[], pl.LightningModule] = Model,
    train_data: Callable[[], Any] = lambda: data(batches=2),
    options: dict[str, Any] | None = None,
    callbacks: Callable[[], list[pl.Callback]] = list,
    **settings: Any,
) -> None:
    """Adds a fit of two steps without validation, unless the Trainer's ``settings`` differ."""

    def run() -> None:
        mark("start of fit")
        runs = trainer(ours(**(options or {})), callbacks=[MARKS, *callbacks()], **settings)
        runs.fit(build(), train_data(), data(batches=1) if settings.get("limit_val_batches") else None)

    SCENARIOS[f"trainer_{name}"] = Scenario(run)


def runs_fabric(name: str, accumulate: int = 1, clip: bool = True, **options: Any) -> None:
    def run() -> None:
        mark("launch")
        runs = start_fabric(**options)
        mark("setup")
        module = ConvBatchNorm()
        model, optimizer = runs.setup(module, adamw(module) if "shard_optimizer" in options else sgd(module))
        for step in range(4):
            mark(f"backward {step}")
            last = step % accumulate == accumulate - 1
            with runs.no_backward_sync(model, enabled=not last):
                runs.backward(loss_at(model, step))
            if last:
                mark(f"step {step}")
                if clip:
                    runs.clip_gradients(model, optimizer, max_norm=0.05)
                optimizer.step()
                optimizer.zero_grad()
        mark("teardown")
        runs.strategy.teardown()

    SCENARIOS[f"fabric_{name}"] = Scenario(run)


batch_norm = partial(Model, ConvBatchNorm)
sharded: dict[str, Any] = {"build": partial(Model, optimizer="adamw"), "options": {"shard_optimizer": True}}
fits("nothing_on_one_rank", Skips)
fits("branch_by_rank", partial(BranchByRank, Branches))
fits("with_validation", batch_norm, limit_val_batches=1, num_sanity_val_steps=1)
fits("accumulation_and_clipping", train_data=partial(data, batches=4), accumulate_grad_batches=2, gradient_clip_val=0.1)
fits("manual_optimisation", Gan)
fits("lbfgs", partial(Model, optimizer="lbfgs"))
fits("unfreezes_a_backbone", callbacks=lambda: [BackboneFinetuning(1, backbone_initial_lr=0.05)], max_epochs=2)
fits("sharded_with_clipping_and_validation", **sharded, limit_val_batches=1, gradient_clip_val=0.1)
fits("sync_batchnorm", batch_norm, sync_batchnorm=True)
fits("uneven_inputs_by_world_size", batch_norm, uneven, {"uneven_inputs": "world_size"}, max_epochs=2)
fits("uneven_inputs_by_active_ranks", Model, uneven, {"uneven_inputs": "active_ranks"})
runs_fabric("plain", clip=False)
runs_fabric("accumulation_and_clipping", accumulate=2)
runs_fabric("sharded_with_clipping", shard_optimizer=True)
