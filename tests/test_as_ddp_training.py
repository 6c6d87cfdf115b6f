"""What Lightning's own tests ask of ``ddp`` while it trains on two ranks, asked of ``bucketddp`` too.

Each job takes the strategy's name. What ``ddp`` gives is the reference: the same test passes with it, or its record is
what ours is compared with.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.lightning_models import Regression, data, strategy_of, trainer
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]

both = pytest.mark.parametrize("kind", ["ddp", "bucketddp"])


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# -- the order of things -----------------------------------------------------------------------------


class Recorder(Regression):
    """Notes each hook of its own: its name, whether the module is wrapped, and how many gradients there are."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, bool, int]] = []

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        hooks = ("on_", "setup", "teardown", "configure_", "training_step", "validation_step", "test_step", "backward")
        hooks += ("optimizer_", "lr_scheduler_step", "predict_step", "prepare_data", "transfer_batch_to_device")
        if not name.startswith(hooks) or not callable(value) or not hasattr(pl.LightningModule, name):
            return value

        def noted(*args: Any, **kwargs: Any) -> Any:
            wrapped = self._trainer is not None and self._trainer.strategy.model is not self
            if wrapped:
                assert self._trainer.strategy.model.module is self._trainer.lightning_module is self
                assert self._trainer.model is self._trainer.strategy.model
            self.events.append((name, wrapped, sum(param.grad is not None for param in self.parameters())))
            return value(*args, **kwargs)

        noted.__wrapped__ = value  # Lightning looks at signatures
        return noted

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def events(accumulate: int) -> list[list[tuple[str, bool, int]]]:
    found = []
    for kind in ("ddp", "bucketddp"):
        model = Recorder()
        runs = trainer(strategy_of(kind), max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
        runs.fit(model, data(2), data(1))
        runs.validate(model, data(1), verbose=False)
        runs.test(model, data(1), verbose=False)
        runs.predict(model, data(1))
        found.append(list(model.events))
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_come_in_the_same_order_and_find_the_same(run_ranks: RunRanks, accumulate: int) -> None:
    for expected, found in run_ranks(2, events, accumulate):
        assert found == expected
        assert ("configure_optimizers", True, 0) in found
        assert ("on_after_backward", True, 8) in found
        assert {wrapped for name, wrapped, _ in found if name == "validation_step"} == {True, False}
        assert {wrapped for name, wrapped, _ in found if name in ("test_step", "predict_step")} == {False}
        assert [name for name, _, _ in found].count("optimizer_step") == 4 // accumulate


# -- the same weights --------------------------------------------------------------------------------


class Contrastive(Regression):
    """Each rank compares its outputs with those of all ranks, so that backward has collectives of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = nn.functional.normalize(self.net(batch[0]), dim=-1)
        others = self.all_gather(outputs, sync_grads=True).flatten(0, 1)
        targets = torch.arange(len(outputs)) + self.global_rank * len(outputs)
        return nn.functional.cross_entropy(outputs @ others.T, targets)


class Manual(Regression):
    """Accumulates by hand, steps with a closure and schedules by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = super(Manual, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if batch_idx % 3 == 0:
            with self.trainer.model.no_sync():
                self.manual_backward(super().training_step(batch, batch_idx))
        elif batch_idx % 3 == 1:
            closure()
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.step(closure)
            optimizer.zero_grad()
            self.lr_schedulers().step()
            self.steps += 1

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Zero(Regression):
    """An optimizer that keeps its state in shards, and a checkpoint that has all of it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)


class MadeInConfigureModel(Regression):
    """Its layers do not exist before the strategy is there."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("cpu"):
                self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Ignoring(Regression):
    """A module buffer that is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mine", torch.tensor(float(dist.get_rank())))
        self.register_buffer("everybodys", torch.tensor(float(dist.get_rank())))
        self._ddp_params_and_buffers_to_ignore = ["mine"]

    def on_train_end(self) -> None:
        assert (self.mine, self.everybodys) == (dist.get_rank(), 0)
        self.mine.zero_()


class Penalised(Regression):
    """Differentiates its own gradient, and returns more than a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        inputs = batch[0].clone().requires_grad_()
        outputs = self.net(inputs)
        (slope,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        return {"loss": nn.functional.mse_loss(outputs, batch[1]) + slope.square().mean(), "slope": slope.detach()}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        assert outputs["slope"].shape == (4, 8)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class Twice(Regression):
    """Two backwards through one graph without `zero_grad` between them, then steps within one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(2 * loss)
        optimizer.step()
        for part in range(2):  # as in truncated backpropagation through time
            optimizer.zero_grad()
            self.manual_backward(super().training_step([half.chunk(2)[part] for half in batch], batch_idx))
            optimizer.step()


MODELS = [Contrastive, Manual, Zero, MadeInConfigureModel, Ignoring, Penalised, Twice]


def trained_with_both(name: str, folder: str) -> tuple[float, list[str]]:
    found = []
    for kind in ("ddp", "bucketddp"):
        torch.manual_seed(3)
        model = globals()[name]()
        runs = trainer(strategy_of(kind), max_epochs=2)
        runs.fit(model, data())
        path = f"{folder}/{kind}.ckpt"
        runs.save_checkpoint(path)
        found.append((model, torch.load(path, weights_only=False)))
    (theirs, their_checkpoint), (ours, our_checkpoint) = found
    torch.testing.assert_close(weights(ours), weights(theirs))
    assert our_checkpoint["state_dict"].keys() == their_checkpoint["state_dict"].keys()
    assert our_checkpoint["loops"] == their_checkpoint["loops"]
    torch.testing.assert_close(our_checkpoint["optimizer_states"], their_checkpoint["optimizer_states"])
    assert getattr(ours, "steps", None) == getattr(theirs, "steps", None)
    other_keys = our_checkpoint.keys() ^ their_checkpoint.keys()  # what ours adds bears its name
    return largest_difference_between_ranks(ours), sorted(key for key in other_keys if not key.startswith("bucketddp"))


@pytest.mark.parametrize("model", MODELS)
def test_the_same_weights_and_checkpoints(run_ranks: RunRanks, model: type, tmp_path: Any) -> None:
    assert run_ranks(2, trained_with_both, model.__name__, str(tmp_path)) == [(0.0, [])] * 2


class Evaluating(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.training_step(batch, batch_idx), sync_dist=True)


FLAGS: list[dict[str, Any]] = [
    {"barebones": True},
    {"detect_anomaly": True},
    {"deterministic": True, "profiler": "simple"},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"inference_mode": False, "val_check_interval": 2, "num_sanity_val_steps": 2},
    {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2},
    {"max_epochs": -1, "max_steps": 7},
    {"fast_dev_run": 2},
]


def with_flags(flags: dict[str, Any]) -> float:
    found = []
    for kind in ("ddp", "bucketddp"):
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), None)
        model = Evaluating()
        runs = trainer(strategy_of(kind), **{"max_epochs": 2, **(quiet if "barebones" in flags else {}), **flags})
        runs.fit(model, data(), data(2))
        torch.use_deterministic_algorithms(False)
        found.append((model, runs.global_step, dict(runs.callback_metrics)))
    (theirs, their_steps, their_metrics), (ours, our_steps, our_metrics) = found
    torch.testing.assert_close(weights(ours), weights(theirs))
    torch.testing.assert_close(our_metrics, their_metrics)
    assert our_steps == their_steps > 0
    return largest_difference_between_ranks(ours)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags))
def test_the_trainers_flags_do_the_same(run_ranks: RunRanks, flags: dict[str, Any]) -> None:
    assert run_ranks(2, with_flags, flags) == [0.0, 0.0]


# -- model averaging -------------------------------------------------------------------------------

START, PERIOD = 2, 3


def local_state() -> PostLocalSGDState:
    """From step ``START`` on, each rank is a subgroup of its own: gradients are not averaged any more."""
    return PostLocalSGDState(None, dist.new_subgroups(group_size=1)[0], START)


class Apart(pl.Callback):
    """After which steps the ranks held the same weights."""

    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.same.append(largest_difference_between_ranks(module) == 0)


def averaged_now_and_then() -> list[bool]:
    """`ddp` ignores communication hooks on CPU, so what it would do is spelled out."""
    alone = Regression()
    wrapped = DistributedDataParallel(alone.net)
    wrapped.register_comm_hook(local_state(), post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=START)
    optimizer = alone.configure_optimizers()
    for inputs, target in data(8):
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), target).backward()
        optimizer.step()
        averager.average_parameters(alone.parameters())

    model, apart = Regression(), Apart()
    strategy = strategy_of(
        "bucketddp", ddp_comm_state=local_state(), ddp_comm_hook=post_localSGD_hook, model_averaging_period=PERIOD
    )
    trainer(strategy, callbacks=[apart]).fit(model, data(8))
    torch.testing.assert_close(weights(model), weights(alone))
    return apart.same


def test_models_are_averaged_as_post_local_sgd_has_it(run_ranks: RunRanks) -> None:
    for same in run_ranks(2, averaged_now_and_then):
        assert same == [True] * 3 + [False] * 2 + [True] + [False] * 2


def averaging_with_a_sharded_optimizer(kind: str) -> str:
    options = {"ddp_comm_state": local_state(), "ddp_comm_hook": post_localSGD_hook, "model_averaging_period": PERIOD}
    with pytest.raises(ValueError, match="model averaging cannot work with a distributed optimizer") as error:
        trainer(strategy_of(kind, **options)).fit(Zero(), data())
    return str(error.value)


@both
def test_model_averaging_refuses_a_sharded_optimizer(run_ranks: RunRanks, kind: str) -> None:
    assert all(
        "ZeroRedundancyOptimizer" in message for message in run_ranks(2, averaging_with_a_sharded_optimizer, kind)
    )
