"""Trains on two workers of a local Ray cluster; one is killed on the way, and Ray restarts both from a checkpoint.

    pip install torch==2.13.0 -e ".[examples,ray]"
    python examples/ray_train.py
    python examples/ray_train.py --sharded --no-kill

Ray's callback reports a checkpoint and the metrics at the end of every epoch. After the failure Ray calls the training
function again, which resumes from the last checkpoint.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.trainer.ray import RayBucketDDPStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        weights = torch.cat([param.detach().flatten() for param in self.parameters()])
        both = self.all_gather(weights)
        self.log("difference", (both[0] - both[-1]).abs().max())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class KillOnce(pl.Callback):
    """Kills the worker of rank 1 in the middle of an epoch, unless that was done before."""

    def __init__(self, epoch: int, done: Path) -> None:
        self.epoch, self.done = epoch, done

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.global_rank == 1 and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    callbacks: list[pl.Callback] = [RayTrainReportCallback()]
    if config["kill"]:
        callbacks.append(KillOnce(config["epochs"] // 2, Path(config["folder"]) / "killed"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayBucketDDPStrategy(shard_optimizer=config["sharded"], check_ranks_every=100),
        plugins=[RayLightningEnvironment()],
        callbacks=callbacks,
        max_epochs=config["epochs"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(Classifier(), loader)
        return
    with checkpoint.as_directory() as folder:
        print(f"rank {trainer.global_rank}: resumes from epoch {epoch_of(folder)}")
        trainer.fit(Classifier(), loader, ckpt_path=str(Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME))


def epoch_of(folder: str) -> int:
    """The epoch that a checkpoint was saved in."""
    return torch.load(Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME, weights_only=False)["epoch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--sharded", action="store_true", help="shard the optimizer")
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True, help="kill a worker")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={**vars(arguments), "folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)),
        )
        result = trainer.fit()
        assert result.metrics is not None
        print(
            f"{int(result.metrics['epoch']) + 1} epochs, {int(result.metrics['step'])} steps, "
            f"loss {result.metrics['loss']:.3f}, "
            f"largest difference between the ranks' weights {result.metrics['difference']:g}"
        )


if __name__ == "__main__":
    main()
