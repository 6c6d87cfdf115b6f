"""Trainers of one process: on one device, and with ``strategy="bucketdp"``."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_bucketddp import BucketDPStrategy
from tests.lightning_models import QUIET

replicas = pytest.mark.parametrize("share", [True, False], ids=["shared parameters", "copies"])
"""Whether replicas share parameters, as on one device, or have copies, as on several."""


def close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def one_process(devices: int = 1, share: bool = True, strategy: Any = None, **options: Any) -> pl.Trainer:
    if strategy is None:
        strategy = BucketDPStrategy() if devices > 1 else "auto"
    if isinstance(strategy, BucketDPStrategy):
        strategy._share = share
    return pl.Trainer(strategy=strategy, devices=devices, **{**QUIET, "accelerator": "cpu", "max_epochs": 2, **options})


def samples(*shapes: tuple[int, ...], count: int = 23, batch_size: int = 6, classes: int = 0) -> DataLoader[Any]:
    """The same random samples each time, in batches of which the last is smaller; at the end classes, if asked for."""
    generator = torch.Generator().manual_seed(11)
    tensors = [torch.randn(count, *shape, generator=generator) for shape in shapes]
    if classes:
        tensors.append(torch.randint(0, classes, (count,), generator=generator))
    return DataLoader(TensorDataset(*tensors), batch_size)


def digits(**options: Any) -> DataLoader[Any]:
    return samples((8,), classes=4, **options)


def fit(model: pl.LightningModule, devices: int = 1, share: bool = True, loader: Any = None, **options: Any) -> Any:
    """Trains, by default on ``digits()``, and validates on a few, if the module does. Returns the Trainer."""
    trainer = one_process(devices, share, **options)
    validates = is_overridden("validation_step", getattr(model, "_orig_mod", model))
    trainer.fit(model, digits() if loader is None else loader, digits(count=13) if validates else None)
    return trainer


class Digits(pl.LightningModule):
    """Logs numbers and metrics, and returns dicts, as users do in modules for one device."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lr = lr
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)
        self.f1 = MulticlassF1Score(4, average="macro")  # which is no mean over samples
        self.scores = nn.ModuleDict({"valid": MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)])})
        self.largest_logits = CatMetric()  # in the samples' order
        self.kept: list[Tensor] = []
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self(batch[0])
        loss = nn.functional.cross_entropy(predictions, batch[1])
        self.f1(predictions, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        return {"loss": loss, "predictions": predictions.detach(), "ratio": (loss.item(), None)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        predictions, scores = self(batch[0]), self.scores["valid"]
        scores.update(predictions, batch[1])
        self.largest_logits.update(predictions.amax(1))
        self.log("valid", nn.functional.cross_entropy(predictions, batch[1]))
        self.log("largest", predictions.max(), reduce_fx="max")
        self.log("rows", float(len(predictions)), reduce_fx=torch.sum)
        self.log_dict(scores)
        return {"predictions": predictions}

    def on_validation_epoch_end(self) -> None:
        self.kept.append(self.largest_logits.compute())
        self.largest_logits.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        predictions = self(batch[0])
        self.log("test", nn.functional.cross_entropy(predictions, batch[1]), True, on_step=True, on_epoch=True)
        self.log("mean", predictions.mean(), batch_size=len(predictions))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self(batch[0])
        return {"predictions": predictions, "class": predictions.argmax(1), "loss": predictions.mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([param for param in self.parameters() if param.requires_grad], lr=self.lr)


class Plain(pl.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Linear(8, 1) if net is None else net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
