"""Trains a model of another project on two ranks: ``python -m tests.project_script PROJECT STRATEGY``.

Each rank prints a checksum of the weights.
"""

import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch

import lightning_bucketddp  # noqa: F401 (registers the strategies)


class Checksums(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = b"".join(param.detach().numpy().tobytes() for param in pl_module.parameters())
        os.write(1, f"rank {trainer.global_rank}: {trainer.global_step} steps, {zlib.crc32(weights)}\n".encode())


def series() -> pd.DataFrame:
    day = np.arange(60)
    rows = [pd.DataFrame({"day": day, "name": f"s{number}", "y": np.sin(day / 7 + number)}) for number in range(8)]
    return pd.concat(rows, ignore_index=True)


def temporal_fusion_transformer(options: dict[str, Any]) -> None:
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    dataset = TimeSeriesDataSet(
        series(),
        time_idx="day",
        target="y",
        group_ids=["name"],
        max_encoder_length=12,
        max_prediction_length=4,
        static_categoricals=["name"],
        time_varying_known_reals=["day"],
        time_varying_unknown_reals=["y"],
    )
    sizes = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4}
    model = TemporalFusionTransformer.from_dataset(dataset, loss=QuantileLoss(), log_interval=-1, **sizes)
    pl.Trainer(max_steps=6, **options).fit(model, dataset.to_dataloader(train=True, batch_size=16, num_workers=0))


def deep_ar(options: dict[str, Any]) -> None:
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import DeepAREstimator

    values = {
        name: group.set_index(pd.period_range("2026-01-01", periods=60, freq="D"))["y"]
        for name, group in series().groupby("name")
    }
    options = {"max_epochs": 2, **options}
    sizes = {"prediction_length": 4, "num_layers": 1, "hidden_size": 8, "batch_size": 8, "num_batches_per_epoch": 3}
    DeepAREstimator(freq="D", trainer_kwargs=options, **sizes).train(PandasDataset(values))


PROJECTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "pytorch_forecasting": temporal_fusion_transformer,
    "gluonts": deep_ar,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    pl.seed_everything(1)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    if sys.argv[1] == "gluonts":  # it adds a callback that saves checkpoints
        del quiet["enable_checkpointing"]
    PROJECTS[sys.argv[1]](
        {**quiet, "strategy": sys.argv[2], "accelerator": "cpu", "devices": 2, "callbacks": [Checksums()]}
    )
