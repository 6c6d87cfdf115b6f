"""``self.log(sync_dist=True)``: ranks agree on keys, and the values are ``ddp``'s wherever these are right."""

import re
import sys
from collections.abc import Callable
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torchmetrics import MeanMetric

from lightning_bucketddp import PeerFailureError, RankMismatchError
from tests.lightning_models import Memory, Regression, data, ddp, ours, trainer
from tests.pool import on_ranks
from tests.reference import WHERE, eventually, group_store, raises_soon, without_where
from tests.traces.recorder import recording

OPTIONS: dict[str, dict[str, Any]] = {
    "training_step": {"on_step": True, "on_epoch": False},
    "on_train_epoch_end": {},
    "validation_step": {},
    "test_step": {},
}


class Differs(Regression):
    """Each rank logs keys of its own in one hook."""

    records = False

    def __init__(self, hook: str, keys: str, **options: Any) -> None:
        super().__init__()
        self.hook, self.keys, self.options = hook, keys, {**OPTIONS[hook], **options}

    def say(self, hook: str) -> None:
        for key in self.keys if hook == self.hook else ():
            self.log(key, 1.0 + dist.get_rank(), sync_dist=True, **self.options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.say("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.say("on_train_epoch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.say("validation_step")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.say("test_step")


EPOCH = {"on_step": False, "on_epoch": True}
OTHER = {
    "step": ("training_step", "ab", "ac", {}, "on_step"),
    "step, another order": ("training_step", "bc", "cb", {}, "on_step"),
    "epoch": ("training_step", "ab", "ac", EPOCH, "on_epoch"),
    "epoch, fewer": ("training_step", "ab", "a", EPOCH, "on_epoch"),
    "end of epoch": ("on_train_epoch_end", "ab", "ac", {}, "on_epoch"),
    "validation": ("validation_step", "ab", "ac", {}, "on_epoch"),
    "test": ("test_step", "ab", "a", {}, "on_epoch"),
}
SOME = ["step, another order", "epoch, fewer", "validation"]


@on_ranks(2, 3, cases=OTHER, quick=SOME, fresh=True)
def test_other_keys_are_an_error_on_all_ranks_that_names_keys_and_ranks(
    hook: str, keys: str, keys_there: str, options: dict[str, Any], when: str
) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    most = "rank 0" if last == 1 else "ranks 0 to 1"
    runs, model = trainer(ours()), Differs(hook, keys_there if rank == last else keys, **options)
    with raises_soon(RankMismatchError) as caught:
        runs.test(model, data(1)) if hook == "test_step" else runs.fit(model, data(2), data(1))
    said = str(caught.value)
    assert said.startswith("expected all ranks to log the same keys with sync_dist=True, found '"), said
    differing = {key for key in keys + keys_there if (key in keys) != (key in keys_there)} or {"b", "c"}
    for key in differing:
        ranks = most if key == "b" else f"rank {last}"
        assert f"'{key}' of {hook} ({when}, mean, float32" in said, said
        assert said.split(f"'{key}' of")[1].split(") on ")[1].startswith(f"{ranks} alone"), said
    assert "'a'" not in said


@on_ranks(2)
def test_ddp_averages_values_of_different_keys() -> None:
    model = Differs("validation_step", "ab" if dist.get_rank() == 0 else "ac")
    (found,) = trainer(ddp()).validate(model, data(1), verbose=False)
    assert found == {"a": 1.5, "b" if dist.get_rank() == 0 else "c": 1.5}


@on_ranks(2, 3, fresh=True, timeout=60)
def test_a_rank_that_logs_nothing_in_a_step_is_an_error_on_all_ranks() -> None:
    assert_nothing_is_an_error("training_step")


@pytest.mark.slow
@on_ranks(2, cases=["training_step", "on_train_epoch_end", "validation_step"], fresh=True, timeout=60)
def test_a_rank_that_logs_nothing_is_an_error_on_all_ranks(hook: str) -> None:
    assert_nothing_is_an_error(hook)


def assert_nothing_is_an_error(hook: str) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    runs = trainer(ours(timeout=timedelta(seconds=30)), max_epochs=2)
    with raises_soon(RankMismatchError, match=f"^rank {rank}: ") as caught:
        runs.fit(Differs(hook, "ab" if rank < last else ""), data(2), data(1))
    assert_names_the_key(str(caught.value), hook)


def assert_names_the_key(said: str, hook: str) -> None:
    """With three ranks either of those that log may be the one that is named, and what the last one does varies."""
    words = rf"rank [01] wants to agree on the keys of self.log\(sync_dist=True\): 'a' of {hook} \("
    said = without_where(said)
    assert re.search(words, said), said
    assert re.search("rank [12] (is|has|waits) ", said), said


@on_ranks(2, fresh=True, timeout=60)
def test_a_rank_that_logs_nothing_and_ends_is_an_error_on_the_others() -> None:
    hook, rank = "test_step", dist.get_rank()
    runs, model = trainer(ours(timeout=timedelta(seconds=30))), Differs(hook, "ab" if rank == 0 else "")
    if rank == 1:
        runs.test(model, data(1))
        eventually(lambda: group_store().check(["rank 0 has raised"]))
        return
    with raises_soon(PeerFailureError, match=f"^rank 0: .*rank 1{WHERE} has ended") as caught:
        runs.test(model, data(1))
    group_store().set("rank 0 has raised", "")
    assert_names_the_key(str(caught.value), hook)


class Speaks(pl.Callback):
    """Logs before the progress bar asks for what was logged, which it does on rank 0 alone."""

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        pl_module.log("said", 3.0 + dist.get_rank(), sync_dist=True, prog_bar=True)


class Everything(Regression):
    """Logs in all ways; ranks have batches of 2, 4, ... samples."""

    records = False

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.reverse, self.metric, self.seen = reverse, MeanMetric(), list[dict[str, float]]()

    def value(self, batch_idx: int) -> torch.Tensor:
        return torch.tensor(0.3 * (1 + batch_idx + self.current_epoch) ** 0.5 * (1 + dist.get_rank()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value, size = self.value(batch_idx), 2 + 2 * dist.get_rank()
        self.log("both", value, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True, batch_size=size)
        keys = ["mean", "sum", "max", "min"]
        for key in reversed(keys) if self.reverse else keys:
            options = {"on_step": False, "on_epoch": True, "prog_bar": True, "batch_size": size}
            self.log(key, value, reduce_fx=key, sync_dist=True, **options)  # type: ignore[arg-type]
        self.log("double", value.double(), on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
        self.log("own", value)
        self.log("rank 0's", value, rank_zero_only=True)
        self.log("in the group", value, sync_dist=True, sync_dist_group=dist.group.WORLD)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("end", self.value(7), sync_dist=True, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.metric(self.value(batch_idx))
        self.log("valid", self.value(batch_idx + dataloader_idx), sync_dist=True, on_step=True, on_epoch=True)
        self.log("metric", self.metric)

    def on_validation_epoch_end(self) -> None:
        self.log("valid end", self.value(3), sync_dist=True)


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        self.shown.append({**super().get_metrics(trainer, pl_module), "v_num": 0})
        return self.shown[-1]


def everything_from(strategy: Any, reverse: bool = False) -> list[Any]:
    """What a fit and a validation log, and what callbacks and the progress bar see."""
    with TemporaryDirectory() as folder:
        logger, bar = Memory(), Bar()
        best = ModelCheckpoint(folder, monitor="end", save_on_train_epoch_end=True)
        options = {"enable_progress_bar": True, "enable_checkpointing": True, "max_epochs": 2, "log_every_n_steps": 1}
        runs = trainer(strategy, logger=logger, callbacks=[Speaks(), bar, best], **options)
        model = Everything(reverse)
        loaders = CombinedLoader([data(2), data(1)], "sequential")
        runs.fit(model, data(3), loaders)
        fitted = {name: float(value) for name, value in runs.callback_metrics.items()}
        validated = runs.validate(model, loaders, verbose=False)
        last = {name: value for name, value in bar.shown[-1].items() if name != "said"}
        return [logger.logged, fitted, validated, last, float(best.best_model_score or 0)]


@on_ranks(2, 3)
def test_values_are_ddps_wherever_they_are_logged_and_in_any_order() -> None:
    expected = everything_from(ddp())
    for reverse in (False, dist.get_rank() == 1):
        found = everything_from(ours(), reverse)
        assert any("said" in logged for _, logged in found[0])
        if dist.get_world_size() == 2:
            assert found == expected
        else:  # gloo adds the ranks' values in another order if there are several
            torch.testing.assert_close(flat(found), flat(expected), rtol=1e-6, atol=0)


def flat(value: Any) -> Any:
    if isinstance(value, dict):
        return [flat(value[key]) for key in sorted(value)]
    return [flat(each) for each in value] if isinstance(value, list | tuple) else float(value or 0)


class Means(Regression):
    records = False

    def __init__(self, keys: int, sync: bool = True) -> None:
        super().__init__()
        self.keys, self.sync = keys, sync

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        size = 1 + dist.get_rank()
        for key in range(self.keys):
            self.log(str(key), float(size + key), sync_dist=self.sync, batch_size=size)


def collectives_of(strategy: Any, model: pl.LightningModule) -> list[str]:
    runs = trainer(strategy)
    with recording() as recorder:
        runs.validate(model, data(2), verbose=False)
    return [line.split()[0] for lines in recorder.trace.values() for line in lines]


@on_ranks(2)
def test_an_epoch_costs_one_exchange_and_one_all_reduce_per_dtype_and_operation() -> None:
    alone = collectives_of(ours(), Means(8, sync=False))
    assert alone == collectives_of(ddp(), Means(8, sync=False)), "without sync_dist nothing is sent"
    assert alone == collectives_of(ours(), Means(0))
    found = collectives_of(ours(), Means(8))
    assert found.count("all_gather_single") - alone.count("all_gather_single") == 1
    assert found.count("all_reduce") - alone.count("all_reduce") == 1
    of_ddp = collectives_of(ddp(), Means(8))
    assert of_ddp.count("all_reduce") - alone.count("all_reduce") == 16


@on_ranks(2)
def test_means_weigh_by_samples_where_lightning_rounds_their_number() -> None:
    runs = trainer(ours())
    (found,) = runs.validate(Means(1), data(1), verbose=False)
    assert found["0"] == pytest.approx((1 * 1 + 2 * 2) / 3)
    (of_ddp,) = trainer(ddp()).validate(Means(1), data(1), verbose=False)
    assert of_ddp["0"] == 2.5


class Parts(Regression):
    """In the first epoch each rank logs what it alone has, in the second all ranks log everything."""

    records = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        value = torch.tensor(10.0 + rank + batch_idx)
        for key in ("mean", "sum", "max", "min"):
            if self.trainer.current_epoch > 0 or rank == world - 1:
                self.log(key, value, reduce_fx=key, sync_dist=True, batch_size=1 + rank)
        if self.trainer.current_epoch == 0 and rank > 0:
            self.log("double", value.double(), sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if dist.get_rank() == 1:
            self.log("train", 4.0, on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


@on_ranks(2, 3)
def test_with_any_keys_a_value_is_that_of_the_ranks_that_have_it() -> None:
    last, world = float(dist.get_world_size() - 1), dist.get_world_size()
    with TemporaryDirectory() as folder:
        logger, best = Memory(), ModelCheckpoint(folder, monitor="mean", save_top_k=-1)
        options = {"enable_checkpointing": True, "max_epochs": 2, "callbacks": best, "num_sanity_val_steps": 0}
        runs = trainer(ours(logged_keys="any"), logger=logger, **options)
        runs.fit(Parts(), data(2), data(2))
    first, second = (
        {k: v for k, v in logged.items() if k != "epoch"} for _, logged in logger.logged if "mean" in logged
    )
    doubles = sum(10.5 + rank for rank in range(1, world)) / (world - 1)
    assert first == {
        "mean": 10.5 + last, "sum": 2 * (10 + last) + 1, "max": 11 + last, "min": 10 + last, "double": doubles,
    }  # fmt: skip
    weighted = sum((1 + rank) * (10.5 + rank) for rank in range(world)) / sum(range(1, world + 1))
    assert second == pytest.approx(
        {"mean": weighted, "sum": sum(21.0 + 2 * rank for rank in range(world)), "max": 11 + last, "min": 10.0}
    )
    assert [logged["train"] for _, logged in logger.logged if "train" in logged] == [4.0, 4.0]
    assert runs.callback_metrics["train"] == 4.0


@on_ranks(2, fresh=True)
def test_with_any_keys_values_of_a_step_need_all_ranks_and_a_key_means_the_same() -> None:
    model = Differs("training_step", "ab" if dist.get_rank() == 0 else "ac")
    with raises_soon(RankMismatchError, match=r"'b' of training_step \(on_step, mean, float32\) on rank 0 alone"):
        trainer(ours(logged_keys="any")).fit(model, data(1))
    model = Differs("training_step", "a", **EPOCH, reduce_fx="mean" if dist.get_rank() == 0 else "sum")
    with raises_soon(
        RankMismatchError, match=r"on_epoch, mean, float32\) on rank 0 .*on_epoch, sum, float32\) on rank 1"
    ):
        trainer(ours(logged_keys="any")).fit(model, data(1))


@on_ranks(2)
def test_without_lightnings_private_classes_logging_is_its_own() -> None:
    def gone(make: Callable[[], Any]) -> Any:
        with patch.dict(sys.modules, {"lightning_bucketddp.trainer.logged_keys": None}):
            return trainer(make()).validate(Means(1), data(1), verbose=False)

    assert gone(ours) == gone(ddp)
    with pytest.raises(ImportError):
        gone(lambda: ours(logged_keys="any"))
