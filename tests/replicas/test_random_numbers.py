"""Replicas of one device take turns: random numbers come in the same order each time, in checkpointed layers too."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp.replicas.forward import ReplicatedForward
from lightning_bucketddp.replicas.replicas import data_parallel
from tests.dp import Plain, fit, samples

CPU = torch.device("cpu")
WAYS: dict[str, Any] = {
    "data_parallel": lambda module: partial(data_parallel, module, devices=[CPU] * 3),
    "shared": lambda module: ReplicatedForward(module, [CPU] * 3, CPU, 0, True),
    "copied": lambda module: ReplicatedForward(module, [CPU] * 3, CPU, 0, False),
}


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


def gradients(module: nn.Module, output: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    output.square().mean().backward()
    return [param.grad for param in module.parameters()]


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_replicas_drop_what_calls_one_after_the_other_drop(how: str) -> None:
    torch.manual_seed(0)
    module, x = Drops(how).double(), torch.randn(48, 64, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(module)
    plain.how = "plain"
    torch.manual_seed(3)
    expected = gradients(plain, torch.cat([plain(part) for part in x.chunk(3)]))
    assert None not in expected
    for way in WAYS.values():
        forward = way(module)
        for _ in range(3):
            torch.manual_seed(3)
            torch.testing.assert_close(gradients(module, forward(x)), expected)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "copied"])
def test_training_draws_the_same_numbers_each_time(share: bool) -> None:
    trained = []
    for how in ("plain", "plain", "not reentrant", "reentrant"):
        torch.manual_seed(0)
        model = Plain(nn.Sequential(nn.Linear(8, 64), Drops(how)))
        torch.manual_seed(4)
        fit(model, 3, share, samples((8,), count=48, batch_size=24))
        trained.append(model.state_dict())
    torch.testing.assert_close(trained[1], trained[0], rtol=0.0, atol=0.0)
    for other in trained[2:]:
        torch.testing.assert_close(other, trained[0], rtol=1e-4, atol=1e-6)  # sums have another order
