"""``strategy="bucketdp"``: what it cannot do is refused before training, and says what to do instead."""

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lightning_bucketddp import BucketDPStrategy
from lightning_bucketddp.trainer.dp.step import ReplicaStep
from tests.dp import fit, one_process, replicas, samples
from tests.lightning_models import Digits, PoolEnvironment


class Plain(pl.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one node with strategy=\"bucketdp\".*found num_nodes=2"):
        one_process(2, num_nodes=2)


def test_several_processes_are_refused() -> None:
    class OfTwo(PoolEnvironment):
        def world_size(self) -> int:
            return 2

    with pytest.raises(ValueError, match=r"expected one process .* found 2 in OfTwo"):
        fit(Plain(), 2, plugins=[OfTwo()], loader=samples((8,)))


def test_the_first_device_is_the_root_device() -> None:
    devices = [torch.device("cpu"), torch.device("meta")]
    assert BucketDPStrategy(parallel_devices=devices).root_device == devices[0]


def test_synchronised_batchnorm_is_refused_and_its_layers_are_warned_of() -> None:
    with pytest.raises(ValueError, match=r"expected Trainer\(sync_batchnorm=False\)"):
        fit(Plain(), 2, sync_batchnorm=True, loader=samples((8,)))
    model = Plain(nn.Sequential(nn.SyncBatchNorm(8), nn.Linear(8, 1)))
    with pytest.warns(UserWarning, match=r"SyncBatchNorm synchronises processes, .* has one: net\.0"):
        fit(model, 2, loader=samples((8,)))


def test_compiled_modules_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"compiled model is incompatible with .* `BucketDPStrategy`"):
        fit(torch.compile(Plain(), backend="eager"), 2, loader=samples((8,)))  # by Lightning

    model = Plain()
    model.net = torch.compile(model.net, backend="eager")
    with pytest.raises(TypeError, match="submodule 'net' is"):
        fit(model, 2, loader=samples((8,)))


def test_modules_that_cannot_be_copied_are_refused_before_the_first_batch() -> None:
    class Started(Plain):
        started = False

        def on_fit_start(self) -> None:
            self.started = True

    for net, message in (
        (torch.compile(nn.Linear(8, 1), backend="eager"), "that are not compiled, found that submodule 'net' is"),
        (nn.LazyLinear(1), "expected initialised parameters, found 'net.weight' that waits for its first batch"),
    ):
        model = Started()
        model.net = net
        with pytest.raises((TypeError, ValueError), match=message):
            fit(model, 2, loader=samples((8,)))
        assert not model.started


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_steps_that_take_no_batch_or_belong_to_the_instance_are_refused() -> None:
    class TakesLoader(Plain):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    with pytest.raises(TypeError, match=r"expected a batch as argument of training_step, .* found dataloader_iter"):
        fit(TakesLoader(), 2, loader=samples((8,)))
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        model = Plain()
        setattr(model, name, lambda batch, batch_idx: None)
        with pytest.raises(TypeError, match=f"expected {name} as a method of Plain"):
            fit(model, 2, loader=samples((8,)))


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_optimizers_that_a_replica_steps_itself_are_refused(automatic: bool) -> None:
    class StepsItself(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.trainer.optimizers[0].step()
            return loss

    model = StepsItself()
    model.automatic_optimization = automatic
    trainer = one_process(2)
    with pytest.raises(RuntimeError, match=r"found SGD\.step\(\) called by a replica itself; .* by self\.optimizers"):
        trainer.fit(model, samples((8,)))
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


class Momentum(Plain):
    """Updates a copy of its net in the step itself, or after it; before or after calls that are made for all."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.key = nn.Linear(8, 1).requires_grad_(False)
        self.when = when
        self.automatic_optimization = when not in ("earlier", "later", "never")

    def update(self, when: str) -> None:
        if when == self.when:
            with torch.no_grad():
                for param, key in zip(self.net.parameters(), self.key.parameters(), strict=True):
                    key.lerp_(param, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.update("step")
        loss = (self.net(batch[0]) - self.key(batch[0])).square().mean()
        if not self.automatic_optimization:
            self.update("earlier")
            self.manual_backward(loss)
            self.optimizers().step()
            self.update("later")
            self.optimizers().step(lambda: self.manual_backward(self.net(batch[0]).square().mean()))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.update("batch end")


@pytest.mark.parametrize("when", ["step", "earlier", "later"])
def test_parameters_that_all_replicas_change_are_warned_of_once(when: str) -> None:
    with pytest.warns(UserWarning, match=r"found key\.weight, key\.bias changed by it.* on_train_batch_end") as warned:
        fit(Momentum(when), 2, loader=samples((8,)))
    assert sum("changed by it" in str(warning.message) for warning in warned) == 1
    fit(Momentum(when), loader=samples((8,)))
    fit(Momentum(when), 2, share=False, loader=samples((8,)))


@pytest.mark.parametrize("when", ["batch end", "never"])
def test_parameters_that_change_once_for_all_replicas_are_not_warned_of(when: str) -> None:
    fit(Momentum(when), 2, loader=samples((8,)))


@replicas
@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_numbers_of_which_other_replicas_shares_are_lost_are_warned_of_once(share: bool, kind: Any) -> None:
    class Counts(Plain):
        total: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.latest = kind(batch_idx)  # the same in all
            self.is_whole = len(batch[0]) == 3  # no number
            self.size = len(batch[0])  # which no step has set before
            self.total = self.total + kind(int(batch[0].sum() * 1000))
            del self.size
            if batch_idx == 3:
                setattr(self, f"size_{self.current_epoch}", len(batch[0]))
                if len(batch[0]) == 3:
                    self.mine = batch_idx  # the first replica alone
            return super().training_step(batch, batch_idx)

    model = Counts()
    model.latest = kind(-1)
    model.is_whole = True
    model.mine = 0
    model.total = kind(0)
    with pytest.warns(UserWarning, match=r'self\.total to the same number .* SumMetric, .*reduce_fx="sum"') as warned:
        fit(model, 2, share, samples((8,)))
    assert sum("the same number" in str(warning.message) for warning in warned) == 1
    model.total = kind(0)
    fit(model, 1, share, samples((8,)))


@pytest.mark.filterwarnings("ignore")  # of jsonargparse, of its own use by Lightning
def test_the_lightning_cli_takes_the_class_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's
    monkeypatch.setattr("sys.argv", ["script"])
    cli = LightningCLI(
        Digits,
        run=False,
        save_config_callback=None,
        args=[
            "--trainer.accelerator=cpu",
            "--trainer.devices=2",
            "--trainer.strategy.class_path=lightning_bucketddp.BucketDPStrategy",
            "--trainer.logger=false",
            "--seed_everything=0",
        ],
    )
    assert isinstance(cli.trainer.strategy, BucketDPStrategy)
    assert cli.trainer.strategy.root_device == torch.device("cpu")
    assert cli.trainer.num_devices == 2


def test_a_replica_that_ends_before_its_step_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    run_one = ReplicaStep._run_one

    def interrupted(self: ReplicaStep, index: int, *args: Any) -> Any:
        if index == 0:
            raise ArithmeticError
        return run_one(self, index, *args)

    monkeypatch.setattr(ReplicaStep, "_run_one", interrupted)
    with pytest.raises(ArithmeticError):
        fit(Digits(), 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]
