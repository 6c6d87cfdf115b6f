"""Callbacks can be copied while they train, as Lightning's own tests do; some hold the Trainer, and so the strategy."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.lightning_models import Regression, data, strategy_of, trainer
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


class Copies(pl.Callback):
    """Copies all callbacks in one hook, after one pass where that is about batches."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.copied = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer = trainer

    def _copy(self, hook: str) -> None:
        if hook == self.hook:
            self.copied += 1
            (copied,) = copy.deepcopy(self.trainer.callbacks)
            assert copied.trainer is not self.trainer
            assert copied.trainer.callbacks[0] is copied

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copy("on_fit_start")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._copy("on_train_batch_start")


def copied_in(hook: str, kind: str) -> tuple[int, float]:
    callback, model = Copies(hook), Regression()
    trainer(strategy_of(kind), callbacks=[callback]).fit(model, data())
    return callback.copied, largest_difference_between_ranks(model)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start"])
@pytest.mark.parametrize("kind", ["ddp", "bucketddp"])
def test_callbacks_are_copied_in_fit(run_ranks: RunRanks, hook: str, kind: str) -> None:
    assert run_ranks(2, copied_in, hook, kind) == [(1, 0.0)] * 2
