"""What ``training_step`` gives back on some ranks or on all, and what optimizers see of it."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.lightning_models import Regression, data, ours, trainer
from tests.models import Mlp
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]
BATCHES = 4


def batches_of_ranks() -> list[list[Any]]:
    """Per batch, what each rank gets of it."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, list(data(BATCHES)))
    return [list(batch) for batch in zip(*everybody, strict=True)]


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def twin_of(model: Regression) -> Mlp:
    twin = Mlp()
    twin.load_state_dict(model.net.state_dict())
    return twin


class Silent(Regression):
    """Returns None for the given (rank, batch) pairs."""

    def __init__(self, silent: set[tuple[int, int]], optimizer: type[torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.silent, self.own = silent, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (dist.get_rank(), batch_idx) in self.silent else loss

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.own is None else self.own(self.parameters(), lr=0.1)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))


def silent_in(silent: set[tuple[int, int]], with_scaler: bool, accumulate: int) -> tuple[list[str], int]:
    model = Silent(silent)
    expected = twin_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = trainer(ours(), accumulate_grad_batches=accumulate, **({"plugins": [scaled()]} if with_scaler else {}))
        runs.fit(model, data(BATCHES))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
    for at, batches in enumerate(batches_of_ranks()):
        for rank, batch in enumerate(batches):
            if (rank, at) not in silent:
                with torch.autocast("cpu", torch.float16) if with_scaler else nullcontext():
                    loss = loss_of(expected, batch)
                (loss / len(batches) / accumulate).backward()
        if (at + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if with_scaler else {}
    torch.testing.assert_close(model.net.state_dict(), expected.state_dict(), **tolerance)
    assert largest_difference_between_ranks(model) == 0.0
    return [str(w.message) for w in caught if "returned None" in str(w.message)], runs.global_step


@pytest.mark.parametrize(("with_scaler", "accumulate"), [(False, 1), (False, 2), (True, 2)])
def test_none_on_one_rank_counts_as_zero_and_is_said_once(
    run_ranks: RunRanks, with_scaler: bool, accumulate: int
) -> None:
    results = run_ranks(2, silent_in, {(1, 1), (1, 3), (0, 2)}, with_scaler, accumulate)
    for rank, (messages, steps) in enumerate(results):
        assert steps == BATCHES // accumulate
        assert len(messages) == 1
        assert f"rank {rank}: `training_step` returned None" in messages[0]


@pytest.mark.parametrize("with_scaler", [False, True])
def test_none_on_all_ranks_skips_the_step_everywhere(run_ranks: RunRanks, with_scaler: bool) -> None:
    # The first step too: momentum would go on moving the weights in later ones, as with one process.
    for messages, _ in run_ranks(2, silent_in, {(0, 0), (1, 0), (0, 2), (1, 2)}, with_scaler, 1):
        assert len(messages) == 1


# -- optimizers that look at the loss ----------------------------------------------------------------


class WithLbfgs(Regression):
    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = loss_of(self.net, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def fit_with_lbfgs() -> None:
    for manual in (False, True):
        model = WithLbfgs(manual)
        expected = twin_of(model)
        trainer(ours()).fit(model, data(BATCHES))
        optimizer = torch.optim.LBFGS(expected.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        for batches in batches_of_ranks():

            def closure(batches: Any = batches, optimizer: Any = optimizer, net: Any = expected) -> Tensor:
                loss = torch.stack([loss_of(net, batch) for batch in batches]).mean()
                optimizer.zero_grad()
                loss.backward()
                return loss

            optimizer.step(closure)
        torch.testing.assert_close(model.net.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
        assert largest_difference_between_ranks(model) == 0.0


def test_line_searches_see_the_loss_of_all_ranks(run_ranks: RunRanks) -> None:
    run_ranks(2, fit_with_lbfgs)


class LooksAtLoss(torch.optim.SGD):
    """Not one of torch's: its learning rate is the loss."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.seen = float(loss)
        self.param_groups[0]["lr"] = self.seen / 10
        super().step()
        return loss


class Own(torch.optim.SGD):
    """Not one of torch's."""


class LogsLoss(Silent):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        self.log("everybodys", loss, sync_dist=True)
        return loss


def fit_with_own_optimizers() -> tuple[float, dict[str, Any]]:
    model = LogsLoss(set(), LooksAtLoss)
    runs = trainer(ours(), max_steps=1)
    runs.fit(model, data(BATCHES))
    assert largest_difference_between_ranks(model) == 0.0
    silent = Silent({(0, 1), (1, 1)}, Own)
    trainer(ours(), plugins=[scaled()]).fit(silent, data(BATCHES))
    assert len(silent.before_step) == BATCHES, "the scaler skips the step for it too"
    return runs.optimizers[0].seen, {name: float(value) for name, value in runs.callback_metrics.items()}


def test_optimizers_see_the_mean_loss_and_logs_the_own(run_ranks: RunRanks) -> None:
    (seen, first), (seen_by_other, second) = run_ranks(2, fit_with_own_optimizers)
    assert seen == seen_by_other == pytest.approx((first["mine"] + second["mine"]) / 2)
    assert first["mine"] != second["mine"]
    assert first["everybodys"] == second["everybodys"] == pytest.approx(seen)


class SometimesWithoutLoss(Regression):
    """Manual: the closure gives a loss on rank 0 alone, or on none; without one the optimizer is not asked."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[float | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> Tensor | None:
            loss = loss_of(self.net, batch)
            self.manual_backward(loss)
            return loss if batch_idx == 0 and dist.get_rank() == 0 else None

        class Looks(torch.optim.Optimizer):
            def __init__(self, params: Any) -> None:
                super().__init__(params, {})

            def step(looks, closure: Any = None) -> None:
                loss = None if closure is None else closure()
                self.seen.append(None if loss is None else float(loss))

        optimizer = LightningOptimizer._to_lightning_optimizer(Looks(self.parameters()), self.trainer.strategy)
        optimizer.step(closure)
        if dist.get_rank() == 0:  # no closure, so that nobody is asked for a loss
            optimizer.step()


def closures_without_loss() -> list[float | None]:
    model = SometimesWithoutLoss()
    first = loss_of(model.net, next(iter(data(2)))).item()
    trainer(ours()).fit(model, data(2))
    return [first, *model.seen]


def test_a_closure_without_a_loss_on_one_rank_counts_as_zero(run_ranks: RunRanks) -> None:
    (first, *seen), (_, *others) = run_ranks(2, closures_without_loss)
    assert seen[::2] == others
    assert seen[1::2] == [None, None]
    assert others == [pytest.approx(first / 2), None]
