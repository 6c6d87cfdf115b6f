"""Calls of ``BucketDDP`` that the strategies pass on, compared with ``ddp`` and torch's utilities."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, BucketDDPFabricStrategy, BucketDDPStrategy
from tests.lightning_models import Regression, close_to, data, ddp, ours, trainer
from tests.models import Mlp, batch
from tests.test_fabric import start

RunRanks = Callable[..., list[Any]]
CALLS: dict[str, tuple[Any, ...]] = {
    "count_tokens": (4,),
    "last_pass": (),
    "full_grad": (torch.zeros(1),),
    "clip_grad_norm_": (1.0,),
    "clip_grad_value_": (1.0,),
}


class Clipped(Regression):
    """Sums its loss and counts tokens, and clips in two ways; with ``ddp`` it does so with torch's utilities."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        if not isinstance(strategy, BucketDDPStrategy):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])
        strategy.count_tokens(batch[1].numel())
        return nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum")

    def on_after_backward(self) -> None:
        """Not looked at: gradients may be sharded."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        params = dict(self.named_parameters())
        if isinstance(strategy, BucketDDPStrategy):
            self.before_step.append({name: strategy.full_grad(param) for name, param in params.items()})
            norm = strategy.clip_grad_norm_(0.05)
            strategy.clip_grad_value_(0.01)
            self.passes = strategy.last_pass().number + 1
        else:
            self.before_step.append(self._grads())
            norm = nn.utils.clip_grad_norm_(params.values(), 0.05)
            nn.utils.clip_grad_value_(params.values(), 0.01)
        assert norm > 0.05


def fitted(strategy: Any) -> tuple[Clipped, pl.Trainer]:
    model = Clipped()
    runs = trainer(strategy)
    runs.fit(model, data())
    return model, runs


def calls_in_a_trainer(shard_optimizer: bool) -> list[str]:
    model, runs = fitted(ours(gradient_divide_by="tokens", shard_optimizer=shard_optimizer))
    expected, _ = fitted(ddp())
    assert model.passes == len(model.before_step) == 6
    torch.testing.assert_close(model.before_step, expected.before_step)
    close_to(model, expected)
    return [said(lambda name=name, args=args: getattr(runs.strategy, name)(*args)) for name, args in CALLS.items()]


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize("shard_optimizer", [False, True], ids=["whole", "sharded"])
def test_the_trainers_strategy_counts_clips_and_shows_gradients(run_ranks: RunRanks, shard_optimizer: bool) -> None:
    messages = run_ranks(2, calls_in_a_trainer, shard_optimizer)[0]
    assert messages == [f"expected {name}() to be called during fit, found no wrapped module" for name in CALLS]


def calls_in_fabric() -> list[str]:
    fabric = start("bucketddp", gradient_divide_by="tokens")
    strategy = fabric.strategy
    torch.manual_seed(5)
    plain = Mlp()
    model = fabric.setup(plain)
    inputs, target = batch(0, fabric.global_rank)
    strategy.count_tokens(target.numel())
    fabric.backward(nn.functional.mse_loss(model(inputs), target, reduction="sum"))
    torch.manual_seed(5)
    whole = Mlp()  # in one process, on both ranks' batches
    both = [torch.cat(parts) for parts in zip(batch(0, 0), batch(0, 1), strict=True)]
    nn.functional.mse_loss(whole(both[0]), both[1]).backward()
    for param, reference in zip(plain.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(strategy.full_grad(param), reference.grad)
    assert strategy.last_pass().number == 0
    norm = strategy.clip_grad_norm_(0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.01))
    strategy.clip_grad_value_(0.001)
    nn.utils.clip_grad_value_(whole.parameters(), 0.001)
    for param, reference in zip(plain.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad, reference.grad)
    kept = [model, fabric.setup(Mlp())]  # the strategy forgets a module that nobody holds
    assert len(kept) == 2
    return [said(lambda name=name, args=args: getattr(strategy, name)(*args)) for name, args in CALLS.items()]


def test_fabrics_strategy_does_so_for_its_one_module(run_ranks: RunRanks) -> None:
    for name, message in zip(CALLS, run_ranks(2, calls_in_fabric)[0], strict=True):
        assert f"where {name}() is called, found 2" in message
        assert f"strategy.wrapper_of(module).{name}()" in message


@pytest.mark.parametrize("strategy", [BucketDDPStrategy, BucketDDPFabricStrategy])
def test_calls_have_the_arguments_of_the_wrappers(strategy: type) -> None:
    for name in CALLS:
        assert inspect.signature(getattr(strategy, name)) == inspect.signature(getattr(BucketDDP, name))
