"""What a Lightning user does, with ``BucketDDPStrategy`` and with ``ddp``: the same weights, gradients, logged values.

One row per thing; a row in which ``ddp`` needs help says which.
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
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from tests.lightning_models import Citizen, Memory, data, ddp, ours, trainer
from tests.models import Mlp
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


# -- what is trained ---------------------------------------------------------------------------------


class OwnClipping(Citizen):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.02 * (1 + self.current_epoch), gradient_clip_algorithm="norm"
        )


class Rough(Citizen):
    """In the fourth batch the gradient is infinite: on all ranks, or on one of them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
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
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        last = batch_idx % 2 == 1
        alone: Any = nullcontext()
        if not last and self.local == "block_backward_sync":
            alone = self.trainer.strategy.block_backward_sync()
        elif not last and self.local == "no_sync":
            alone = self.trainer.model.no_sync()
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


NETS = ("net", "critic")


class Adversaries(Citizen):
    """Two optimizers in turns; the other network is toggled off, or not."""

    def __init__(self, toggle: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.critic = nn.Linear(4, 1)
        self.reached: list[set[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            fake = self.net(batch[0])
            if index == 1 and not self.toggle:
                fake = fake.detach()
            loss = -self.critic(fake).mean() if index == 0 else (self.critic(fake) - self.critic(batch[1])).mean()
            self.log(f"loss {index}", loss, on_step=True, on_epoch=True, sync_dist=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            if isinstance(self.trainer.strategy, BucketDDPStrategy):
                record = self.trainer.strategy.bucket_ddp.last_pass()
                self.reached.append({name for bucket in record.buckets for name in bucket.parameters})
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in map(self.get_submodule, NETS)]


class Groups(Citizen):
    """Parameter groups with rates of their own."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.3}], lr=1e-2)


class Contrast(Citizen):
    """The loss of a rank depends on the outputs of all."""

    def loss(self, batch: Any) -> Tensor:
        everybody = self.all_gather(self.net(batch[0]), sync_grads=self.training)
        return nn.functional.mse_loss(everybody.mean(0), batch[1]) + everybody.square().mean()


class Penalty(Citizen):
    """A penalty on the gradient with respect to the input: backward through a backward."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if not self.training:
            return loss
        inputs = batch[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.net(inputs).sum(), inputs, create_graph=True)
        return loss + (grad.norm(dim=1) - 1).square().mean()


class Recomputed(Citizen):
    """Activations are computed again in backward."""

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            return super().loss(batch)
        output = checkpoint(self.net, batch[0].clone().requires_grad_(), use_reentrant=True)
        return nn.functional.mse_loss(output, batch[1])


class Late(Citizen):
    """Makes its network in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Mlp()


# -- what it is trained on ---------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """As many samples for each rank, of unknown number."""

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(14):
            yield torch.randn(8, generator=generator), torch.randn(4, generator=generator)


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), 4)


def indivisible(shuffle: bool) -> DataLoader[Any]:
    """19 samples in batches of 4, over two ranks."""
    generator = torch.Generator().manual_seed(11)
    dataset = TensorDataset(torch.randn(19, 8, generator=generator), torch.randn(19, 4, generator=generator))
    return DataLoader(dataset, 4, shuffle=shuffle)


def two_loaders() -> dict[str, DataLoader[Any]]:
    return {"first": data(), "second": data(4, 2)}


# -- the rows ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """What differs from an ordinary run: two epochs of six batches.

    Lists in ``options`` hold factories, as callbacks and plugins belong to one Trainer. ``passes`` is how many times
    gradients are to be reduced, for rows in which that is not once a step.
    """

    name: str
    module: Callable[[], Citizen] = Citizen
    options: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = data
    ours: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    ddp_module: Callable[[], Citizen] | None = None
    passes: int | None = None


def scaler_plugin() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


LOOPS = [
    Row("plain"),
    Row("accumulation that does not divide", options={"accumulate_grad_batches": 4}),
    Row("scheduled accumulation", options={"callbacks": [partial(GradientAccumulationScheduler, {0: 1, 1: 3})]}),
    Row("overfit_batches", options={"overfit_batches": 2}),
    Row("fast_dev_run", options={"fast_dev_run": 2}),
    Row("limits", options={"limit_train_batches": 0.5, "limit_val_batches": 2, "limit_test_batches": 1}),
    Row("validation by fraction", options={"val_check_interval": 0.5}),
    Row("validation by steps", options={"val_check_interval": 4, "check_val_every_n_epoch": None}),
    Row("max_steps within an epoch", options={"max_steps": 8, "max_epochs": -1}),
    Row("sanity check", options={"num_sanity_val_steps": 2}),
    Row("reloaded data", options={"reload_dataloaders_every_n_epochs": 1}),
    Row("iterable dataset", data=stream),
    Row("iterable dataset, limited", data=stream, options={"limit_train_batches": 3, "limit_val_batches": 1}),
    Row("indivisible length", data=partial(indivisible, False), options={"use_distributed_sampler": True}),
    Row("indivisible length, shuffled", data=partial(indivisible, True), options={"use_distributed_sampler": True}),
    Row("several loaders", data=two_loaders),
    Row("profiled", options={"profiler": "simple", "detect_anomaly": True, "inference_mode": False}),
]
OPTIMISATION = [
    Row("all_gather", Contrast),
    Row("gradient penalty", Penalty),
    Row("re-entrant checkpointing", Recomputed),
    Row("configure_model", Late),
    Row("parameter groups", Groups),
    Row("clip by norm", options={"gradient_clip_val": 0.05}),
    Row("clip by value", options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Row("own clipping", OwnClipping),
    Row("scheduler by epoch", partial(Citizen, schedule="epoch")),
    Row("scheduler by step", partial(Citizen, schedule="step")),
    Row("scheduler by plateau", partial(Citizen, schedule="plateau"), {"max_epochs": 3}),
    Row("manual", Manual, passes=12),
    Row("manual, clipped", partial(Manual, clip=True), passes=12),
    Row("manual, plain backward", partial(Manual, "backward"), ddp_module=Manual, passes=12),
    Row("manual, blocked", partial(Manual, local="block_backward_sync"), passes=6),
    Row("manual, no_sync", partial(Manual, local="no_sync"), passes=6),
    Row("manual, plain backward, no_sync", partial(Manual, "backward", "no_sync"), ddp_module=Manual, passes=6),
    Row("adversaries", partial(Adversaries, False), ddp={"find_unused_parameters": True}, passes=24),
    Row("toggled adversaries", partial(Adversaries, True), ddp={"find_unused_parameters": True}, passes=24),
]
PRECISION = [
    *(
        Row(precision, options={"precision": precision})
        for precision in ("bf16-mixed", "bf16-true", "16-true", "64-true")
    ),
    Row("16-mixed", options={"plugins": [scaler_plugin]}),
    Row(
        "16-mixed, accumulated and clipped",
        options={"plugins": [scaler_plugin], "accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    ),
    Row("16-mixed, manual and clipped", partial(Manual, clip=True), {"plugins": [scaler_plugin]}, passes=12),
    Row("16-mixed, infinite on all", partial(Rough, (0, 1)), {"plugins": [scaler_plugin]}),
    Row("16-mixed, infinite on one", partial(Rough, (1,)), {"plugins": [scaler_plugin]}),
]
ROWS = {row.name: row for row in LOOPS + OPTIMISATION + PRECISION}


# -- the comparison ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run left behind, to be compared."""

    model: Citizen
    values: dict[str, Any]
    difference: float


def outcome(row: Row, strategy: Any, module: Callable[[], Citizen]) -> Outcome:
    logger = Memory()
    options = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **row.options}
    made = {key: [make() for make in value] if isinstance(value, list) else value for key, value in options.items()}
    pl.seed_everything(3)
    model = module()
    runs = trainer(strategy, **made)
    runs.fit(model, row.data(), row.data())
    values: dict[str, Any] = {
        "steps": runs.global_step,
        "fit": dict(runs.callback_metrics),
        "logged": dict(runs.logged_metrics),
        "optimizers": [optimizer.state_dict() for optimizer in runs.optimizers],
    }
    values["gradients"] = model.before_step
    difference = largest_difference_between_ranks(model)
    if row in LOOPS:
        values["validate"] = runs.validate(model, row.data(), verbose=False)
        values["test"] = runs.test(model, row.data(), verbose=False)
        values["predict"] = runs.predict(model, row.data())
    values["logger"] = logger.logged
    return Outcome(model, values, difference)


def both(name: str) -> float:
    row = ROWS[name]
    expected = outcome(row, ddp(**row.ddp), row.ddp_module or row.module)
    found = outcome(row, ours(**row.ours), row.module)
    for name, param in found.model.named_parameters():
        torch.testing.assert_close(param, expected.model.get_parameter(name), msg=lambda m, n=name: f"{n}: {m}")
    for key, value in found.values.items():
        torch.testing.assert_close(value, expected.values[key], equal_nan=True, msg=lambda m, k=key: f"{k}: {m}")
    if isinstance(found.model, Rough):
        assert found.model.scales == expected.model.scales
        assert found.model.scales[3] == found.model.scales[2] / 2, "the scaler skipped the step"
    if isinstance(found.model, Adversaries) and found.model.toggle:
        nets = [{f"{net}.{name}" for name, _ in found.model.get_submodule(net).named_parameters()} for net in NETS]
        assert found.model.reached == nets * 12, "each backward reduces the gradients of its own network"
    assert found.model.passes == (row.passes or found.values["steps"]) > 0
    return found.difference


@pytest.mark.parametrize("name", ROWS)
def test_as_with_ddp(run_ranks: RunRanks, name: str) -> None:
    assert run_ranks(2, both, name) == [0.0, 0.0]


# -- fp32 gradients and master parameters, which ddp has not -----------------------------------------


def by_hand(dtype: torch.dtype, batches: int) -> tuple[Citizen, list[Tensor]]:
    """One process that goes through both ranks' batches: gradients averaged, clipped and stepped on in fp32."""
    model = Citizen().to(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    loader = data()
    inputs, targets = (tensor.to(dtype) for tensor in loader.dataset.tensors)
    for index in range(batches):
        grads = []
        for rank in range(2):
            rows = torch.arange(4) * 2 + (index % len(loader)) * 8 + rank  # as the distributed sampler deals them
            grads.append(torch.autograd.grad(model.loss((inputs[rows], targets[rows])), list(model.parameters())))
        for master, first, second in zip(masters, *grads, strict=True):
            master.grad = (first.float() + second.float()) / 2
        nn.utils.clip_grad_norm_(masters, 0.05)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    return model, masters


def with_masters(precision: str, folder: str) -> float:
    def runs(epochs: int) -> pl.Trainer:
        return trainer(ours(grad_dtype=torch.float32), max_epochs=epochs, precision=precision, gradient_clip_val=0.05)

    def low() -> Citizen:
        return Citizen(optimizer="adamw")

    model, whole = low(), runs(2)
    whole.fit(model, data())
    assert model.before_step[0]["net.head.weight"].dtype is torch.float32
    whole.save_checkpoint(f"{folder}/whole.ckpt")
    expected, masters = by_hand({"bf16-true": torch.bfloat16, "16-true": torch.float16}[precision], 12)
    state = torch.load(f"{folder}/whole.ckpt", weights_only=True)["optimizer_states"][0]
    for index, param in enumerate(expected.parameters()):
        torch.testing.assert_close(state["master_params"][index], masters[index])
        assert state["state"][index]["exp_avg"].dtype is torch.float32
        torch.testing.assert_close(list(model.parameters())[index], param)

    first = runs(1)
    first.fit(low(), data())
    first.save_checkpoint(f"{folder}/first.ckpt")
    resumed, rest = low(), runs(2)
    rest.fit(resumed, data(), ckpt_path=f"{folder}/first.ckpt")
    rest.save_checkpoint(f"{folder}/rest.ckpt")
    again = torch.load(f"{folder}/rest.ckpt", weights_only=True)["optimizer_states"][0]
    torch.testing.assert_close(again, state, rtol=0, atol=0)
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_low_precision_with_fp32_gradients(run_ranks: RunRanks, precision: str, tmp_path: Any) -> None:
    """Clipped by norm, stepped on fp32 masters, and resumed bit for bit."""
    assert run_ranks(2, with_masters, precision, str(tmp_path)) == [0.0, 0.0]
