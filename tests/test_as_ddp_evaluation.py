"""What Lightning's own tests ask of ``ddp`` around training: collectives, logs, batches, evaluation, early ends.

As in ``test_as_ddp_training.py``, the same test passes with ``ddp``, or its record is what ours is compared with.
"""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from tests.lightning_models import Regression, data, strategy_of, trainer
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]

both = pytest.mark.parametrize("kind", ["ddp", "bucketddp"])


# -- the strategy's own collectives ------------------------------------------------------------------


def collectives(kind: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    class Ask(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            strategy, rank = trainer.strategy, trainer.global_rank
            for op in ("mean", "avg", "sum", "max", "min", "product", ReduceOp.SUM):
                seen[f"reduce {op}"] = strategy.reduce(torch.tensor([1.0 + 2 * rank]), reduce_op=op).tolist()
            for dtype in (torch.int64, torch.float64, torch.bfloat16):
                value = strategy.reduce(torch.tensor([2 + 2 * rank], dtype=dtype), reduce_op="mean")
                seen[f"reduce {dtype}"] = (value.tolist(), str(value.dtype))
            seen["reduce no tensor"] = strategy.reduce("text")
            seen["broadcast"] = [strategy.broadcast({"from": rank}, src)["from"] for src in (0, 1)]
            seen["all, any"] = [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)]
            seen["all_gather"] = module.all_gather({"a": torch.tensor([rank, 7])})["a"].tolist()
            source = torch.ones(2, requires_grad=True)
            gathered = module.all_gather(source, sync_grads=True)
            (gathered * torch.tensor([[1.0], [10.0]])).sum().backward()
            seen["all_gather's gradient"] = source.grad.tolist()
            strategy.barrier("anything")
            seen["state dict"] = list(strategy.lightning_module_state_dict())
            seen["ranks"] = (strategy.world_size, strategy.global_rank, strategy.local_rank, strategy.node_rank)

    runs = trainer(strategy_of(kind), max_steps=1, callbacks=[Ask()])
    runs.fit(Regression(), data(1))
    return seen


@both
def test_collectives_of_the_strategy(run_ranks: RunRanks, kind: str) -> None:
    for rank, seen in enumerate(run_ranks(2, collectives, kind)):
        reduced = {"mean": 2, "avg": 2, "sum": 4, "max": 3, "min": 1, "product": 3, ReduceOp.SUM: 4}
        assert {f"reduce {op}": [value] for op, value in reduced.items()}.items() <= seen.items()
        for dtype in ("int64", "float64", "bfloat16"):
            assert seen[f"reduce torch.{dtype}"][0] == [3]
        assert seen["reduce no tensor"] == "text"
        assert seen["broadcast"] == [0, 1]
        assert seen["all, any"] == [False, True]
        assert seen["all_gather"] == [[0, 7], [1, 7]]
        assert seen["all_gather's gradient"] == [[2.0] * 2, [20.0] * 2][rank], "summed over the ranks"
        assert seen["state dict"] == list(Regression().state_dict())
        assert seen["ranks"] == (2, rank, rank, 0)


# -- logging -----------------------------------------------------------------------------------------


FX = ("mean", "sum", "min", "max")


class Logging(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = float(self.global_rank + batch_idx)
        for fx in FX:
            self.log(fx, value, sync_dist=True, reduce_fx=fx, on_step=True, on_epoch=True)
        self.log("own", float(self.global_rank), on_step=True, on_epoch=True)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("validation", float(self.global_rank + dataloader_idx), sync_dist=True)

    test_step = validation_step


def logged(kind: str) -> tuple[dict[str, float], list[Any]]:
    runs = trainer(strategy_of(kind), num_sanity_val_steps=0)
    runs.fit(Logging(), data(3), [data(1), data(2)])
    metrics = {name: float(value) for name, value in runs.callback_metrics.items()}
    return metrics, runs.test(runs.lightning_module, [data(1), data(2)], verbose=False)


def test_logged_values_are_reduced_over_the_ranks(run_ranks: RunRanks) -> None:
    theirs, ours = (run_ranks(2, logged, kind) for kind in ("ddp", "bucketddp"))
    for rank, ((metrics, tested), (expected, _)) in enumerate(zip(ours, theirs, strict=True)):
        assert metrics == pytest.approx(expected)
        assert {fx: metrics[f"{fx}_epoch"] for fx in FX} == {"mean": 1.5, "sum": 9.0, "min": 0.0, "max": 3.0}
        assert {fx: metrics[f"{fx}_step"] for fx in FX} == {"mean": 2.5, "sum": 5.0, "min": 2.0, "max": 3.0}
        assert metrics["own_epoch"] == rank
        assert [metrics[f"validation/dataloader_idx_{index}"] for index in (0, 1)] == [0.5, 1.5]
        assert [list(result.values()) for result in tested] == [[0.5], [1.5]]


# -- data --------------------------------------------------------------------------------------------


SAMPLER = DistributedSampler.__name__


class Pairs(BatchSampler):
    """A batch sampler of the user's own class."""


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * dist.get_rank(), 10 * dist.get_rank() + 4))


class Reader(pl.LightningModule):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[str, int, list[int]]] = []

    def note(self, batch: Tensor) -> Tensor:
        self.seen.append((self.trainer.state.stage.value, self.current_epoch, batch.tolist()))
        return self.layer(batch.float().unsqueeze(-1)).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.note(batch)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.note(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(kind: str, loader: str, options: dict[str, Any]) -> tuple[list[Any], list[str]]:
    pl.seed_everything(7, verbose=False)
    numbers: Any = list(range(11))
    loaders = {
        "shuffled": lambda: DataLoader(numbers, batch_size=2, shuffle=True),
        "batch sampler": lambda: DataLoader(numbers, batch_sampler=Pairs(SequentialSampler(numbers), 2, True)),
        "iterable": lambda: DataLoader(Numbers(), batch_size=2),
    }
    model = Reader()
    runs = trainer(strategy_of(kind), max_epochs=2, use_distributed_sampler=True, **options)
    runs.fit(model, loaders[loader](), [DataLoader(numbers, batch_size=3)] * 2)
    sampler = runs.train_dataloader.batch_sampler
    kinds = [type(sampler).__name__, type(sampler.sampler).__name__]
    runs.predict(model, DataLoader(numbers, batch_size=3))
    return model.seen, kinds


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        ("shuffled", {}),
        ("shuffled", {"overfit_batches": 2}),
        ("shuffled", {"limit_train_batches": 2, "limit_val_batches": 1}),
        ("batch sampler", {}),
        ("iterable", {}),
    ],
)
def test_ranks_are_given_the_same_batches(run_ranks: RunRanks, loader: str, options: dict[str, Any]) -> None:
    theirs, ours = (run_ranks(2, batches, kind, loader, options) for kind in ("ddp", "bucketddp"))
    assert ours == theirs
    if loader != "iterable":
        assert [kinds for _, kinds in ours] == [["Pairs" if loader == "batch sampler" else "BatchSampler", SAMPLER]] * 2
    first, second = ({n for stage, _, batch in seen if stage == "train" for n in batch} for seen, _ in ours)
    assert first != second
    predicted = [n for seen, _ in ours for stage, _, batch in seen if stage == "predict" for n in batch]
    assert sorted(predicted) == list(range(11)), "once each"


# -- without training, and when it ends early --------------------------------------------------------


def evaluated(kind: str, stage: str) -> float:
    class OfRank(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.strategy.model is self, "not wrapped where there are no gradients"

        test_step = predict_step = validation_step

    model = OfRank()
    for param in model.parameters():
        nn.init.constant_(param, dist.get_rank())
    getattr(trainer(strategy_of(kind)), stage)(model, data(1))
    assert all((param == 0).all() for param in model.parameters()), "rank 0's"
    return largest_difference_between_ranks(model)


@both
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_every_rank_evaluates_the_weights_of_rank_0(run_ranks: RunRanks, kind: str, stage: str) -> None:
    assert run_ranks(2, evaluated, kind, stage) == [0.0, 0.0]


def interrupted(kind: str, how: str) -> tuple[str, str, bool, int]:
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

    runs, model, raised = trainer(strategy_of(kind)), Interrupted(), ""
    try:
        runs.fit(model, data())
    except (ArithmeticError, SIGTERMException) as error:
        raised = type(error).__name__
    hooks = sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())
    return raised, runs.state.status.value, runs.strategy.model is model, hooks


@both
@pytest.mark.parametrize(
    ("how", "raised"), [("raise", "ArithmeticError"), ("sigterm", "SIGTERMException"), ("stop", "")]
)
def test_training_that_ends_early(run_ranks: RunRanks, kind: str, how: str, raised: str) -> None:
    status = "interrupted" if raised else "finished"
    for found in run_ranks(2, interrupted, kind, how):
        assert found == (raised, status, True, 0), "unwrapped, without hooks"


def batch_size_finder(kind: str) -> str:
    with pytest.raises(MisconfigurationException) as error:
        trainer(strategy_of(kind), callbacks=[BatchSizeFinder()]).fit(Regression(), data())
    return str(error.value)


@both
def test_a_batch_size_is_not_searched_on_several_ranks(run_ranks: RunRanks, kind: str) -> None:
    for message in run_ranks(2, batch_size_finder, kind):
        assert "not supported with distributed strategies" in message
