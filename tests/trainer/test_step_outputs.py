"""What ``training_step`` gives back on some ranks or on all, and what optimizers see of it."""

import warnings
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
from tests.pool import RunRanks, on_ranks
from tests.reference import largest_difference_between_ranks

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
    def __init__(self, silent: set[tuple[int, int]], optimizer: Any = None) -> None:
        super().__init__()
        self.silent, self.own = silent, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        self.log("everybodys", loss, sync_dist=True)
        return None if (dist.get_rank(), batch_idx) in self.silent else loss

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.own is None else self.own(self.parameters(), lr=0.1)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))


SOME = {(1, 1), (1, 3), (0, 2)}
# The first step too: momentum would go on moving the weights in later ones, as with one process.
ALL = {(0, 0), (1, 0), (0, 2), (1, 2)}


@pytest.mark.parametrize(
    ("silent", "with_scaler", "accumulate"),
    [(SOME, False, 1), (SOME, False, 2), (SOME, True, 2), (ALL, False, 1), (ALL, True, 1)],
)
@on_ranks(2)
def test_none_counts_as_zero_and_of_all_ranks_skips_the_step(silent: Any, with_scaler: bool, accumulate: int) -> None:
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
    assert runs.global_step == BATCHES // accumulate
    (message,) = [str(w.message) for w in caught if "returned None" in str(w.message)]
    assert f"rank {dist.get_rank()}: `training_step` returned None" in message


class LineSearch(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = loss_of(self.net, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


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


def fit_with_optimizers_that_look() -> tuple[float, dict[str, Any]]:
    model = LineSearch()
    expected = twin_of(model)
    trainer(ours()).fit(model, data(BATCHES))
    optimizer = torch.optim.LBFGS(expected.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for batches in batches_of_ranks():

        def closure(batches: Any = batches) -> Tensor:
            loss = torch.stack([loss_of(expected, batch) for batch in batches]).mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
    torch.testing.assert_close(model.net.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)

    silent = Silent({(0, 1), (1, 1)}, Own)
    trainer(ours(), plugins=[scaled()]).fit(silent, data(BATCHES))
    assert len(silent.before_step) == BATCHES, "the scaler skips the step for it too"
    looking, runs = Silent(set(), LooksAtLoss), trainer(ours(), max_steps=1)
    runs.fit(looking, data(BATCHES))
    for each in (model, silent, looking):
        assert largest_difference_between_ranks(each) == 0.0
    return runs.optimizers[0].seen, {name: float(value) for name, value in runs.callback_metrics.items()}


def test_optimizers_see_the_mean_loss_and_logs_the_own(run_ranks: RunRanks) -> None:
    (seen, first), (seen_by_other, second) = run_ranks(2, fit_with_optimizers_that_look)
    assert seen == seen_by_other == pytest.approx((first["mine"] + second["mine"]) / 2)
    assert first["mine"] != second["mine"]
    assert first["everybodys"] == second["everybodys"] == pytest.approx(seen)


class Looks(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


class SometimesWithoutLoss(LineSearch):
    """The closure gives a loss on rank 0 alone, or on none."""

    seen: tuple[Any, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> Tensor | None:
            loss = loss_of(self.net, batch)
            self.manual_backward(loss)
            return loss if batch_idx == 0 and dist.get_rank() == 0 else None

        optimizer = LightningOptimizer._to_lightning_optimizer(Looks(self.parameters()), self.trainer.strategy)
        self.seen += (optimizer.step(closure),)
        if dist.get_rank() == 0:  # no closure, so that nobody is asked for a loss
            assert optimizer.step() is None


def closures_without_loss() -> tuple[float, Any]:
    model = SometimesWithoutLoss()
    first = loss_of(model.net, next(iter(data(2)))).item()
    trainer(ours()).fit(model, data(2))
    (seen, nothing) = model.seen
    assert nothing is None
    return first, float(seen)


def test_a_closure_without_a_loss_on_one_rank_counts_as_zero(run_ranks: RunRanks) -> None:
    (first, seen), (_, other) = run_ranks(2, closures_without_loss)
    assert seen == other == pytest.approx(first / 2)
