"""``strategy="bucketdp"``: a Trainer with several devices in one process does what it does with one device."""

import gc
import re
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDPStrategy
from tests.dp import Digits, Plain, close, digits, fit, one_process, replicas, samples
from tests.lightning_models import Memory, close_to


def trained(devices: int, share: bool, module: Callable[[], Digits] = Digits, **options: Any) -> tuple[Any, pl.Trainer]:
    options = {key: option() if callable(option) else option for key, option in options.items()}
    model = module()
    return model, fit(model, devices, share, logger=Memory(), log_every_n_steps=1, **options)


class Lbfgs(Digits):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Skipping(Digits):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else output


class Scheduled(Digits):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "valid"}}


def finetuning() -> list[pl.Callback]:
    thaw = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3, verbose=False)
    return [thaw, pl.callbacks.EarlyStopping("valid", patience=0, min_delta=10.0)]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("share", "module", "options"),
    [
        (True, Digits, {"overfit_batches": 2, "num_sanity_val_steps": 0}),
        (False, Digits, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
        (False, Digits, {"callbacks": lambda: [EMAWeightAveraging(decay=0.8), LearningRateMonitor()]}),
        (False, Digits, {"callbacks": finetuning, "max_epochs": 4}),
        (True, Lbfgs, {"precision": "64-true"}),
        (True, Skipping, {}),
        (False, Scheduled, {"limit_val_batches": 1, "val_check_interval": 2}),
        (True, Scheduled, {}),
    ],
)
def test_training_is_as_on_one_device(share: bool, module: Any, options: dict[str, Any]) -> None:
    expected, expected_trainer = trained(1, share, module, **options)
    found, trainer = trained(2, share, module, **options)
    close_to(found, expected)
    assert trainer.global_step == expected_trainer.global_step > 0
    close(trainer.logger.logged, expected_trainer.logger.logged)
    assert {"f1_step", "MulticlassF1Score"} <= {name for _, metrics in trainer.logger.logged for name in metrics}
    close(trainer.callback_metrics, expected_trainer.callback_metrics)
    close(found.seen, expected.seen)
    close(found.kept, expected.kept)
    assert found.kept
    assert module is Scheduled or any("ratio" in outputs for outputs in found.seen)


@replicas
def test_evaluation_and_prediction_are_as_on_one_device(share: bool) -> None:
    model = Digits()
    expected, found = one_process(), one_process(3, share)
    for stage in ("validate", "test"):
        close(*(getattr(runs, stage)(model, digits(), verbose=False) for runs in (found, expected)))
    predictions = found.predict(model, digits())
    close(predictions, expected.predict(model, digits()))
    assert [len(batch["class"]) for batch in predictions] == [6, 6, 6, 5]


class Watched(Digits):
    """Notes the dtypes of its predictions, in a class attribute as replicas have their own of others."""

    dtypes: list[torch.dtype]

    def forward(self, x: Tensor) -> Tensor:
        predictions = super().forward(x)
        self.dtypes.append(predictions.dtype)
        return predictions.float()


@pytest.mark.parametrize(("precision", "share"), [("bf16-mixed", True), ("bf16-true", False)])
def test_lower_precision_reaches_all_replicas(precision: Any, share: bool) -> None:
    Watched.dtypes = []
    expected, _ = trained(1, share, Watched, precision=precision)
    found, _ = trained(2, share, Watched, precision=precision)
    for value, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert value.dtype is other.dtype
        close(value, other, rtol=0.1, atol=0.03)
    for stage in ("validate", "test", "predict"):
        getattr(one_process(2, precision=precision), stage)(Watched(), digits())
    assert set(Watched.dtypes) == {torch.bfloat16}


def test_data_and_devices_of_other_kinds() -> None:
    expected, single = Digits(), Digits()
    fit(expected)
    fit(single, loader=digits(count=7, batch_size=1))
    for devices, loader, wanted in (
        (2, DataLoader(list(digits()), batch_size=None), expected),
        (1, digits(), expected),
        (5, digits(), expected),
        (2, digits(count=7, batch_size=1), single),  # nothing to split
    ):
        model = Digits()
        assert isinstance(fit(model, devices, loader=loader, strategy="bucketdp").strategy, BucketDPStrategy)
        close_to(model, wanted)


def test_checkpoints_are_those_of_one_device(tmp_path: Path) -> None:
    def saved(devices: int, name: str, resume: Path | None = None, **options: Any) -> tuple[Digits, Path]:
        model = Digits()
        callback = pl.callbacks.ModelCheckpoint(tmp_path / "checkpoints", filename=name)
        trainer = one_process(devices, False, enable_checkpointing=True, callbacks=[callback], **options)
        trainer.fit(model, digits(), digits(count=13), ckpt_path=resume, weights_only=False)
        return model, Path(shutil.move(callback.best_model_path, tmp_path))

    expected, whole = saved(1, "one device")
    _, half_of_one = saved(1, "first half on one", max_epochs=1)
    _, half_of_two = saved(2, "first half on two", max_epochs=1)
    on_two, of_both = saved(2, "second half on two", half_of_one)
    on_one, _ = saved(1, "second half on one", half_of_two)
    close_to(on_two, expected)
    close_to(on_one, expected)
    of_one, of_two = (torch.load(path, weights_only=False) for path in (whole, of_both))
    close(of_two["state_dict"], of_one["state_dict"])
    close(of_two["optimizer_states"], of_one["optimizer_states"])
    assert of_two.keys() == of_one.keys()


class Attributes(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        self.center = self.center * 0.5 + batch[0].mean(0)
        return super().training_step(batch, batch_idx)


@replicas
def test_module_buffers_are_the_first_replicas_and_attributes_are_gone(share: bool) -> None:
    loader, model, center = samples((8,), count=12), Attributes(), torch.zeros(8)
    fit(model, 2, share, loader, max_epochs=1)
    for (batch,) in loader:
        center = center * 0.5 + batch[:3].mean(0)
    close(model.center, center)
    assert model.count == 0


def test_replicas_of_another_device_run_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Placed(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.add((threading.current_thread() is threading.main_thread(), self.device))
            return super().training_step(batch, batch_idx)

    seen: set[tuple[bool, torch.device]] = set()
    expected, expected_trainer = trained(1, True)
    for file in ("scatter_gather", "apply"):  # which take the second for the first else
        monkeypatch.setattr(f"lightning_bucketddp.replicas.{file}.as_device", torch.device)
    home, other = torch.device("cpu"), torch.device("cpu", 0)
    found, trainer = trained(2, True, Placed, strategy=BucketDPStrategy(parallel_devices=[home, other]))
    assert seen == {(True, home), (False, other)}
    close_to(found, expected)
    close(trainer.callback_metrics, expected_trainer.callback_metrics)


def test_there_is_one_rank_and_nothing_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            modules.append(self)
            self.print(f"batch {batch_idx}")
            return super().training_step(batch, batch_idx)

    before, model, modules = threading.active_count(), Talking(), []
    trainer = one_process(2, strategy="bucketdp", max_epochs=1)
    assert (trainer.world_size, trainer.is_global_zero, trainer.num_devices) == (1, True, 2)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, digits(), digits(count=13))
        assert threading.active_count() == before
        assert not dist.is_initialized()
        assert not vars(model).keys() & {"log", "log_dict", "print", "all_gather"}, "the module is left as it was"
        printed = re.findall(r"^batch \d", capsys.readouterr().out, re.MULTILINE)
        assert printed == [f"batch {index}" for index in range(4)], "once each"
        assert len({id(module) for module in modules[-8:]}) == 2, "replicas are kept between steps"
    assert len(modules) == 16


@replicas
def test_steps_that_have_ended_are_let_go_without_garbage_collection(share: bool) -> None:
    class Counted(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            shards.extend(map(weakref.ref, (batch[0], output["loss"])))
            return output["loss"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            left.extend(ref() for ref in shards)

    shards: list[Any] = []
    left: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        fit(Counted(), 2, share, digits(count=36), max_epochs=1)
    finally:
        gc.enable()
    assert len(left) > 24
    assert set(left) == {None}
