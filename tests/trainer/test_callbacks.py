"""Lightning's tuner with ``BucketDDPStrategy``, and fine-tuning that is resumed."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning_models import Citizen, close_to, data, ddp, ours, trainer
from tests.models import ConvBatchNorm
from tests.pool import RunRanks, case, on_ranks
from tests.reference import largest_difference_between_ranks


class Rated(Citizen):
    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


@on_ranks(2)
def test_a_search_for_the_learning_rate_leaves_masters_alone(tmp_path: Path) -> None:
    def found(strategy: Any, **options: Any) -> tuple[Rated, Any]:
        model = Rated()
        runs = trainer(strategy, default_root_dir=tmp_path, **options)
        finder = Tuner(runs).lr_find(model, data(20), num_training=20, early_stop_threshold=None)
        runs.fit(model, data())
        return model, finder.results

    (first, searched), (second, expected) = found(ours()), found(ddp())
    assert searched["lr"]
    torch.testing.assert_close(searched, expected)
    close_to(first, second)
    assert first.lr == pytest.approx(second.lr)
    assert first.lr != 0.02, "something was found"

    low: dict[str, Any] = {"precision": "bf16-true"}
    model, _ = found(ours(grad_dtype=torch.float32), **low)
    plain = Rated(model.lr)
    trainer(ours(grad_dtype=torch.float32), **low).fit(plain, data())
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


class Tuned(pl.LightningModule):
    """A backbone with BatchNorm. A rank has one batch that it sees again and again: a resume may begin anywhere."""

    def __init__(self, step_all: bool = False) -> None:
        super().__init__()
        self.step_all = step_all
        torch.manual_seed(5)
        self.backbone, self.head = ConvBatchNorm(), nn.Linear(4, 4)
        self.trainable_at_configure: list[str] = []
        self.trainable: list[list[str]] = []

    def _trainable(self) -> list[str]:
        return [name for name, param in self.named_parameters() if param.requires_grad]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.trainable.append(self._trainable())
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        self.trainable_at_configure = self._trainable()
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


class Frozen(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.backbone.requires_grad_(False)


class Thawed(Frozen):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.backbone.requires_grad_(True)


RESUMES: list[tuple[type[BaseFinetuning], dict[str, int], int, str]] = [
    (Backbone, {"every_n_epochs": 2}, 6, "32-true"),
    (Relay, {"every_n_train_steps": 5}, 5, "32-true"),
    (Backbone, {"every_n_train_steps": 5}, 5, "bf16-true"),
]


@on_ranks(2)
def test_resumed_fine_tuning_continues_with_the_trainable_parameters(tmp_path: Any) -> None:
    for at, (callback, every, step, precision) in enumerate(RESUMES):
        with case((callback.__name__, precision)):
            saves = ModelCheckpoint(f"{tmp_path}/{at}", "at-{step}", **every, save_top_k=-1)
            fits: dict[str, Any] = {"max_epochs": 4, "precision": precision}
            masters = torch.float32 if precision == "bf16-true" else None
            whole, model = Tuned(), Tuned()
            callbacks = [callback(), saves]
            trainer(ours(grad_dtype=masters), callbacks=callbacks, enable_checkpointing=True, **fits).fit(whole)
            runs = trainer(ours(grad_dtype=masters), callbacks=[callback()], **fits)
            runs.fit(model, ckpt_path=f"{tmp_path}/{at}/at-step={step}.ckpt")
            assert runs.global_step == 12
            assert model.trainable_at_configure == whole.trainable_at_configure
            assert model.trainable == whole.trainable[step:]
            assert model.trainable[0] != model.trainable_at_configure, "unfrozen when it was saved"
            close_to(model, whole)
            assert not torch.equal(model.backbone.norm.running_mean, Tuned().backbone.norm.running_mean)
            assert not torch.equal(model.backbone.conv1.weight, Tuned().backbone.conv1.weight)
            assert largest_difference_between_ranks(model) == 0


def said_in(fit: Callable[[], None]) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    logger.removeHandler(handler)
    return [text for text in [*said, *(str(warning.message) for warning in caught)] if "parameter" in text]


def told(folder: str) -> list[list[str]]:
    answers = []
    for strategy, before, after in (
        (ours(), Backbone(), Backbone()),
        (ddp(), Backbone(), Backbone()),
        (ours(), Thawed(), Frozen()),
    ):
        path, step_all = f"{folder}/{len(answers)}.ckpt", isinstance(after, Frozen)
        runs = trainer(strategy, max_epochs=2, callbacks=[before])
        runs.fit(Tuned(step_all))
        runs.save_checkpoint(path)
        model, again = Tuned(step_all), trainer(ours(), max_epochs=3, callbacks=[after])
        answers.append(said_in(lambda model=model, again=again, path=path: again.fit(model, ckpt_path=path)))
        assert model.backbone.conv1.weight.requires_grad == (len(answers) == 1)
    return answers


def test_a_resume_says_what_it_does_about_frozen_parameters(run_ranks: RunRanks, tmp_path: Any) -> None:
    first, second = run_ranks(2, told, str(tmp_path))
    assert second == [[], [], []], "said by rank 0 alone"
    parameters = "5 parameters ('backbone.conv1.weight', 'backbone.norm.weight', 'backbone.norm.bias', …) are "
    (again,), of_ddp, (stay,) = first
    assert again == f"Resumed fine-tuning: {parameters}trainable again, as when the checkpoint was saved"
    assert of_ddp == [], "a checkpoint of ddp does not say what was trainable"
    assert stay.startswith(f"{parameters}trainable when the checkpoint was saved and frozen now. No BaseFinetuning")
