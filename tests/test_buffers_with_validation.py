"""Module buffers stay the same on all ranks when a Trainer validates in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lightning_models import Regression, close_to, data, strategy_of, trainer
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


class Scaled(Regression):
    """A module buffer enters the loss, and follows the batches of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.scale: Tensor
        self.begins: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.begins.append(largest_difference_between_ranks(self))
        loss = nn.functional.mse_loss(self.net(batch[0]) * self.scale.clone(), batch[1])
        self.scale.mul_(0.8).add_(0.2 * batch[1].abs().mean(0))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append(largest_difference_between_ranks(self))


def trained(kind: str, validation: dict[str, Any] | None) -> tuple[list[float], int, float]:
    models = []
    for strategy in ("ddp", kind):
        model = Scaled()
        flags = validation if validation is not None else {}
        loaders = [data()] if validation is None else [data(), data(2)]
        trainer(strategy_of(strategy), max_epochs=2, **flags).fit(model, *loaders)
        models.append(model)
    expected, model = models
    if validation is None:  # `ddp` leaves each rank its own at the end
        expected.scale, model.scale = expected.scale.clone(), expected.scale.clone()
    close_to(model, expected)
    assert not torch.equal(model.scale, torch.ones(4))
    return model.begins, len(model.validated), max(model.validated, default=0.0)


@pytest.mark.parametrize(
    "validation",
    [
        None,
        {"num_sanity_val_steps": 0},
        {},
        {"val_check_interval": 2},
    ],
    ids=["none", "each epoch", "sanity check", "within an epoch"],
)
def test_a_buffer_that_enters_the_loss_is_as_with_ddp(run_ranks: RunRanks, validation: dict[str, Any] | None) -> None:
    for begins, validated, difference in run_ranks(2, trained, "bucketddp", validation):
        assert begins == [0.0] * 12
        assert difference == 0
        assert (validated > 0) == (validation is not None)
