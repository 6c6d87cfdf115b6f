"""Lightning's callbacks with ``BucketDDPStrategy``."""

import logging
import warnings
from collections.abc import Callable
from csv import DictReader
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning_models import Citizen, Memory, close_to, data, ddp, ours, trainer
from tests.models import ConvBatchNorm
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


# -- as with ddp -------------------------------------------------------------------------------------


@dataclass
class Row:
    """A callback, and what to look at when it has done its work: numbers, tensors, and names as keys."""

    name: str
    callback: Callable[[str], pl.Callback]
    look: Callable[[Any, pl.Trainer], Any] = lambda callback, runs: None
    module: Callable[[], Citizen] = Citizen
    options: dict[str, Any] = field(default_factory=dict)


def saved(callback: ModelCheckpoint, runs: pl.Trainer) -> Any:
    best = {Path(path).name: score for path, score in callback.best_k_models.items()}
    names = [Path(path).name for path in (callback.best_model_path, callback.last_model_path)]
    runs.strategy.barrier()  # rank 0 may still be at work
    files = sorted(path.name for path in Path(callback.dirpath).iterdir())
    return best, {" ".join(names): 0}, {" ".join(files): 0}


def averaged(callback: WeightAveraging, runs: pl.Trainer) -> Any:
    assert callback._average_model is not None
    return int(callback._average_model.n_averaged), list(callback._average_model.module.parameters())


def swa(_: str) -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)


def ema(_: str) -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.8)


def without_statistics(logged: tuple[int | None, dict[str, float]]) -> tuple[int | None, dict[str, float]]:
    """Of the machine, which vary from run to run; that they are logged is to be compared."""
    return logged[0], {key: 0 if key.startswith("DeviceStats") else value for key, value in logged[1].items()}


class Watched(Citizen):
    """With BatchNorm; looks at what is validated."""

    def __init__(self) -> None:
        super().__init__("conv")
        self.differences: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.differences.append(largest_difference_between_ranks(self))


ROWS = [
    Row("stochastic weight averaging", swa, lambda callback, _: int(callback.n_averaged), Citizen, {"max_epochs": 4}),
    Row("stochastic weight averaging, BatchNorm", swa, module=Watched, options={"max_epochs": 4}),
    Row("weight averaging", lambda _: WeightAveraging(), averaged),
    Row("moving average", ema, averaged),
    Row("moving average, BatchNorm", ema, averaged, Watched),
    Row("best", lambda folder: ModelCheckpoint(folder, monitor="valid", save_top_k=2, save_last=True), saved),
    Row("by steps", lambda folder: ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1), saved),
    Row(
        "early stopping",
        lambda _: EarlyStopping("valid", min_delta=9.0, patience=1),
        lambda callback, _: (callback.stopped_epoch, callback.best_score),
        options={"max_epochs": 6},
    ),
    Row("summary", lambda _: ModelSummary(2), lambda callback, runs: {str(callback._summary(runs, runs.model)): 0}),
    Row("device statistics", lambda _: DeviceStatsMonitor(cpu_stats=find_spec("psutil") is not None)),
    Row(
        "learning rates",
        lambda _: LearningRateMonitor("step", log_momentum=True),
        lambda callback, _: callback.lrs,
        partial(Citizen, schedule="step"),
    ),
    Row("timer", lambda _: Timer({"hours": 1}), lambda callback, _: callback.time_elapsed() > 0),
    Row("pruning", lambda _: ModelPruning("l1_unstructured", amount=0.3)),
]


def both(index: int, folder: str) -> float:
    row = ROWS[index]
    seen: list[Any] = []
    for name, strategy in (("ddp", ddp()), ("ours", ours())):
        callback, logger = row.callback(f"{folder}/{name}"), Memory()
        options = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **row.options}
        saves = isinstance(callback, ModelCheckpoint)
        runs = trainer(strategy, callbacks=[callback], enable_checkpointing=saves, **options)
        model = row.module()
        runs.fit(model, data(), data())
        state = model.state_dict() if dist.get_rank() == 0 else dict(model.named_parameters())
        seen.append([state, runs.global_step, row.look(callback, runs)])
        if row.module is not Watched:  # with ddp each rank validates with its own BatchNorm statistics
            seen[-1] += [dict(runs.callback_metrics), list(map(without_statistics, logger.logged))]
    torch.testing.assert_close(seen[1], seen[0])
    if isinstance(model, Watched):
        assert model.differences == [0.0] * (2 if row.callback is ema else 5)
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize("index", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_callbacks_as_with_ddp(run_ranks: RunRanks, index: int, tmp_path: Any) -> None:
    assert run_ranks(2, both, index, str(tmp_path)) == [0.0, 0.0]


# -- the tuner and loggers ---------------------------------------------------------------------------


class Rated(Citizen):
    """With a learning rate to be found."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


def find_rate(folder: str) -> float:
    def found(strategy: Any, **options: Any) -> tuple[Rated, Any]:
        model = Rated()
        runs = trainer(strategy, default_root_dir=folder, **options)
        finder = Tuner(runs).lr_find(model, data(30), num_training=30, early_stop_threshold=None)
        assert finder.results["lr"]
        runs.fit(model, data())
        assert runs.global_step == 6
        return model, finder.results

    (first, searched), (second, expected) = found(ours()), found(ddp())
    torch.testing.assert_close(searched, expected)
    close_to(first, second)
    assert first.lr == pytest.approx(second.lr)
    assert first.lr != 0.02, "something was found"

    low: dict[str, Any] = {"precision": "bf16-true"}
    searched, _ = found(ours(grad_dtype=torch.float32), **low)
    plain = Rated(searched.lr)
    trainer(ours(grad_dtype=torch.float32), **low).fit(plain, data())
    torch.testing.assert_close(searched.state_dict(), plain.state_dict(), rtol=0, atol=0)  # the search left no trace
    return largest_difference_between_ranks(first)


def test_the_learning_rate_is_found_as_with_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    """And the search leaves no trace in fp32 master parameters."""
    assert run_ranks(2, find_rate, str(tmp_path)) == [0.0, 0.0]


def write_logs(kind: type[Logger], folder: str) -> None:
    for name, strategy in (("ddp", ddp()), ("ours", ours())):
        runs = trainer(strategy, logger=kind(folder, name), log_every_n_steps=1)
        runs.fit(Citizen(), data(), data())


def test_csv_files_as_with_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, write_logs, CSVLogger, str(tmp_path))
    found, expected = (
        [
            {key: float(value) for key, value in row.items() if value}
            for row in DictReader((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines())
        ]
        for name in ("ours", "ddp")
    )
    assert len(found) > 6
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_files_as_with_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(2, write_logs, TensorBoardLogger, str(tmp_path))
    seen = []
    for name in ("ours", "ddp"):
        events = EventAccumulator(str(tmp_path / name / "version_0")).Reload()
        seen.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    assert {"train_step", "valid"} <= seen[0].keys()
    torch.testing.assert_close(*seen)


# -- fine-tuning that is resumed ---------------------------------------------------------------------


class Tuned(pl.LightningModule):
    """A backbone with BatchNorm. A rank has one batch that it sees again and again: a resume may begin anywhere."""

    def __init__(self, step_all: bool = False) -> None:
        super().__init__()
        self.step_all = step_all
        torch.manual_seed(5)
        self.backbone, self.head = ConvBatchNorm(), nn.Linear(4, 4)
        self.trainable_at_configure: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        self.trainable_at_configure = [name for name, param in self.named_parameters() if param.requires_grad]
        params = [param for param in self.parameters() if param.requires_grad or self.step_all]
        optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(11 + self.global_rank)
        dataset = TensorDataset(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator))
        return DataLoader(dataset, 4, sampler=list(range(4)) * 3)


class Backbone(BackboneFinetuning):
    """Unfreezes the backbone in the second epoch; its BatchNorm tracks no statistics until then."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005)

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)


class Relay(BaseFinetuning):
    """In the second epoch the backbone takes over from the head, which is frozen then."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.freeze(pl_module.head)
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.005)


class Requires(pl.Callback):
    """What is trainable in each batch."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self.seen.append([name for name, param in pl_module.named_parameters() if param.requires_grad])


class Frozen(pl.Callback):
    """Freezes the backbone as a user may, without Lightning's callback."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.backbone.requires_grad_(False)


class Thawed(Frozen):
    """Unfreezes the backbone when training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.backbone.requires_grad_(True)


def resumed(callback: type[BaseFinetuning], every: dict[str, int], step: int, precision: str, folder: str) -> float:
    saves = ModelCheckpoint(folder, "at-{step}", **every, save_top_k=-1)

    def runs(*others: pl.Callback) -> pl.Trainer:
        strategy = ours(grad_dtype=torch.float32 if precision == "bf16-true" else None)
        callbacks = [callback(), *others]
        return trainer(
            strategy, max_epochs=4, callbacks=callbacks, precision=precision, enable_checkpointing=saves in others
        )

    undisturbed, whole = Tuned(), Requires()
    runs(saves, whole).fit(undisturbed)
    model, rest = Tuned(), Requires()
    runs(rest).fit(model, ckpt_path=f"{folder}/at-step={step}.ckpt")
    assert model.trainer.global_step == 12
    assert model.trainable_at_configure == undisturbed.trainable_at_configure
    assert rest.seen == whole.seen[step:]
    assert rest.seen[0] != model.trainable_at_configure, "unfrozen when it was saved"
    close_to(model, undisturbed)
    assert not torch.equal(model.backbone.norm.running_mean, Tuned().backbone.norm.running_mean)
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize(
    ("every", "step", "precision"),
    [
        ({"every_n_epochs": 2}, 6, "32-true"),
        ({"every_n_train_steps": 5}, 5, "32-true"),
        ({"every_n_train_steps": 5}, 5, "bf16-true"),
    ],
    ids=["end of an epoch", "within one", "fp32 masters"],
)
@pytest.mark.parametrize("callback", [Backbone, Relay])
def test_resumed_fine_tuning_goes_on_with_what_was_trainable(
    run_ranks: RunRanks,
    callback: type[BaseFinetuning],
    every: dict[str, int],
    step: int,
    precision: str,
    tmp_path: Any,
) -> None:
    assert run_ranks(2, resumed, callback, every, step, precision, str(tmp_path)) == [0.0, 0.0]


class Says(logging.Handler):
    """What Lightning and Python warn of and inform about."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def fit(self, runs: pl.Trainer, model: pl.LightningModule, ckpt_path: str) -> list[str]:
        """What is said, in this fit, of parameters that are frozen or trainable."""
        logger = logging.getLogger("lightning.pytorch")
        logger.addHandler(self)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.fit(model, ckpt_path=ckpt_path)
        logger.removeHandler(self)
        return [text for text in [*self.said, *(str(warning.message) for warning in caught)] if "parameter" in text]


def told(folder: str) -> list[list[str]]:
    answers = []
    for strategy, callbacks, callback in (
        (ours(), [Backbone()], Backbone()),
        (ddp(), [Backbone()], Backbone()),
        (ours(), [Thawed()], Frozen()),
    ):
        file, step_all = f"{folder}/{len(answers)}.ckpt", isinstance(callback, Frozen)
        runs = trainer(strategy, max_epochs=2, callbacks=callbacks)
        runs.fit(Tuned(step_all))
        runs.save_checkpoint(file)
        model = Tuned(step_all)
        answers.append(Says().fit(trainer(ours(), max_epochs=3, callbacks=[callback]), model, file))
        assert model.backbone.conv1.weight.requires_grad == (len(answers) == 1)
        assert largest_difference_between_ranks(model) == 0
    return answers


def test_a_resume_says_what_it_did_about_frozen_parameters(run_ranks: RunRanks, tmp_path: Any) -> None:
    first, second = run_ranks(2, told, str(tmp_path))
    assert second == [[], [], []], "said by rank 0 alone"
    parameters = "5 parameters ('backbone.conv1.weight', 'backbone.norm.weight', 'backbone.norm.bias', …) are "
    (again,), unknown, (stay,) = first
    assert again == f"Resumed fine-tuning: {parameters}trainable again, as when the checkpoint was saved"
    assert unknown == [], "a checkpoint of ddp does not say what was trainable"
    assert stay.startswith(f"{parameters}trainable when the checkpoint was saved and frozen now. No BaseFinetuning")
