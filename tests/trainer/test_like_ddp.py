"""What Lightning's own tests ask of ``ddp`` on two ranks: hooks, module buffers, model averaging, early ends."""

import os
import signal
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

from tests.lightning_models import Regression, close_to, data, ddp, ours, trainer
from tests.pool import RunRanks, on_ranks
from tests.reference import largest_difference_between_ranks


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


@on_ranks(2)
def test_hooks_come_in_the_same_order_and_find_the_same() -> None:
    found = []
    for strategy in (ddp(), ours()):
        model = Recorder()
        runs = trainer(strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0)
        runs.fit(model, data(2), data(1))
        for evaluate in (runs.validate, runs.test):
            evaluate(model, data(1), verbose=False)
        runs.predict(model, data(1))
        found.append(list(model.events))
    assert found[0] == found[1]
    assert {("configure_optimizers", True, 0), ("on_after_backward", True, 8)} <= set(found[1])
    wrapped = {hook: {w for name, w, _ in found[1] if name == hook} for hook in ("validation_step", "predict_step")}
    assert wrapped == {"validation_step": {True, False}, "predict_step": {False}}
    assert [name for name, _, _ in found[1]].count("optimizer_step") == 2


class Scaled(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.differences: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.differences.append(largest_difference_between_ranks(self))
        loss = nn.functional.mse_loss(self.net(batch[0]) * self.scale.clone(), batch[1])
        self.scale.mul_(0.8).add_(0.2 * batch[1].abs().mean(0))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.differences.append(largest_difference_between_ranks(self))


@on_ranks(2, cases=((12, None), (16, {"num_sanity_val_steps": 0}), (26, {"val_check_interval": 2})))
def test_ranks_train_and_validate_with_the_same_module_buffers(seen: int, flags: dict[str, Any] | None) -> None:
    theirs, model = Scaled(), Scaled()
    for strategy, net in ((ddp(), theirs), (ours(), model)):
        loaders = [data()] if flags is None else [data(), data(2)]
        trainer(strategy, max_epochs=2, **(flags or {})).fit(net, *loaders)
    assert largest_difference_between_ranks(model) == 0, "at the end of fit"
    if flags is None:  # `ddp` leaves each rank its own at the end
        theirs.scale.copy_(model.scale)
    close_to(model, theirs)
    assert model.differences == [0.0] * seen


START, PERIOD = 2, 3


class Zero(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)


class Apart(pl.Callback):
    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.same.append(largest_difference_between_ranks(module) == 0)


@on_ranks(2)
def test_models_are_averaged_as_post_local_sgd_has_it() -> None:
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


class OfRank(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.trainer.strategy.model is self, "not wrapped where there are no gradients"

    test_step = predict_step = validation_step


@on_ranks(2)
def test_evaluation_uses_rank_0s_weights_and_no_wrapper() -> None:
    for stage in ("validate", "test", "predict"):
        model = OfRank()
        for param in model.parameters():
            nn.init.constant_(param, dist.get_rank())
        getattr(trainer(ours()), stage)(model, data(1))
        assert all((param == 0).all() for param in model.parameters()), "rank 0's"


class Interrupted(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.how == "raise":
            raise ArithmeticError("on every rank")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how == "stop" and self.global_step == 3:
            self.trainer.should_stop = True
        if self.how == "sigterm" and self.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def interrupted(how: str) -> tuple[str, str]:
    runs, model, raised = trainer(ours()), Interrupted(how), ""
    try:
        runs.fit(model, data())
    except (ArithmeticError, SIGTERMException) as error:
        raised = type(error).__name__
    assert runs.strategy.model is model, "unwrapped"
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    return raised, runs.state.status.value


def test_early_ends_leave_nothing_behind(run_ranks: RunRanks) -> None:
    for how, raised in (("raise", "ArithmeticError"), ("sigterm", "SIGTERMException"), ("stop", "")):
        assert run_ranks(2, interrupted, how) == [(raised, "interrupted" if raised else "finished")] * 2
