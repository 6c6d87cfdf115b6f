"""Trains on two ranks, one of which raises or is killed; run by test_launchers.py.

    failing_script.py <strategy> <folder> <where>:<rank> [<where>:<rank> ...]

With a strategy that forks, several failures follow each other, as imports take longer than all of them.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.peers import abort_listener


class Failing(pl.LightningModule):
    def __init__(self, where: str, rank: int, folder: Path) -> None:
        super().__init__()
        self.where, self.rank, self.folder = where, rank, folder
        self.net = nn.Linear(8, 4)

    def fail(self, where: str, step: int = 3) -> None:
        """Fails here if this is the place, the rank and the step."""
        if where != self.where.removesuffix(" killed") or self.trainer.sanity_checking or self.global_step < step:
            return
        if self.global_rank != self.rank:
            if where == "stuck":
                time.sleep(1000)
            return
        (self.folder / "failed").write_text(str(time.time()))
        if self.where.endswith(" killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.where == "sigterm":
            time.sleep(1)  # the other rank is in its backward by now
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise ArithmeticError(f"no {where} today")

    def setup(self, stage: str) -> None:
        with (self.folder / f"{self.where}:{self.rank} at rank {self.global_rank}").open("w") as file:
            os.dup2(file.fileno(), 2)
        self.fail("setup", step=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for where in ("stuck", "training_step", "sigterm"):
            self.fail(where)
        loss = self.net(batch[0]).square().mean()
        loss.register_hook(lambda _: self.fail("backward"))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.fail("on_train_epoch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation_step")
        self.log("validation", self.net(batch[0]).mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fail("on_save_checkpoint")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(pl.Callback):
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        note(Path(trainer.default_root_dir), "on_exception")


def note(folder: Path, moment: str) -> None:
    (folder / f"{moment} at rank {os.environ.get('LOCAL_RANK', 0)}").write_text(str(time.time()))


def train(strategy: str, folder: Path, where: str, rank: int) -> None:
    abort_listener.LEAVE_SECONDS = 3.0  # for the rank that is stuck
    data = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4)
    saves = ModelCheckpoint(folder / "checkpoints", save_on_exception=True)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "default_root_dir": folder, **quiet}
    try:
        pl.Trainer(strategy=strategy, callbacks=[saves, Notes()], **options).fit(
            Failing(where, rank, folder), data, data
        )
    finally:
        note(folder, "finally")


def main() -> None:
    torch.set_num_threads(1)
    strategy, folder, *failures = sys.argv[1:]
    for failure in failures:
        where, rank = failure.split(":")
        try:
            train(strategy, Path(folder), where, int(rank))
        except (Exception, SIGTERMException):
            if len(failures) == 1:
                raise
            ended = time.time()
            print(f"{failure} ended after {ended - float((Path(folder) / 'failed').read_text()):.1f} s", flush=True)


if __name__ == "__main__":
    main()
