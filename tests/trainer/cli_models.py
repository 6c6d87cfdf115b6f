"""What test_cli.py names by class path on the command line. Nothing here imports lightning_bucketddp."""

import os
import zlib

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = nn.Linear(8, 4), lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0] + self.global_rank).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_end(self) -> None:
        wrapper = self.trainer.strategy.bucket_ddp
        weight = zlib.crc32(self.net.weight.detach().numpy().tobytes())
        line = f"rank {self.global_rank}: {wrapper.passes} passes, lr {self.lr}, weight {weight}\n"
        os.write(1, line.encode())  # in one piece, as both ranks write to the same pipe


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[list[Tensor]]:
        return DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)
