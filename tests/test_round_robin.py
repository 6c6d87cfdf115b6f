"""Replicas of one device take turns: random numbers come in the same order each time, in checkpointed layers too."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp.replicas.apply import parallel_apply
from lightning_bucketddp.replicas.forward import ReplicatedForward
from lightning_bucketddp.replicas.replicas import data_parallel
from lightning_bucketddp.replicas.round_robin import RoundRobin
from tests.dp import fit, replicas, samples
from tests.lightning_models import Digits, Gan

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # the CPU too, but another device to compare with


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def apply(devices: list[torch.device], function: Callable[[int, RoundRobin], Any]) -> list[Any]:
    turns = RoundRobin(devices)
    modules = [Calls(function) for _ in devices]
    return parallel_apply(modules, [(index, turns) for index in range(len(devices))], turns=turns)


def test_replicas_of_one_device_run_in_order_and_those_of_others_beside_them() -> None:
    lines: list[tuple[str, int]] = []
    beside = threading.Barrier(2, timeout=30)

    def run(index: int, turns: RoundRobin) -> None:
        lines.append(("begins", index))
        beside.wait()  # the first of both devices, then the second of both
        lines.append(("ends", index))

    apply([CPU, OTHER, CPU, OTHER], run)
    for first, second in ((0, 2), (1, 3)):
        assert [line for line in lines if line[1] in (first, second)] == [
            ("begins", first), ("ends", first), ("begins", second), ("ends", second)
        ]  # fmt: skip


def test_a_replica_that_waits_lets_the_next_ones_run_and_goes_on_in_its_turn() -> None:
    lines: list[tuple[int, int]] = []
    meeting = threading.Barrier(3, timeout=30)

    def run(index: int, turns: RoundRobin) -> None:
        for number in range(4):
            lines.append((number, index))
            with turns.away(index):
                meeting.wait()
        lines.append((4, index))

    apply([CPU] * 3, run)
    assert lines == [(number, index) for number in range(5) for index in range(3)]


def test_a_replica_that_raises_lets_the_next_one_run() -> None:
    ran: list[int] = []

    def run(index: int, turns: RoundRobin) -> None:
        ran.append(index)
        if index != 1:
            raise ArithmeticError(str(index))

    with pytest.raises(ArithmeticError, match="0"):
        apply([CPU] * 3, run)
    assert ran == [0, 1, 2]


# -- random numbers ----------------------------------------------------------------------------------


class Drops(nn.Module):
    """Dropout in layers that may be checkpointed; slow enough for threads to get in each other's way."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.how == "plain" else checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


HOW = pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])


def gradients(module: nn.Module, output: Tensor) -> list[Tensor]:
    module.zero_grad()
    output.square().mean().backward()
    found = [param.grad for param in module.parameters()]
    assert None not in found
    return found  # type: ignore[return-value]


def chunk_by_chunk(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients with the module called on each part of the batch after the other."""
    plain = copy.deepcopy(module)
    plain.how = "plain"
    torch.manual_seed(3)
    return gradients(plain, torch.cat([plain(part) for part in x.chunk(3)]))


@HOW
def test_data_parallel_drops_what_calls_one_after_the_other_drop(how: str) -> None:
    torch.manual_seed(0)
    module, x = Drops(how).double(), torch.randn(48, 64, dtype=torch.float64, requires_grad=True)
    expected = chunk_by_chunk(module, x)
    for _ in range(5):
        torch.manual_seed(3)
        found = gradients(module, data_parallel(module, x, [CPU] * 3))
        torch.testing.assert_close(found, expected)


@HOW
@pytest.mark.parametrize("share", [True, False], ids=["shared", "copied"])
def test_a_forward_on_several_devices_drops_what_calls_one_after_the_other_drop(how: str, share: bool) -> None:
    torch.manual_seed(0)
    module, x = Drops(how).double(), torch.randn(48, 64, dtype=torch.float64, requires_grad=True)
    expected = chunk_by_chunk(module, x)
    forward = ReplicatedForward(module, [CPU] * 3, CPU, 0)
    if not share:
        forward.copy_parameters()
    for _ in range(5):
        torch.manual_seed(3)
        torch.testing.assert_close(gradients(module, forward(x)), expected)


class DropsDigits(Digits):
    """Metrics' calls, for which replicas wait, come between layers that drop."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.drops = Drops(how)
        self.before = nn.Linear(8, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.drops(self.before(batch[0]))
        predictions = self.head(hidden[:, :16])
        self.f1(predictions, batch[1])
        again = self.head(self.drops(hidden)[:, :16])
        return nn.functional.cross_entropy(predictions + again, batch[1])


class DropsManual(Gan):
    """Steps of optimizers, for which replicas wait, come between layers that drop."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.drops = Drops(how)
        self.before, self.after = nn.Linear(8, 64), nn.Linear(64, 8)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.critic(self.after(self.drops(self.before(batch[0])))).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.critic.parameters(), lr=0.1), torch.optim.SGD(self.drops.parameters(), lr=0.1)


@replicas
@pytest.mark.parametrize("kind", [DropsDigits, DropsManual])
def test_training_draws_the_same_numbers_each_time_in_checkpointed_layers_too(kind: Any, share: bool) -> None:
    def trained(how: str) -> dict[str, Tensor]:
        model = kind(how)
        torch.manual_seed(4)
        loader = samples((8,), classes=4 if kind is DropsDigits else 0, count=48, batch_size=24)
        fit(model, 3, share, loader)
        return model.state_dict()

    expected = trained("plain")
    torch.testing.assert_close(trained("plain"), expected, rtol=0.0, atol=0.0)
    for how in ("not reentrant", "reentrant"):
        torch.testing.assert_close(trained(how), expected, rtol=1e-4, atol=1e-6)  # as sums have another order
