"""Trainers of one process: on one device, and with ``strategy="bucketdp"``."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDPStrategy

replicas = pytest.mark.parametrize("share", [True, False], ids=["shared parameters", "copies"])
"""Whether replicas share parameters, as on one device, or have copies, as on several."""


def one_process(devices: int = 1, share: bool = True, strategy: Any = None, **options: Any) -> pl.Trainer:
    """A quiet Trainer: on one CPU by Lightning's own strategy, or on several by ours."""
    if strategy is None:
        strategy = BucketDPStrategy() if devices > 1 else "auto"
    if isinstance(strategy, BucketDPStrategy):
        strategy._share = share
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**defaults, **options})


def samples(*shapes: tuple[int, ...], count: int = 23, batch_size: int = 6, classes: int = 0) -> DataLoader[Any]:
    """The same random samples each time, in batches of which the last is smaller; at the end classes, if asked for."""
    generator = torch.Generator().manual_seed(11)
    tensors = [torch.randn(count, *shape, generator=generator) for shape in shapes]
    if classes:
        tensors.append(torch.randint(0, classes, (count,), generator=generator))
    return DataLoader(TensorDataset(*tensors), batch_size)


def digits(**options: Any) -> DataLoader[Any]:
    """Samples for the module of that name; batches of 6, 6, 6 and 5."""
    return samples((8,), classes=4, **options)


def fit(model: pl.LightningModule, devices: int = 1, share: bool = True, loader: Any = None, **options: Any) -> Any:
    """Trains, by default on ``digits()``, and validates on a few, if the module does.

    Returns:
        The Trainer.
    """
    trainer = one_process(devices, share, **options)
    validates = is_overridden("validation_step", getattr(model, "_orig_mod", model))
    trainer.fit(model, digits() if loader is None else loader, digits(count=13) if validates else None)
    return trainer
