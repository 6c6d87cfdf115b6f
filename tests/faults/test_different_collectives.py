"""All ranks wait, for different things, in a Trainer: an error on all of them, which says what each waits for."""

import re
import time
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping

from lightning_bucketddp import RankMismatchError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers import watch
from lightning_bucketddp.peers.abort_listener import listen
from tests.lightning_models import Citizen, Regression, data, ours, trainer
from tests.optim.test_in_trainers import Evaluated
from tests.pool import on_ranks
from tests.reference import drift, raises_soon, without_where
from tests.trainer.test_uneven_inputs import own


class Stops(Regression):
    def __init__(self, stops: bool = False, gathers: bool = False) -> None:
        super().__init__()
        self.stops, self.gathers = stops, gathers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and self.stops:
            self.trainer.should_stop = True
        if batch_idx == 4 and self.gathers:
            self.all_gather(torch.zeros(3))
        return super().training_step(batch, batch_idx)


WAYS = ["stream", "should_stop", "limit_train_batches", "gathers"]


@on_ranks(2, cases=WAYS, quick=["stream", "gathers"], fresh=True, timeout=60)
def test_ranks_that_wait_for_different_things_say_which(way: str) -> None:
    rank = dist.get_rank()
    first = rank == 0
    model = Stops(stops=first and way == "should_stop", gathers=not first and way == "gathers")
    limit = (4 if first else 6) if way in ("limit_train_batches", "gathers") else None
    loader = own("stream", 4 if first else 6) if way == "stream" else data()
    with TemporaryDirectory() as folder, raises_soon(RankMismatchError) as caught:
        options = {"enable_checkpointing": True, "limit_train_batches": limit, "default_root_dir": folder}
        trainer(ours(timeout=timedelta(seconds=30)), **options).fit(model, loader)
    said = without_where(str(caught.value))
    waits = r"waits for the Trainer's all_gather, .*in training_step" if way == "gathers" else "is in pass 4"
    for words in (f"^rank {rank}: ", "rank 0 waits for the Trainer's .*model_checkpoint.py", f"rank 1 {waits}"):
        assert re.search(words, said), said


@on_ranks(2, fresh=True, timeout=60)
def test_ranks_learn_that_one_alone_saves_after_a_sharded_fit() -> None:
    fit, model = trainer(ours(shard_optimizer=True)), Evaluated()
    fit.fit(model, data())
    said = "entries of the optimizer's state.* in another wrapper or run"
    with TemporaryDirectory() as folder, raises_soon(RankMismatchError, match=said):
        if fit.is_global_zero:
            fit.save_checkpoint(f"{folder}/last.ckpt")
        fit.validate(model, data())


class Slow(Citizen):
    """Rank 1 comes late to all kinds of places."""

    def late(self, *_: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.late()
        self.all_gather(torch.zeros(3))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.late()
        super().validation_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.late()

    def on_train_epoch_end(self) -> None:
        self.late()

    on_save_checkpoint = on_validation_epoch_end = late  # type: ignore[assignment]


@on_ranks(2, 3)
def test_slow_ranks_are_never_taken_for_ranks_that_wait_for_different_things() -> None:
    model = Slow("conv")
    with TemporaryDirectory() as folder, patch.object(watch, "_LOOK_SECONDS", 0.02):
        options = {"enable_checkpointing": True, "default_root_dir": folder}
        fits = trainer(ours(), callbacks=EarlyStopping("valid"), **options)
        fits.fit(model, data(3), data(2))
    assert fits.state.finished
    assert listen(Collectives(None)).roll_call.news.number > 10, "ranks have called the roll"
    assert drift(model) == 0
