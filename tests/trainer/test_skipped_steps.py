"""``skip_step_on`` in a Trainer and with Fabric: optimizer and scheduler leave the same steps out on all ranks."""

import math
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_bucketddp import GradientError, PeerFailureError, RankMismatchError
from tests.lightning_models import Regression, close_to, data, ddp, ours, scaler, start_fabric, trainer
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reducer.test_skipping import OutOfMemory, warns_of
from tests.reference import WHERE, drift, inputs_of, raises_soon


class Sometimes(Regression):
    """On rank 1 something goes wrong in one batch. The learning rate sinks with each step of a scheduler."""

    records = False

    def __init__(self, fault: str, at: int, manual: bool = False) -> None:
        super().__init__()
        self.fault, self.at = fault, at
        self.automatic_optimization = not manual
        self.steps, self.skipped = 0, list[bool]()

    def loss(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        bad = batch_idx == self.at and dist.get_rank() == 1
        if bad and self.fault == "oom in forward":
            raise torch.OutOfMemoryError("out of memory, for this test")
        output = self.net(batch[0])
        if bad and self.fault == "oom in backward":
            output = OutOfMemory.apply(output)
        return nn.functional.mse_loss(output, batch[1]) * (math.nan if bad and self.fault == "NaN" else 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch, batch_idx)
        optimizer, (scheduler, _) = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()
        if not self.trainer.strategy.step_skipped():
            scheduler.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.skipped.append(self.trainer.strategy.step_skipped())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        halving = lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": halving, "interval": "step"}, lr_scheduler.StepLR(optimizer, 1, 0.5)]


def without(first: int, count: int) -> DataLoader[Any]:
    """The batches of ``data()`` but for some."""
    per_batch = 4 * dist.get_world_size()
    tensors = [
        torch.cat([tensor[: first * per_batch], tensor[(first + count) * per_batch :]])
        for tensor in data().dataset.tensors
    ]
    dataset = TensorDataset(*tensors)
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, shuffle=False))


def fit(model: pl.LightningModule, loader: Any, with_scaler: bool = False, accumulate: int = 1, **options: Any) -> Any:
    plugins = [scaler(8.0)] if with_scaler else []
    runs = trainer(ours(**options), accumulate_grad_batches=accumulate, plugins=plugins, max_epochs=2)
    runs.fit(model, loader)
    return runs


WORDS = {
    "NaN": "rank 1 has NaN or Inf in 8 gradient(s), first in that of 'net.head.",
    "oom in forward": "rank 1 ran out of memory in training_step",
    "oom in backward": "rank 1 ran out of memory in backward",
}
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "NaN": ("NaN", 3, 2, {}),
    "oom in forward": ("oom in forward", 2, 2, {}),
    "oom in the epoch's last backward": ("oom in backward", 5, 1, {}),  # after it the other scheduler steps
    "NaN, sharded": ("NaN", 3, 1, {"shard_optimizer": True}),
    "oom in backward, sharded": ("oom in backward", 3, 3, {"shard_optimizer": True}),
    "NaN, scaler": ("NaN", 3, 1, {"with_scaler": True}),
    "NaN, scaler, sharded": ("NaN", 3, 1, {"with_scaler": True, "shard_optimizer": True}),
    "oom in forward, scaler": ("oom in forward", 3, 1, {"with_scaler": True}),
}
QUICK = [
    "oom in the epoch's last backward",
    "oom in backward, sharded",
    "NaN, scaler, sharded",
    "oom in forward, scaler",
]
"""Each pair of a fault, a scaler and shards."""


@on_ranks(2, cases=CASES, quick=QUICK)
def test_optimizer_and_scheduler_leave_a_step_out(
    fault: str, at: int, accumulate: int, options: dict[str, Any]
) -> None:
    """Weights and learning rate are those of a run without the batches of the step."""
    model, never = Sometimes(fault, at), Sometimes("none", at=0)
    window, per_epoch = at // accumulate, 6 // accumulate
    batch = (window + 1) * accumulate - 1
    told = "skip the step of pass {} (batch {} of epoch {}, global_step {}), 1 in a row so far: " + WORDS[fault]
    places = [(epoch * per_epoch + window, epoch) for epoch in (0, 1)]
    with warns_of(*(told.format(step, batch, epoch, step) for step, epoch in places)):
        runs = fit(model, data(), accumulate=accumulate, skip_step_on=["nonfinite", "oom"], **options)
    reference = fit(never, without(window * accumulate, accumulate), accumulate=accumulate, **options)
    close_to(model, never)
    assert drift(model) == 0
    assert [group["lr"] for group in runs.optimizers[0].param_groups] == pytest.approx(
        [group["lr"] for group in reference.optimizers[0].param_groups], rel=1e-12
    )
    left_to_scaler = fault == "NaN" and "with_scaler" in options
    assert model.steps - never.steps == (2 if left_to_scaler else 0)
    if "with_scaler" in options:  # it lowers its scale as it does by itself
        assert runs.precision_plugin.scaler.get_scale() == (2.0 if left_to_scaler else 8.0)
    assert model.skipped == [batch % 6 == (window + 1) * accumulate - 1 for batch in range(12)]
    assert "update_lr_schedulers" not in vars(runs.fit_loop.epoch_loop)


@on_ranks(2)
def test_with_ddp_one_nan_reaches_all_weights_on_all_ranks() -> None:
    model = Sometimes("NaN", at=3)
    model.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    trainer(ddp()).fit(model, data())
    assert all(param.isnan().all() for param in model.parameters())


@on_ranks(2, 3, cases=("NaN", "oom in backward"), quick=["oom in backward"])
def test_manual_optimisation_leaves_a_step_out(fault: str) -> None:
    model, never = (Sometimes(name, at=2, manual=True) for name in (fault, "none"))
    with warns_of(*[WORDS[fault]] * 2):
        fit(model, data(), skip_step_on=["nonfinite", "oom"])
    fit(never, without(2, 1))
    close_to(model, never)
    assert drift(model) == 0


@on_ranks(2, fresh=True)
def test_a_manual_step_that_runs_out_of_memory_outside_of_backward_is_an_error_everywhere() -> None:
    """The step may have several backwards: nobody knows which ones the others run."""
    errors = (torch.OutOfMemoryError, PeerFailureError)
    with raises_soon(
        *errors, match="^out of memory" if dist.get_rank() == 1 else f"rank 1{WHERE} raised OutOfMemoryError"
    ):
        fit(Sometimes("oom in forward", at=2, manual=True), data(), skip_step_on=["oom"])


class Everytime(Sometimes):
    def loss(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.at = batch_idx
        return super().loss(batch, batch_idx)


@on_ranks(2, 3, fresh=True)
def test_too_many_in_a_row_are_an_error_on_all_ranks() -> None:
    model = Everytime("NaN", at=0)
    before = [param.clone() for param in model.parameters()]
    words = (
        r"rank {}: expected at most max_skipped=2 skipped steps in a row, found another one in pass 2 "
        r"\(batch 2 of epoch 0, global_step 2\): rank 1 has NaN"
    )
    with warns_of("1 in a row", "2 in a row"), raises_soon(GradientError, match=words.format(dist.get_rank())):
        fit(model, data(), skip_step_on=["nonfinite"], max_skipped=2)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


class LogsEachStep(Sometimes):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss


@on_ranks(2, fresh=True)
def test_a_collective_in_training_step_is_an_error_if_a_rank_runs_out_of_memory_before_it() -> None:
    with raises_soon(RankMismatchError, match=r"rank 1 is in pass 2 .* wants to agree on the keys of self.log"):
        fit(LogsEachStep("oom in forward", at=2), data(), skip_step_on=["oom"])


@on_ranks(2)
def test_lbfgs_is_refused() -> None:
    model = Sometimes("none", at=0)
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="found LBFGS"):
        fit(model, data(), skip_step_on=["oom"])


@on_ranks(2, cases=list(product(("NaN", "oom"), (False, True))), quick=["NaN, True", "oom, False"])
def test_fabric_leaves_a_step_out(fault: str, with_scaler: bool) -> None:
    models = []
    for bad in (2, None):
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        plugins = FabricMixedPrecision("16-mixed", "cpu", grad_scaler) if with_scaler else None
        fabric = start_fabric(plugins=plugins, skip_step_on=["nonfinite", "oom"])
        torch.manual_seed(5)
        module = Mlp()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        for step in range(5) if bad is not None else (0, 1, 3, 4):
            with warns_of(*["all ranks skip the step"] * (step == bad)):
                wrong = step == bad and dist.get_rank() == 1
                if wrong and fault == "oom":
                    loss = fabric.strategy.skip_step("ran out of memory")
                else:
                    loss = model(inputs_of(step)).square().mean() * (math.nan if wrong else 1)
                fabric.backward(loss)
                assert fabric.strategy.step_skipped() == (step == bad)
                optimizer.step()
                optimizer.zero_grad()
        if bad is not None and with_scaler:  # it lowers its scale as it does by itself
            assert grad_scaler.get_scale() == (4.0 if fault == "NaN" else 8.0)
        models.append(module)
        fabric.strategy.teardown()
    assert drift(models[0]) == 0
    close_to(models[0], models[1])
