"""Backwards before one step accumulate with a sharded optimizer, also inside ``forward``, as in a Trainer."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches, batch
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]
STEPS = 3


def losses_at(step: int, net: nn.Module, kind: str, rows: list[tuple[Tensor, Tensor]]) -> list[Callable[[], Tensor]]:
    """The losses of one step, made when they are called; the second reaches parameters that the first does not."""
    x, target = (torch.cat(parts) for parts in zip(*rows, strict=True))

    def loss(head: nn.Module) -> Tensor:
        hidden = torch.tanh(net.stem(x))
        return nn.functional.mse_loss(head(hidden.detach() if kind == "apart" else hidden), target)

    return [lambda: loss(net.left), lambda: loss(net.right)]


def trained(wrap: Callable[[nn.Module], BucketDDP] | None, kind: str) -> nn.Module:
    """Branches after some steps of two backwards each, none of which comes by an output of ``forward``."""
    torch.manual_seed(3)
    net = Branches()
    model = wrap(net) if wrap is not None else None
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        ranks = [dist.get_rank()] if model is not None else range(dist.get_world_size())
        first, second = losses_at(step, net, kind, [batch(step, rank) for rank in ranks])
        first().backward()
        if kind in ("local between", "cleared"):
            with model.no_sync() if model is not None else nullcontext():
                second().backward()
        if kind == "cleared":
            optimizer.zero_grad()
        second().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference_between_ranks(net) == 0
    if model is not None:
        assert model.passes >= 2 * STEPS
        model.close()
    return net


def two_backwards(kind: str, options: dict[str, Any]) -> None:
    expected = trained(None, kind).state_dict()
    for wrap in (
        lambda net: BucketDDP(net, bucket_cap_mb=0.0003),
        lambda net: BucketDDP(net, bucket_cap_mb=0.0003, shard_optimizer=True, **options),
    ):
        torch.testing.assert_close(trained(wrap, kind).state_dict(), expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("apart", {}),
        ("apart", {"scatter_every_pass": True}),
        ("shared", {}),
        ("shared", {"scatter_every_pass": True}),
        ("local between", {}),
        ("cleared", {}),
        ("cleared", {"scatter_every_pass": True}),
    ],
)
def test_two_backwards_before_a_step_accumulate(run_ranks: RunRanks, kind: str, options: dict[str, Any]) -> None:
    run_ranks(2, two_backwards, kind, options)


def gradients_of_inputs() -> None:
    """`torch.autograd.grad` through forward's output, between backward and step."""
    wrapper = BucketDDP(Branches(), bucket_cap_mb=0.0003, shard_optimizer=True)
    inputs = batch(0, dist.get_rank())[0]
    for _ in range(2):
        wrapper(inputs).sum().backward()
    params = [param for name, param in wrapper.named_parameters() if name != "idle"]
    before = [wrapper.full_grad(param) for param in params]
    inputs.requires_grad_()
    torch.autograd.grad(wrapper(inputs).sum(), inputs)
    torch.testing.assert_close([wrapper.full_grad(param) for param in params], before)
    assert all(grad.any() for grad in before)
    wrapper.close()


def test_gradients_of_inputs_leave_shards_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, gradients_of_inputs)


class TwoLosses(Regression):
    """Two plain backwards in each manual step, the second of which reaches other parameters too."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.automatic_optimization = Branches(), False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for take in ("left", "right"):
            nn.functional.mse_loss(self.net(batch[0], take), batch[1]).backward()
        optimizer.step()

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


def manual(options: dict[str, Any]) -> None:
    models = [TwoLosses(), TwoLosses()]
    for model, made in zip(models, ({}, {"shard_optimizer": True, **options}), strict=True):
        trainer(ours(**made)).fit(model, data())
        assert largest_difference_between_ranks(model) == 0
    assert not torch.equal(models[0].net.right.weight, TwoLosses().net.right.weight)
    close_to(*models)


@pytest.mark.parametrize("options", [{}, {"scatter_every_pass": True}], ids=["sharded", "scattered every pass"])
def test_two_plain_backwards_in_a_manual_step(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(2, manual, options)
