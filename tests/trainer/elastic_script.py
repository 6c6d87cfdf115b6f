"""Trains under torchrun and resumes from the last checkpoint where there is one; run by test_launchers.py.

    elastic_script.py <folder>

Rank 1 kills itself in the middle of the second epoch, the first time round.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_bucketddp  # noqa: F401

KILLED_AT_STEP = 9


class ResumingLoader(DataLoader[Any]):
    """Goes on in the middle of an epoch, where Lightning alone starts the data, though not the count, from the top."""

    done = 0

    def __iter__(self) -> Iterator[Any]:
        start = self.done % len(self)
        for self.done, batch in enumerate(super().__iter__(), start=1):
            if self.done > start:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Net(pl.LightningModule):
    def __init__(self, killed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.killed = killed

    def on_train_start(self) -> None:
        os.write(1, f"rank {self.global_rank} starts at step {self.global_step}\n".encode())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.killed and self.global_rank == 1 and self.global_step == KILLED_AT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(folder: Path, killed: bool, **options: Any) -> dict[str, Tensor]:
    """Trains two epochs of six steps; the weights."""
    rows = torch.randn(48, 9, generator=torch.Generator().manual_seed(1))
    model = Net(killed)
    trainer = pl.Trainer(
        strategy="bucketddp",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        callbacks=ModelCheckpoint(folder, every_n_train_steps=2, save_last=True),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = ResumingLoader(TensorDataset(rows[:, :8], rows[:, 8:]), batch_size=4, shuffle=True)
    trainer.fit(model, loader, ckpt_path="last")
    return model.state_dict()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    weights = train(folder / "checkpoints", killed=os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    torch.save(weights, folder / f"weights of rank {os.environ['RANK']}")
