"""Training with ``BucketDDPStrategy`` and with ``ddp``: the same weights, gradients and logged values.

A row combines things that do not touch one another. Where ``ddp`` needs help, the row says which.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from tests.lightning_models import Citizen, Gan, Memory, data, ddp, ours, trainer
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reference import largest_difference_between_ranks


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

    def __init__(self, backward: str = "manual_backward", local: str = "", clip: bool = False) -> None:
        super().__init__(schedule="epoch")
        self.automatic_optimization = False
        self.backward_by, self.local, self.clip = backward, local, clip

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)["loss"]
        last = batch_idx % 2 == 1
        alone: Any = nullcontext()
        if not last and self.local:
            owner = self.trainer.strategy if self.local == "block_backward_sync" else self.trainer.model
            alone = getattr(owner, self.local)()
        with alone:
            if self.backward_by == "manual_backward":
                self.manual_backward(loss)
            else:
                loss.backward()
        if last:
            if self.clip:
                self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()


class WithClosure(Citizen):
    """Goes twice through one graph, steps with a closure, and learns in parts as truncated backpropagation does."""

    def __init__(self) -> None:
        super().__init__(schedule="epoch")
        self.automatic_optimization = False

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
        for part in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss([half.chunk(2)[part] for half in batch]))
            optimizer.step()
        optimizer.zero_grad()


class Zero(Citizen):
    """Its optimizer keeps its state in shards, and a checkpoint has all of it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)


class Contrast(Citizen):
    """The loss of a rank depends on the outputs of all."""

    def loss(self, batch: Any) -> Tensor:
        everybody = self.all_gather(self.net(batch[0]), sync_grads=self.training)
        return nn.functional.mse_loss(everybody.mean(0), batch[1]) + everybody.square().mean()


class Penalty(Citizen):
    """Recomputes activations in backward, or penalises gradients: a backward through a backward."""

    def __init__(self, recompute: bool, **options: Any) -> None:
        super().__init__(**options)
        self.recompute = recompute

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            return super().loss(batch)
        inputs = batch[0].clone().requires_grad_()
        if self.recompute:
            return nn.functional.mse_loss(checkpoint(self.net, inputs, use_reentrant=True), batch[1])
        (grad,) = torch.autograd.grad(self.net(inputs).sum(), inputs, create_graph=True)
        return super().loss(batch) + (grad.norm(dim=1) - 1).square().mean()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class Stream(IterableDataset[Any]):
    """As many samples for each rank, of unknown number."""

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(14):
            yield torch.randn(8, generator=generator), torch.randn(4, generator=generator)


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), 4)


def indivisible() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    dataset = TensorDataset(torch.randn(19, 8, generator=generator), torch.randn(19, 4, generator=generator))
    return DataLoader(dataset, 4, shuffle=True)


def two_loaders() -> dict[str, DataLoader[Any]]:
    return {"first": data(), "second": data(4, 2)}


@dataclass
class Row:
    """What differs from an ordinary run: two epochs of six batches.

    Lists in ``options`` hold factories, as callbacks and plugins belong to one Trainer. ``passes`` is the number of
    reductions, in rows where that is not once a step. With BatchNorm, ``metrics`` are not compared: with ``ddp`` each
    rank validates with its own statistics.
    """

    name: str
    module: Callable[[], Any] = Citizen
    options: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = data
    ddp: dict[str, Any] = field(default_factory=dict)
    ddp_module: Callable[[], Citizen] | None = None
    passes: int | None = None
    metrics: bool = True


def scaler() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


FP16 = {"plugins": [scaler]}
BAREBONES = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "log_every_n_steps")
LOOPS = [
    Row(
        "limits, accumulation", options={"accumulate_grad_batches": 4, "limit_val_batches": 2, "limit_test_batches": 1}
    ),
    Row(
        "scheduled accumulation, sanity check",
        options={"callbacks": [partial(GradientAccumulationScheduler, {0: 1, 1: 3})], "num_sanity_val_steps": 2},
    ),
    Row("barebones", options={"barebones": True, **dict.fromkeys((*BAREBONES, "num_sanity_val_steps"))}),
    Row("overfit_batches", options={"overfit_batches": 2}),
    Row("fast_dev_run", options={"fast_dev_run": 2}),
    Row("reloaded data", options={"val_check_interval": 0.5, "reload_dataloaders_every_n_epochs": 1}),
    Row(
        "max_steps within an epoch",
        options={"val_check_interval": 4, "check_val_every_n_epoch": None, "max_steps": 8, "max_epochs": -1},
    ),
    Row("iterable dataset", data=stream),
    Row("indivisible length, shuffled", data=indivisible, options={"use_distributed_sampler": True}),
    Row(
        "several loaders, profiled",
        data=two_loaders,
        options={"profiler": "simple", "detect_anomaly": True, "inference_mode": False},
    ),
]
OPTIMISATION = [
    Row("all_gather, clipped by norm", Contrast, {"gradient_clip_val": 0.05}),
    Row("gradient penalty, scheduler by step", partial(Penalty, False, schedule="step")),
    Row(
        "re-entrant checkpointing, clipped by value",
        partial(Penalty, True),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    Row("configure_model, own clipping", LateNet),
    Row("scheduler by plateau", partial(Citizen, schedule="plateau"), {"max_epochs": 3}),
    Row("manual, plain backward", partial(Manual, "backward"), ddp_module=Manual, passes=12),
    Row("manual, blocked", partial(Manual, local="block_backward_sync"), passes=6),
    Row("manual, plain backward, no_sync", partial(Manual, "backward", "no_sync"), ddp_module=Manual, passes=6),
    Row("manual, with closures", WithClosure, passes=42),
    Row("ZeroRedundancyOptimizer", Zero),
    Row("toggled networks", Gan, ddp={"find_unused_parameters": True}, passes=24),
]
PRECISION = [
    *(Row(precision, options={"precision": precision}) for precision in ("bf16-mixed", "bf16-true", "16-true")),
    Row("16-mixed, clipped", options=FP16 | {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    Row("16-mixed, manual and clipped", partial(Manual, clip=True), FP16, passes=12),
    Row("16-mixed, infinite on all", partial(Rough, (0, 1)), FP16),
    Row("16-mixed, infinite on one", partial(Rough, (1,)), FP16),
]
WITH_BATCHNORM = {"module": partial(Citizen, "conv"), "metrics": False}
SWA = partial(StochasticWeightAveraging, 0.02, 1)
CALLBACKS = [
    Row("stochastic weight averaging", options={"callbacks": [SWA], "max_epochs": 4}, passes=24, **WITH_BATCHNORM),
    Row("moving average", options={"callbacks": [partial(EMAWeightAveraging, decay=0.8)]}, **WITH_BATCHNORM),
    Row(
        "early stopping",
        options={"callbacks": [partial(EarlyStopping, "valid", min_delta=9.0, patience=1)], "max_epochs": 6},
    ),
    Row(
        "learning rates logged",
        partial(Citizen, schedule="step"),
        {"callbacks": [partial(LearningRateMonitor, "step", log_momentum=True), partial(ModelSummary, 2)]},
    ),
    Row("pruning", options={"callbacks": [partial(ModelPruning, "l1_unstructured", amount=0.3)]}),
]
ROWS = {row.name: row for row in LOOPS + OPTIMISATION + PRECISION + CALLBACKS}


class Passes(pl.Callback):
    count = 0

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.count = trainer.strategy.bucket_ddp.passes


def outcome(row: Row, strategy: Any, module: Callable[[], Any], *callbacks: pl.Callback) -> tuple[Any, dict[str, Any]]:
    logger = Memory()
    options = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **row.options}
    made = {key: [make() for make in value] if isinstance(value, list) else value for key, value in options.items()}
    made["callbacks"] = [*made.get("callbacks", []), *callbacks]
    pl.seed_everything(3)
    model = module()
    runs = trainer(strategy, **made)
    runs.fit(model, row.data(), row.data())
    values: dict[str, Any] = {
        "steps": runs.global_step,
        "optimizers": runs._checkpoint_connector.dump_checkpoint()["optimizer_states"],
        "gradients": getattr(model, "before_step", None),
    }
    if row.passes is None and not row.options.keys() & {"accumulate_grad_batches", "callbacks"}:
        values["gradients after each backward"] = model.after_backward
    assert largest_difference_between_ranks(model) == 0
    for callback in made["callbacks"]:
        if isinstance(callback, EMAWeightAveraging) and isinstance(strategy, BucketDDPStrategy):
            assert callback._average_model is not None
            assert largest_difference_between_ranks(callback._average_model.module) == 0, "module buffers too"
    if row in LOOPS:
        values["validate"] = runs.validate(model, row.data(), verbose=False)
        values["test"] = runs.test(model, row.data(), verbose=False)
        values["predict"] = runs.predict(model, row.data())
    if row.metrics:
        values["fit"], values["logger"] = dict(runs.callback_metrics), logger.logged
    values["weights"] = dict(model.named_parameters())
    return model, values


@pytest.mark.parametrize("name", ROWS)
@on_ranks(2)
def test_training_is_that_of_ddp(name: str) -> None:
    row = ROWS[name]
    passes = Passes()
    reference, expected = outcome(row, ddp(**row.ddp), row.ddp_module or row.module)
    model, found = outcome(row, ours(), row.module, passes)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], equal_nan=True, msg=lambda m, k=key: f"{k}: {m}")
    if isinstance(model, Rough):
        assert model.scales == reference.scales
        assert model.scales[3] == model.scales[2] / 2, "the scaler skipped the step"
    assert passes.count == (row.passes or found["steps"]) > 0
