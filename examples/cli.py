"""Trains a digit classifier from a YAML file: LightningCLI with the options of ``BucketDDPStrategy``.

Weights in bf16, gradients and optimizer in fp32: ``examples/cli.yaml`` says so. Everything in it can be overridden:

    python examples/cli.py fit --config examples/cli.yaml
    python examples/cli.py fit --config examples/cli.yaml --trainer.strategy.wire_dtype bfloat16
    python examples/cli.py fit --config examples/cli.yaml --trainer.strategy ddp
    python examples/cli.py fit --trainer.strategy.help lightning_bucketddp.BucketDDPStrategy
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]


class Digits(pl.LightningDataModule):
    """scikit-learn's digits: images of 64 pixels in 0..1."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        found = load_digits()
        images, labels = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.train, self.held_out = (TensorDataset(images[rows], labels[rows]) for rows in (order[360:], order[:360]))

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.held_out, 90)


class Classifier(pl.LightningModule):
    """A perceptron with one hidden layer."""

    def __init__(self, width: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.lr = lr
        self.dtypes = ""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        param = next(self.parameters())
        self.dtypes = f"parameters in {param.dtype}, gradients in {param.grad.dtype}"

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        accuracy = float(self.trainer.callback_metrics["accuracy"])
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch}  held-out accuracy {accuracy:.3f}")

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            strategy = self.trainer.strategy
            print(f"\n{type(strategy).__name__} on {self.trainer.world_size} ranks, {self.dtypes}")
            if (wrapper := getattr(strategy, "bucket_ddp", None)) is not None:
                print(wrapper.last_pass())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    LightningCLI(Classifier, Digits, save_config_callback=None)
