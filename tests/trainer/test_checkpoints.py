"""Checkpoints are ``ddp``'s: each strategy resumes what the other saved. Fine-tuning is resumed; Lightning's tuner."""

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, Sampler

from tests.lightning_models import Citizen, Regression, Relay, close_to, data, ddp, ours, scaler, trainer
from tests.models import ConvBatchNorm, batch
from tests.pool import case, on_ranks
from tests.reference import drift, logged
from tests.sampling import in_turn, some_slow

STRATEGIES: dict[str, Callable[[], Any]] = {"ours": ours, "ddp": ddp}
Options = dict[str, Any]
WAYS: dict[str, Callable[[], Options]] = {
    "accumulated": lambda: {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    "scaler": lambda: {"plugins": [scaler(64.0, growth_interval=5)]},
    "asynchronous": lambda: {"plugins": [AsyncCheckpointIO()]},
    "moving average": lambda: {"callbacks": [EMAWeightAveraging(decay=0.8)]},
}


class Scheduled(Citizen):
    """Has a scheduler, and logs nothing."""

    training_step = Regression.training_step  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(optimizer="adamw", schedule="epoch")

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


def last(runs: Any) -> dict[str, Any]:
    """What is in a checkpoint that is written now, without what tells the time or the strategy."""
    checkpoint = runs._checkpoint_connector.dump_checkpoint()
    return {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


def run(strategy: str, epochs: int, options: Options, path: str | None = None, **saves: Any) -> dict[str, Any]:
    if saves:
        options = {**options, "callbacks": [*options.get("callbacks", []), ModelCheckpoint(**saves)]}
    model = Scheduled()
    runs = trainer(STRATEGIES[strategy](), max_epochs=epochs, enable_checkpointing=bool(saves), **options)
    runs.fit(model, data(), ckpt_path=path)
    runs.strategy.barrier()  # what rank 0 writes is there now
    assert strategy == "ddp" or drift(model) == 0
    return last(runs)


@pytest.mark.parametrize(("name", "first"), some_slow(product(WAYS, STRATEGIES), in_turn([*WAYS], [*STRATEGIES])))
@on_ranks(2)
def test_either_strategy_resumes_the_others_checkpoint(name: str, first: str, tmp_path: Path) -> None:
    (second,) = STRATEGIES.keys() - {first}
    expected = run("ddp", 2, WAYS[name]())
    run(first, 1, WAYS[name](), dirpath=tmp_path, filename=name)
    torch.testing.assert_close(run(second, 2, WAYS[name](), f"{tmp_path}/{name}.ckpt"), expected)


@on_ranks(2)
def test_both_strategies_go_on_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    run("ours", 1, {}, dirpath=tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    rest = [run(strategy, 2, {}, f"{tmp_path}/step=4.ckpt") for strategy in STRATEGIES]
    torch.testing.assert_close(*rest)
    assert rest[0]["global_step"] == 12


def keys_of(value: Any) -> Any:
    return {key: keys_of(part) for key, part in value.items()} if isinstance(value, dict) else None


@on_ranks(2)
def test_a_checkpoint_has_the_keys_of_ddp(tmp_path: Path) -> None:
    for strategy in STRATEGIES:
        run(strategy, 2, {"callbacks": [Relay()]}, dirpath=tmp_path, filename=strategy + "-{epoch}", save_top_k=-1)
    keys = {}
    for path in tmp_path.iterdir():
        checkpoint = torch.load(path, weights_only=False)
        del checkpoint["callbacks"]  # names files
        keys[path.stem] = keys_of(checkpoint)
    assert keys["ours-epoch=0"] == keys["ddp-epoch=0"]
    unfrozen = keys["ours-epoch=1"].pop("bucketddp_trainable")
    assert set(unfrozen) == {"requires_grad", "track_running_stats"}
    assert keys["ours-epoch=1"] == keys["ddp-epoch=1"]


@on_ranks(2)
def test_a_checkpoint_needs_nothing_of_this_package(tmp_path: Path) -> None:
    """Reads tensors and plain values only, so that no class of the package is needed."""
    weights = ModelCheckpoint(tmp_path, "weights", save_weights_only=True, every_n_train_steps=6)
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(tmp_path, "full"), weights], "enable_checkpointing": True}
    saves = trainer(ours(grad_dtype=torch.float32), precision="bf16-true", **options)
    saves.fit(Citizen(optimizer="adamw"), data())
    saves.strategy.barrier()
    paths = [tmp_path / "full.ckpt", tmp_path / "weights.ckpt"]
    full, weights_only = (torch.load(path, weights_only=True) for path in paths)
    assert {"master_params", "state"} <= full["optimizer_states"][0].keys()
    assert sorted(weights_only) == ["epoch", "global_step", "loops", "pytorch-lightning_version", "state_dict"]
    for path, state in zip(paths, (full, weights_only), strict=True):
        module = Citizen.load_from_checkpoint(path, weights_only=True, map_location="cpu")
        torch.testing.assert_close(dict(module.state_dict()), state["state_dict"], check_dtype=False, rtol=0, atol=0)
    runs = trainer("auto", devices=1, precision="bf16-true", max_epochs=2)
    runs.fit(Citizen(optimizer="adamw"), data(), ckpt_path=paths[0])
    assert runs.global_step == 12
    assert len(runs.optimizers[0].state) == 8


@on_ranks(2)
def test_a_search_for_the_learning_rate_leaves_masters_alone(tmp_path: Path) -> None:
    def found(strategy: Any, **options: Any) -> tuple[Regression, Any]:
        model = Regression(optimizer="adamw")
        runs = trainer(strategy, default_root_dir=tmp_path, **options)
        # It looks for the steepest of the losses from the 11th on.
        finder = Tuner(runs).lr_find(model, data(15), num_training=15, early_stop_threshold=None)
        runs.fit(model, data(3))
        return model, finder.results

    (first, searched), (second, expected) = found(ours()), found(ddp())
    torch.testing.assert_close(searched, expected)
    close_to(first, second)
    assert first.lr == pytest.approx(second.lr) != Regression.lr
    model, _ = found(ours(grad_dtype=torch.float32), precision="bf16-true")
    plain = Regression(optimizer="adamw")
    plain.lr = model.lr
    trainer(ours(grad_dtype=torch.float32), precision="bf16-true").fit(plain, data(3))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


class Tuned(Regression):
    """A backbone with BatchNorm. A rank has one batch that it sees again and again: a resume may begin anywhere."""

    def __init__(self, step_all: bool = False) -> None:
        super().__init__()
        self.step_all = step_all
        self.backbone, self.net = ConvBatchNorm(), nn.Linear(4, 4)
        self.trainable_at_configure: list[str] = []
        self.trainable: list[list[str]] = []

    def _trainable(self) -> list[str]:
        return [name for name, param in self.named_parameters() if param.requires_grad]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainable.append(self._trainable())
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        self.trainable_at_configure = self._trainable()
        params = [param for param in self.parameters() if param.requires_grad or self.step_all]
        optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> Any:
        return DataLoader([batch(0, self.global_rank)] * 3, batch_size=None)


class Backbone(BackboneFinetuning):
    """Unfreezes the backbone in the second epoch; its BatchNorm tracks no statistics until then."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005)

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)


class Frozen(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.backbone.requires_grad_(False)


class Thawed(Frozen):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.backbone.requires_grad_(True)


@on_ranks(2)
def test_resumed_fine_tuning_continues_with_the_trainable_parameters(tmp_path: Any) -> None:
    for every, step, precision in [({"every_n_epochs": 2}, 6, "32-true"), ({"every_n_train_steps": 5}, 5, "bf16-true")]:
        with case(precision):
            fits: dict[str, Any] = {"max_epochs": 4, "precision": precision}
            masters = torch.float32 if precision == "bf16-true" else None
            whole, model, new = Tuned(), Tuned(), Tuned()
            callbacks = [Backbone(), ModelCheckpoint(f"{tmp_path}/{precision}", "at-{step}", **every, save_top_k=-1)]
            trainer(ours(grad_dtype=masters), callbacks=callbacks, enable_checkpointing=True, **fits).fit(whole)
            runs = trainer(ours(grad_dtype=masters), callbacks=[Backbone()], **fits)
            runs.fit(model, ckpt_path=f"{tmp_path}/{precision}/at-step={step}.ckpt")
            assert runs.global_step == 12
            assert model.trainable_at_configure == whole.trainable_at_configure
            assert model.trainable == whole.trainable[step:]
            assert model.trainable[0] != model.trainable_at_configure, "unfrozen when it was saved"
            close_to(model, whole)
            assert not torch.equal(model.backbone.norm.running_mean, new.backbone.norm.running_mean)
            assert not torch.equal(model.backbone.conv1.weight, new.backbone.conv1.weight)
            assert drift(model) == 0


PARAMETERS = "5 parameters ('backbone.conv1.weight', 'backbone.norm.weight', 'backbone.norm.bias', ...) are trainable "
RESUMED = f"Resumed fine-tuning: {PARAMETERS}again, as when the checkpoint was saved"
FROZEN = f"{PARAMETERS}when the checkpoint was saved and frozen now. No BaseFinetuning"


@on_ranks(2)
def test_a_resume_says_what_it_does_about_frozen_parameters(tmp_path: Any) -> None:
    resumes = [
        (ours(), Backbone(), Backbone(), [RESUMED]),
        (ddp(), Backbone(), Backbone(), []),  # whose checkpoint does not say what was trainable
        (ours(), Thawed(), Frozen(), [FROZEN]),
    ]
    for at, (strategy, before, after, words) in enumerate(resumes):
        path, step_all = f"{tmp_path}/{at}.ckpt", isinstance(after, Frozen)
        runs = trainer(strategy, max_epochs=2, callbacks=[before])
        runs.fit(Tuned(step_all))
        runs.save_checkpoint(path)
        model = Tuned(step_all)
        with logged("lightning.pytorch") as said, warnings.catch_warnings(record=True, action="always") as caught:
            trainer(ours(), max_epochs=3, callbacks=[after]).fit(model, ckpt_path=path)
        texts = [text for text in [*said, *(str(warning.message) for warning in caught)] if "parameter" in text]
        words = words if dist.get_rank() == 0 else []
        assert [text.startswith(word) for text, word in zip(texts, words, strict=True)] == [True] * len(words), texts
        assert model.backbone.conv1.weight.requires_grad == (at == 0)


class Ordered(pl.LightningModule):
    """Notes the samples of each batch."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.asks, self.taken = nn.Linear(1, 1), asks, list[tuple[int, list[float]]]()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.taken.append((self.current_epoch, batch.flatten().tolist()))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:  # Lightning makes the dataloader before it loads the progress
            assert self.trainer.estimated_stepping_batches
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


AT_EPOCHS: dict[str, tuple[Options, Options]] = {
    "the epoch's end": ({"save_on_train_epoch_end": True}, {}),
    "the validation's end": ({}, {"validates": True}),
    "the last batch": ({"every_n_train_steps": 4}, {}),
    "a module that asks for the number of steps": ({}, {"asks": True}),
    "persistent workers": ({}, {"persistent_workers": True}),
    "no workers": ({}, {"num_workers": 0}),
    "a sampler of the user's": ({}, {"sampler": True}),
}


class Shifted(Sampler[int]):
    """Has an order for each epoch, and does not say which epoch that is."""

    _first = 0

    def set_epoch(self, epoch: int) -> None:
        self._first = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self._first + 5 * at) % 16 for at in range(8)])

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("name", "shard"),
    some_slow(
        product(AT_EPOCHS, [False, True]),
        [("the epoch's end", False), ("a module that asks for the number of steps", True)],
    ),
)
@on_ranks(2)
def test_a_resumed_run_takes_the_samples_of_its_epochs(name: str, shard: bool, tmp_path: Path) -> None:
    saves, options = AT_EPOCHS[name]
    asks, validates = options.get("asks", False), options.get("validates", False)
    workers = {"num_workers": 1, **{key: value for key, value in options.items() if key in _OF_WORKERS}}

    def run_to(epochs: int, folder: Path, path: Path | None = None) -> Ordered:
        model = Ordered(asks)
        callbacks = ModelCheckpoint(folder, save_last=True, **saves)
        order: Options = {"sampler": Shifted()} if "sampler" in options else {"shuffle": True}
        loader = DataLoader(torch.linspace(0, 1, 16)[:, None], 2, **order, **workers)
        strategy = ours(shard_optimizer=shard)
        more = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
        more["use_distributed_sampler"] = "sampler" not in options
        fit = trainer(strategy, max_epochs=epochs, callbacks=callbacks, **more)
        fit.fit(model, loader, DataLoader(torch.ones(4, 1), 2) if validates else None, ckpt_path=path)
        dist.barrier()  # what rank 0 writes is there now
        return model

    whole = run_to(3, tmp_path / "whole")
    first = run_to(1, tmp_path / "parts")
    second = run_to(3, tmp_path / "parts", tmp_path / "parts" / "last.ckpt")
    assert first.taken + second.taken == whole.taken
    assert len({str(taken) for _, taken in whole.taken}) > 4, "epochs have orders of their own"
    assert all(map(torch.equal, second.parameters(), whole.parameters()))


_OF_WORKERS = ("num_workers", "persistent_workers")
