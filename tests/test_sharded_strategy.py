"""``bucketddp_sharded``: what holds without ``shard_optimizer`` in a Trainer and in Fabric holds with it."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from torch import nn
from torch.optim import Optimizer

from lightning_bucketddp import BucketDDPFabricStrategy, BucketDDPStrategy
from tests import lightning_models
from tests.lightning_models import Citizen, Regression, data, trainer
from tests.reference import largest_difference_between_ranks
from tests.test_callbacks import ROWS as CALLBACKS
from tests.test_callbacks import Backbone, Relay
from tests.test_checkpoints import ROWS as CHECKPOINTS

RunRanks = Callable[..., list[Any]]

STATES = "optimizer_states"
sharded = partial(lightning_models.ours, shard_optimizer=True)


class Quiet(Regression):
    """Looks at no gradients."""

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


# -- the jobs of other tests -------------------------------------------------------------------------


def log_norm(self: Citizen, optimizer: Optimizer) -> None:
    """Instead of Lightning's utility, which looks at gradients."""
    strategy = self.trainer.strategy
    if isinstance(strategy, BucketDDPStrategy):
        norm = strategy.grad_norm()
    else:
        norm = nn.utils.get_total_norm([param.grad for param in self.parameters() if param.grad is not None])
    self.log("norm", norm)


@contextmanager
def everything_sharded(module: Any) -> Iterator[None]:
    """The strategies that a test module makes are sharded, and its models do not look at gradients."""
    patches: list[tuple[Any, str, Any]] = [
        (Regression, "_grads", lambda self: {}),
        (Citizen, "on_before_optimizer_step", log_norm),
        (lightning_models, "ours", sharded),
    ]
    if hasattr(module, "ours"):
        patches.append((module, "ours", sharded))
    if hasattr(module, "STRATEGIES"):
        patches.append((module, "STRATEGIES", {**module.STRATEGIES, "ours": sharded}))
    if hasattr(module, "BucketDDPFabricStrategy"):
        patches.append((module, "BucketDDPFabricStrategy", partial(BucketDDPFabricStrategy, shard_optimizer=True)))
    if hasattr(module, "last"):  # rank 0 alone has the optimizer's state
        rank, last = dist.get_rank(), module.last
        without = partial(lambda *args: {k: v for k, v in last(*args).items() if not rank or k != STATES})
        patches.append((module, "last", without))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def with_shards(module: str, job: str, *args: Any) -> Any:
    """A job of another test module, sharded."""
    owner = importlib.import_module(f"tests.{module}")
    with everything_sharded(owner):
        return getattr(owner, job)(*args)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("net", ["mlp", "conv"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
    ],
    ids=["plain", "accumulate and clip", "clip values", "bf16-mixed"],
)
def test_the_same_weights_as_ddp(run_ranks: RunRanks, net: str, optimizer: str, options: dict[str, Any]) -> None:
    assert run_ranks(2, with_shards, "test_trainer", "fit_with_both", net, optimizer, options) == [0.0, 0.0]


@pytest.mark.parametrize("strategies", [("ours", "ddp"), ("ddp", "ours"), ("ours", "ours")], ids=" to ".join)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_resumed_equals_undisturbed(
    run_ranks: RunRanks, name: str, strategies: tuple[str, str], tmp_path: Path
) -> None:
    found = run_ranks(2, with_shards, "test_checkpoints", "handed_over", name, *strategies, str(tmp_path))
    assert found == [0.0, 0.0]


@pytest.mark.parametrize(
    "index", [index for index, row in enumerate(CALLBACKS) if row.name != "pruning"], ids=lambda i: CALLBACKS[i].name
)
def test_callbacks_as_with_ddp(run_ranks: RunRanks, index: int, tmp_path: Any) -> None:
    assert run_ranks(2, with_shards, "test_callbacks", "both", index, str(tmp_path)) == [0.0, 0.0]


def prune(lottery: bool) -> tuple[float, float]:
    """The first two modules' largest difference, and that between ranks."""
    models = []
    for strategy in (lightning_models.ddp(), sharded()):
        pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)
        model = Quiet()
        trainer(strategy, max_epochs=3, callbacks=[pruning]).fit(model, data())
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), largest_difference_between_ranks(models[1])


def test_parameters_whose_data_are_replaced(run_ranks: RunRanks) -> None:
    """Which pruning does. ``ddp`` then trains the copies of the first weights that Lightning starts anew from."""
    for difference, between_ranks in run_ranks(2, prune, False):
        assert difference < 1e-5
        assert between_ranks == 0
    for difference, between_ranks in run_ranks(2, prune, True):
        assert difference > 1e-3
        assert between_ranks == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("callback", [Backbone, Relay])
def test_resumed_fine_tuning(
    run_ranks: RunRanks, callback: type[BaseFinetuning], precision: str, tmp_path: Any
) -> None:
    args = (callback, {"every_n_train_steps": 5}, 5, precision, str(tmp_path))
    assert run_ranks(2, with_shards, "test_callbacks", "resumed", *args) == [0.0, 0.0]


def test_the_learning_rate_is_found_as_with_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, with_shards, "test_callbacks", "find_rate", str(tmp_path)) == [0.0, 0.0]


def test_a_trainer_takes_a_compiled_module(run_ranks: RunRanks) -> None:
    assert run_ranks(2, with_shards, "test_compile", "fit_compiled") == [0.0, 0.0]
