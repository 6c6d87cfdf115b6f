"""Training with ``BucketDDPStrategy`` and with ``ddp``: the same weights, gradients and logged values.

A row combines things that do not touch one another. Where ``ddp`` needs help, the row says which.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp import BucketDDPStrategy
from tests.lightning_models import Citizen, Gan, Memory, data, ddp, ours, scaler, trainer
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reference import drift
from tests.sampling import some_slow


class LateNet(Citizen):
    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Mlp()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.02 * (1 + self.current_epoch), "norm")


class Rough(Citizen):
    """In the fourth batch the gradient is infinite: on all ranks, or on one of them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (float("inf") if batch_idx == 3 and self.global_rank in self.ranks else 1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


class Manual(Citizen):
    """Manual optimisation, gradients accumulated over two batches; ``ddp`` knows the first way alone."""

    automatic_optimization = False

    def __init__(self, plain: bool = False, local: str = "", clip: bool = False) -> None:
        super().__init__(schedule="epoch")
        self.plain, self.local, self.clip = plain, local, clip

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)["loss"]
        last = batch_idx % 2 == 1
        owner = self.trainer.strategy if self.local == "block_backward_sync" else self.trainer.model
        with nullcontext() if last or not self.local else getattr(owner, self.local)():
            loss.backward() if self.plain else self.manual_backward(loss)
        if last:
            if self.clip:
                self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()


class WithClosure(Citizen):
    """Goes twice through one graph, and steps with a closure."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(2 * loss)
            optimizer.step()
        else:
            optimizer.step(lambda: self.manual_backward(self.loss(batch)))
            self.lr_schedulers().step()
        optimizer.zero_grad()


class Contrast(Citizen):
    """The loss of a rank depends on the outputs of all."""

    def loss(self, batch: Any) -> Tensor:
        everybody = self.all_gather(self.net(batch[0]), sync_grads=self.training)
        return nn.functional.mse_loss(everybody.mean(0), batch[1]) + everybody.square().mean()


class Recomputed(Citizen):
    """Recomputes activations in backward, which it calls itself."""

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            return super().loss(batch)
        inputs = batch[0].clone().requires_grad_()
        return nn.functional.mse_loss(checkpoint(self.net, inputs, use_reentrant=True), batch[1])

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


@dataclass
class Row:
    """What differs from an ordinary run: two epochs of six batches, and two to validate with.

    Lists in ``options`` hold factories. ``passes`` counts reductions where there is not one a step. With BatchNorm,
    ``metrics`` are not compared: with ``ddp`` each rank validates with its own statistics.
    """

    name: str
    module: Callable[[], Any] = Citizen
    options: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = data
    ddp: dict[str, Any] = field(default_factory=dict)
    ddp_module: Callable[[], Citizen] | None = None
    passes: int | None = None
    metrics: bool = True


SCHEDULED = partial(pl.callbacks.GradientAccumulationScheduler, {0: 1, 1: 3})
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
FP16 = {"plugins": [partial(scaler, 1024.0)]}
LOOPS = [
    Row("limits, accumulation", options={"accumulate_grad_batches": 4, "limit_val_batches": 2}),
    Row("scheduled accumulation", options={"callbacks": [SCHEDULED], "num_sanity_val_steps": 2}),
    Row("overfit_batches", options={"overfit_batches": 2, "detect_anomaly": True}),
    Row("reloaded data", options={"val_check_interval": 0.5, "reload_dataloaders_every_n_epochs": 1}),
    Row("max_steps within an epoch", options={"val_check_interval": 4, "max_steps": 8, "max_epochs": -1}),
    Row("several loaders", data=lambda: {"first": data(), "second": data(4, 2)}, options={"inference_mode": False}),
]
OPTIMISATION = [
    Row("all_gather, clipped by norm", Contrast, {"gradient_clip_val": 0.05}),
    Row("re-entrant checkpointing, clipped by value", partial(Recomputed, schedule="step"), BY_VALUE),
    Row("configure_model, own clipping", LateNet),
    Row("scheduler by plateau", partial(Citizen, schedule="plateau"), {"max_epochs": 3}),
    Row("manual, blocked", partial(Manual, local="block_backward_sync"), passes=6),
    Row("manual, plain backward, no_sync", partial(Manual, True, "no_sync"), ddp_module=Manual, passes=6),
    Row("manual, with closures", partial(WithClosure, schedule="epoch"), passes=18),
    Row("ZeroRedundancyOptimizer", partial(Citizen, optimizer="zero")),
    Row("toggled networks", Gan, ddp={"find_unused_parameters": True}, passes=24),
]
PRECISION = [
    *(
        Row(precision, options={"precision": precision})
        for precision in ("bf16-mixed", "bf16-true", "16-true", "64-true")
    ),
    Row("16-mixed, clipped", options=FP16 | {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    Row("16-mixed, manual and clipped", partial(Manual, clip=True), FP16, passes=12),
    Row("16-mixed, infinite on all", partial(Rough, (0, 1)), FP16),
    Row("16-mixed, infinite on one", partial(Rough, (1,)), FP16),
]
WITH_BATCHNORM = {"module": partial(Citizen, "conv"), "metrics": False}
STOPPING = partial(pl.callbacks.EarlyStopping, "valid", min_delta=9.0, patience=1)
AVERAGING = partial(pl.callbacks.EMAWeightAveraging, decay=0.8)
PRUNING = partial(pl.callbacks.ModelPruning, "l1_unstructured", amount=0.3)
TIMER = partial(pl.callbacks.Timer, duration={"hours": 1}, verbose=False)
SWA = partial(pl.callbacks.StochasticWeightAveraging, 0.02, 1)
CALLBACKS = [
    Row("stochastic weight averaging", options={"callbacks": [SWA], "max_epochs": 4}, passes=24, **WITH_BATCHNORM),
    Row("moving average", options={"callbacks": [AVERAGING]}, **WITH_BATCHNORM),
    Row("early stopping", options={"callbacks": [STOPPING], "max_epochs": 6}),
    Row("learning rates logged", partial(Citizen, schedule="step"), {"callbacks": [pl.callbacks.LearningRateMonitor]}),
    Row("pruning", options={"callbacks": [PRUNING]}),
    Row("deterministic, profiled, timed", options={"deterministic": True, "profiler": "simple", "callbacks": [TIMER]}),
    Row("progress bar and summary", options={"enable_progress_bar": True, "enable_model_summary": True}),
]
ROWS = {row.name: row for row in LOOPS + OPTIMISATION + PRECISION + CALLBACKS}
QUICK = {
    *("limits, accumulation", "all_gather, clipped by norm", "manual, with closures"),
    *("16-mixed, infinite on one", "moving average", "early stopping"),
}
"""Of each kind of loop, optimisation, precision and callback one. The others are slow tests. Networks that are toggled
have quick tests in ``optim/test_in_trainers.py``."""


def outcome(row: Row, strategy: Any, module: Callable[[], Any], *callbacks: pl.Callback) -> tuple[Any, dict[str, Any]]:
    logger = Memory()
    limits = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), 2)
    options = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **limits}
    options |= row.options
    made = {key: [make() for make in value] if isinstance(value, list) else value for key, value in options.items()}
    made["callbacks"] = [*made.get("callbacks", []), *callbacks]
    torch.manual_seed(3)
    model, runs = module(), trainer(strategy, **made)
    runs.fit(model, row.data(), row.data())
    values: dict[str, Any] = {
        "steps": runs.global_step,
        "optimizers": runs._checkpoint_connector.dump_checkpoint()["optimizer_states"],
        "gradients": getattr(model, "before_step", None),
    }
    if row.passes is None and not row.options.keys() & {"accumulate_grad_batches", "callbacks"}:
        values["gradients after each backward"] = model.after_backward
    assert drift(model) == 0
    for callback in made["callbacks"]:
        if isinstance(callback, pl.callbacks.EMAWeightAveraging) and isinstance(strategy, BucketDDPStrategy):
            assert callback._average_model is not None
            assert drift(callback._average_model.module) == 0, "module buffers too"
    if row in LOOPS:
        values["validate"] = runs.validate(model, row.data(), verbose=False)
        values["test"] = runs.test(model, row.data(), verbose=False)
        values["predict"] = runs.predict(model, row.data())
    if row.metrics:
        values["fit"], values["logger"] = dict(runs.callback_metrics), logger.logged
    values["weights"] = dict(model.named_parameters())
    return model, values


@pytest.mark.parametrize("name", some_slow(ROWS, QUICK))
@on_ranks(2)
def test_training_is_that_of_ddp(name: str) -> None:
    row = ROWS[name]
    passes: list[int] = []
    counts = pl.callbacks.LambdaCallback(on_train_end=lambda runs, _: passes.append(runs.strategy.bucket_ddp.passes))
    reference, expected = outcome(row, ddp(**row.ddp), row.ddp_module or row.module)
    model, found = outcome(row, ours(), row.module, counts)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], equal_nan=True, msg=lambda m, k=key: f"{k}: {m}")
    if isinstance(model, Rough):
        assert model.scales == reference.scales
        assert model.scales[3] == model.scales[2] / 2, "the scaler skipped the step"
    assert passes == [row.passes or found["steps"]]
