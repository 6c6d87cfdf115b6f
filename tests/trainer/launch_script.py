"""A script as users write it; run by test_launchers.py with each start method."""

import atexit
import os
import sys
import weakref
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from tests.reference import largest_difference_between_ranks

groups: list[weakref.ref[dist.ProcessGroup]] = []


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0] + self.global_rank).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        wrapper = self.trainer.strategy.bucket_ddp
        groups.append(weakref.ref(dist.group.WORLD))
        difference = largest_difference_between_ranks(self)
        say(f"rank {self.global_rank}: {wrapper.passes} passes, difference {difference:g}")


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece, as both ranks write to the same pipe


def main() -> None:
    torch.set_num_threads(1)
    atexit.register(lambda: say(f"process group open at exit: {dist.is_initialized()}"))  # runs after later ones
    atexit.register(lambda: say(f"process groups alive at exit: {sum(ref() is not None for ref in groups)}"))
    runs = pl.Trainer(
        # The one way of starting processes without a name of its own.
        strategy=BucketDDPStrategy(start_method="forkserver") if sys.argv[1] == "forkserver" else sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    runs.fit(Tiny(), DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4))


if __name__ == "__main__":
    main()
