"""What Lightning's own tests ask of ``ddp`` on two ranks, asked of ``bucketddp``: hooks, models, flags, early ends."""

import os
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.lightning_models import Regression, data, ddp, ours, trainer
from tests.reference import largest_difference_between_ranks
from tests.trainer.cases import case

RunRanks = Callable[..., list[Any]]


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


def events() -> None:
    found = []
    for strategy in (ddp(), ours()):
        model = Recorder()
        runs = trainer(strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0)
        runs.fit(model, data(2), data(1))
        runs.validate(model, data(1), verbose=False)
        runs.test(model, data(1), verbose=False)
        runs.predict(model, data(1))
        found.append(list(model.events))
    assert found[0] == found[1]
    assert {("configure_optimizers", True, 0), ("on_after_backward", True, 8)} <= set(found[1])
    wrapped = {hook: {w for name, w, _ in found[1] if name == hook} for hook in ("validation_step", "predict_step")}
    assert wrapped == {"validation_step": {True, False}, "predict_step": {False}}
    assert [name for name, _, _ in found[1]].count("optimizer_step") == 2


def test_hooks_come_in_the_same_order_and_find_the_same(run_ranks: RunRanks) -> None:
    run_ranks(2, events)


# -- models and flags --------------------------------------------------------------------------------


class Contrastive(Regression):
    """Each rank compares its outputs with those of all ranks, so that backward has collectives of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = nn.functional.normalize(self.net(batch[0]), dim=-1)
        others = self.all_gather(outputs, sync_grads=True).flatten(0, 1)
        targets = torch.arange(len(outputs)) + self.global_rank * len(outputs)
        return nn.functional.cross_entropy(outputs @ others.T, targets)


class Manual(Regression):
    """Accumulates by hand, steps with a closure, twice through one graph and in parts, and schedules by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss_of = self.optimizers(), super().training_step
        if batch_idx % 3 == 0:
            with self.trainer.model.no_sync():
                self.manual_backward(loss_of(batch, batch_idx))
            return
        if batch_idx % 3 == 1:
            loss = loss_of(batch, batch_idx)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(2 * loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
        else:
            optimizer.step(lambda: self.manual_backward(loss_of(batch, batch_idx)))
            self.lr_schedulers().step()
        for part in range(2):  # as in truncated backpropagation through time
            optimizer.zero_grad()
            self.manual_backward(loss_of([half.chunk(2)[part] for half in batch], batch_idx))
            optimizer.step()
        optimizer.zero_grad()

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
    """Differentiates its own gradient, overrides ``backward`` and returns more than a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        inputs = batch[0].clone().requires_grad_()
        outputs = self.net(inputs)
        (slope,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        return {"loss": nn.functional.mse_loss(outputs, batch[1]) + slope.square().mean(), "slope": slope.detach()}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        assert outputs["slope"].shape == (4, 8)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


MODELS = [Contrastive, Manual, Zero, MadeInConfigureModel, Ignoring, Penalised]


def models(folder: str) -> None:
    for make in MODELS:
        with case(make.__name__):
            found = []
            for kind, strategy in (("ddp", ddp()), ("ours", ours())):
                torch.manual_seed(3)
                model, path = make(), f"{folder}/{make.__name__}-{kind}.ckpt"
                runs = trainer(strategy, max_epochs=2)
                runs.fit(model, data(3))
                runs.save_checkpoint(path)
                found.append((model.state_dict(), torch.load(path, weights_only=False)))
            (theirs, expected), (state, checkpoint) = found
            torch.testing.assert_close(state, theirs)
            assert checkpoint["loops"] == expected["loops"]
            torch.testing.assert_close(checkpoint["optimizer_states"], expected["optimizer_states"])
            assert not {key for key in checkpoint.keys() ^ expected.keys() if not key.startswith("bucketddp")}
            assert largest_difference_between_ranks(model) == 0


def test_models_train_to_the_same_weights_and_checkpoints(run_ranks: RunRanks, tmp_path: Any) -> None:
    run_ranks(2, models, str(tmp_path))


class Evaluating(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.training_step(batch, batch_idx), sync_dist=True)


FLAGS: list[dict[str, Any]] = [
    {"barebones": True},
    {"detect_anomaly": True, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"deterministic": True, "profiler": "simple", "inference_mode": False, "val_check_interval": 2},
    {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2, "max_epochs": -1, "max_steps": 7},
    {"fast_dev_run": 2},
]


def flags() -> None:
    for options in FLAGS:
        with case(options):
            found = []
            for strategy in (ddp(), ours()):
                quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
                unset = dict.fromkeys(quiet, None) if "barebones" in options else {}
                model, runs = Evaluating(), trainer(strategy, **{"max_epochs": 2, **unset, **options})
                runs.fit(model, data(), data(2))
                torch.use_deterministic_algorithms(False)
                found.append((model.state_dict(), dict(runs.callback_metrics), runs.global_step))
            torch.testing.assert_close(found[1], found[0])
            assert runs.global_step > 0
            assert largest_difference_between_ranks(model) == 0


def test_the_trainers_flags_do_the_same(run_ranks: RunRanks) -> None:
    run_ranks(2, flags)


# -- model averaging ---------------------------------------------------------------------------------

START, PERIOD = 2, 3


class Apart(pl.Callback):
    """After which steps the ranks held the same weights."""

    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.same.append(largest_difference_between_ranks(module) == 0)


def averaged_now_and_then() -> None:
    """`ddp` ignores communication hooks on CPU, so what it would do is spelled out."""

    def local_state() -> PostLocalSGDState:
        return PostLocalSGDState(None, dist.new_subgroups(group_size=1)[0], START)  # each rank is a subgroup

    def averaging() -> Any:
        return ours(ddp_comm_state=local_state(), ddp_comm_hook=post_localSGD_hook, model_averaging_period=PERIOD)

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
    trainer(averaging(), callbacks=[apart]).fit(model, data(8))
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    assert apart.same == [True] * 3 + [False] * 2 + [True] + [False] * 2
    with pytest.raises(ValueError, match="model averaging cannot work with a distributed optimizer"):
        trainer(averaging()).fit(Zero(), data())


def test_models_are_averaged_as_post_local_sgd_has_it(run_ranks: RunRanks) -> None:
    run_ranks(2, averaged_now_and_then)


# -- without training, and when it ends early --------------------------------------------------------


def evaluated() -> None:
    class OfRank(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.strategy.model is self, "not wrapped where there are no gradients"

        test_step = predict_step = validation_step

    for stage in ("validate", "test", "predict"):
        model = OfRank()
        for param in model.parameters():
            nn.init.constant_(param, dist.get_rank())
        getattr(trainer(ours()), stage)(model, data(1))
        assert all((param == 0).all() for param in model.parameters()), "rank 0's"


def test_every_rank_evaluates_the_weights_of_rank_0(run_ranks: RunRanks) -> None:
    run_ranks(2, evaluated)


def interrupted(how: str) -> tuple[str, str]:
    class Interrupted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2 and how == "raise":
                raise ArithmeticError("on every rank")
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            if how == "stop" and self.global_step == 3:
                self.trainer.should_stop = True
            if how == "sigterm" and self.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    runs, model, raised = trainer(ours()), Interrupted(), ""
    try:
        runs.fit(model, data())
    except (ArithmeticError, SIGTERMException) as error:
        raised = type(error).__name__
    assert runs.strategy.model is model, "unwrapped"
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    return raised, runs.state.status.value


@pytest.mark.parametrize(
    ("how", "raised"), [("raise", "ArithmeticError"), ("sigterm", "SIGTERMException"), ("stop", "")]
)
def test_training_that_ends_early_leaves_nothing_behind(run_ranks: RunRanks, how: str, raised: str) -> None:
    assert run_ranks(2, interrupted, how) == [(raised, "interrupted" if raised else "finished")] * 2
