"""Trains a digit classifier on two devices of one process, as in a notebook, and again on one of them.

``Trainer(strategy="bucketdp", devices=2)`` starts no process, so a notebook's cells and a debugger see
the LightningModule itself. Each batch is divided between two replicas, which run in threads. Weights, loss and accuracy
are the same as on one device.

    python examples/notebook_two_devices.py
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_bucketddp  # noqa: F401  (registers the strategy)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GroupNorm(8, 32),  # BatchNorm would normalise each replica's half by itself
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def on_train_epoch_end(self) -> None:
        loss, accuracy = (float(self.trainer.callback_metrics[name]) for name in ("loss", "accuracy"))
        self.print(f"  epoch {self.current_epoch}  loss {loss:.4f}  validation accuracy {accuracy:.4f}")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="default: all accelerators, or two CPU replicas")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, held_out = torch.arange(len(labels)).split([1437, 360])

    def loader(rows: Tensor, **options: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(images[rows], labels[rows]), batch_size=64, **options)

    on_accelerator = torch.accelerator.is_available()
    several = args.devices or (torch.accelerator.device_count() if on_accelerator else 2)
    weights = []
    for strategy, devices in (("bucketdp", several), ("auto", 1)):
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="auto" if on_accelerator else "cpu",
            devices=devices,
            precision="64-true",  # differences of rounding would grow in training
            max_epochs=args.epochs,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        print(f"{type(trainer.strategy).__name__}: {trainer.num_devices} x {trainer.strategy.root_device}, 1 process")
        model = Classifier()
        trainer.fit(model, loader(train, shuffle=True), loader(held_out))
        predicted = torch.cat(trainer.predict(model, loader(held_out))).cpu()
        right = int((predicted == labels[held_out]).sum())
        weights.append(nn.utils.parameters_to_vector(model.cpu().parameters()).detach())
        print(f"  {right} of {len(held_out)} right")

    difference = (weights[0] - weights[1]).abs().max()
    print(f"largest difference of a weight   {difference:.1e}   (largest weight {weights[1].abs().max():.2f})")


if __name__ == "__main__":
    main()
