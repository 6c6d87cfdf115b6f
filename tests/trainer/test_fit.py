"""``Trainer(strategy="bucketddp").fit`` where ``ddp`` hangs, raises or drifts; errors; fits one after the other."""

import gc
import os
import warnings
import weakref
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import PeerFailureError, RankMismatchError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.abort_listener import listen
from lightning_bucketddp.peers.peers import Peers
from tests.lightning_models import Gan, Regression, data, ours, scaler, trainer
from tests.models import Branches
from tests.pool import on_ranks
from tests.reference import WHERE, drift, eventually, everyones, raises_soon

Batch = tuple[Tensor, Tensor]


class ByRank(Regression):
    """The loss, and the parameters it uses, depend on the rank."""

    def __init__(self, kind: str, own_optimizer: Any = None) -> None:
        super().__init__()
        self.net, self.kind, self.own_optimizer = Branches(), kind, own_optimizer

    def loss_of_rank(self, batch: Batch, rank: int, batch_idx: int) -> Tensor | None:
        if self.kind == "constant loss" and rank == 1:
            return torch.ones((), requires_grad=True)
        silent = {"some silent": (rank + batch_idx) % 3 == 1, "all silent": batch_idx in (0, 2)}
        if silent.get(self.kind):
            return None
        take = {"branch": "left" if rank == 0 else "right"}.get(self.kind, "both")
        if self.kind == "local only" and (batch_idx % 2 or rank):
            take = "left"
        return nn.functional.mse_loss(self.net(batch[0], take), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss_of_rank(batch, dist.get_rank(), batch_idx)
        if self.kind == "logged":
            self.log("mine", loss)
            self.log("everybodys", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.own_optimizer is not None:
            return self.own_optimizer(self.parameters(), lr=0.1)
        # Weight decay moves a parameter whose gradient is zero and leaves one alone that has none.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


BY_RANK = [(kind, 1, False) for kind in ("constant loss", "branch", "some silent", "all silent")]
BY_RANK += [("local only", 2, False), ("some silent", 2, True), ("all silent", 1, True)]


@on_ranks(3, 2, cases=BY_RANK)
def test_the_loss_may_depend_on_the_rank_or_be_none(kind: str, accumulate: int, with_scaler: bool) -> None:
    """None counts as zero. Of all ranks it skips the step."""
    world, plugins = dist.get_world_size(), [scaler(8.0)] if with_scaler else []
    model, alone, initial = ByRank(kind), ByRank(kind), ByRank(kind)
    strategy = ours(find_unused_parameters=kind == "branch")
    with warnings.catch_warnings(record=True, action="always") as caught:
        runs = trainer(strategy, accumulate_grad_batches=accumulate, plugins=plugins)
        runs.fit(model, data())
    optimizer = alone.configure_optimizers()
    inputs, targets = data().dataset.tensors
    for index in range(6):
        for rank in range(world):
            rows = torch.arange(4) * world + index * 4 * world + rank  # as the distributed sampler deals them
            with torch.autocast("cpu", torch.float16) if with_scaler else nullcontext():
                loss = alone.loss_of_rank((inputs[rows], targets[rows]), rank, index)
            if loss is not None:
                (loss / world / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if with_scaler else {}
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), **tolerance)
    assert drift(model) == 0
    assert runs.global_step == 6 // accumulate
    assert torch.equal(model.net.idle, initial.net.idle)
    told = [text.partition(". ")[0] for text in (str(warning.message) for warning in caught) if "returned None" in text]
    assert told == [f"rank {dist.get_rank()}: `training_step` returned None"] * ("silent" in kind)


class LooksAtLoss(torch.optim.SGD):
    """Not one of torch's: its learning rate is the loss."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:  # a scaler gives none
            self.seen = float(closure())
            self.param_groups[0]["lr"] = self.seen / 10
        return super().step()


class Saliency(Regression):
    """The last rank runs backwards in validation, through its module and through what the strategy trains."""

    records = False

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks, self.looked = looks, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def look(self, x: Tensor) -> None:
        if not self.looks or self.global_rank + 1 != dist.get_world_size():
            return
        with torch.enable_grad():
            for call in (self.net, self.trainer.strategy.model):
                x = x.detach().clone().requires_grad_()
                call(x).square().mean().backward()
                (expected,) = torch.autograd.grad(self.net(x).square().mean(), x)
                torch.testing.assert_close(x.grad, expected)
        self.zero_grad()
        self.looked += 1

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.look(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.look(torch.ones(2, 8))


IN_VALIDATION: dict[str, Any] = {
    "plain": ({}, {}),
    "sharded": ({"shard_optimizer": True}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "accumulated in shards": ({"shard_optimizer": True, "scatter_every_pass": True}, {"accumulate_grad_batches": 2}),
    "without buffers": ({"use_contiguous_buffers": False}, {}),
}


@on_ranks(2, 3, cases=IN_VALIDATION, quick=["accumulated in shards", "without buffers"])
def test_backwards_in_validation_on_one_rank_are_its_own(strategy: dict[str, Any], options: dict[str, Any]) -> None:
    models = Saliency(looks=True), Saliency(looks=False)
    for model in models:
        fit = trainer(ours(**strategy), max_epochs=2, val_check_interval=2, inference_mode=False, **options)
        fit.fit(model, data(4), data(2))
    assert (models[0].looked > 8) == (dist.get_rank() + 1 == dist.get_world_size())
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert drift(models[0]) == 0


@on_ranks(2)
def test_optimizers_see_the_mean_loss_and_logs_the_own() -> None:
    silent, looking = ByRank("all silent", LooksAtLoss), ByRank("logged", LooksAtLoss)
    trainer(ours(), plugins=[scaler(8.0)]).fit(silent, data())
    assert len(silent.before_step) == 6
    runs = trainer(ours(), max_steps=1)
    runs.fit(looking, data())
    for each in (silent, looking):
        assert drift(each) == 0
    seen, logged = runs.optimizers[0].seen, {name: float(value) for name, value in runs.callback_metrics.items()}
    (first, other), (first_seen, other_seen) = everyones(logged["mine"]), everyones(seen)
    assert first != other
    assert first_seen == other_seen == pytest.approx((first + other) / 2) == pytest.approx(logged["everybodys"])


class Failing(Regression):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if dist.get_rank() == 1 and batch_idx == 3:
            raise ArithmeticError("no output today")
        return super().training_step(batch, batch_idx)


@on_ranks(3, fresh=True)
def test_an_exception_on_one_rank_is_an_error_everywhere() -> None:
    rank, soon = dist.get_rank(), timedelta(seconds=30)
    others = f"rank {rank}: pass 3 cannot be completed: rank 1{WHERE} raised ArithmeticError"
    with raises_soon(ArithmeticError, PeerFailureError, match="^no output today" if rank == 1 else others):
        trainer(ours(timeout=soon)).fit(Failing(), data())
    again = r"(?s)expected a process group without unfinished collectives.*ArithmeticError: no output today"
    with raises_soon(RuntimeError, match=again):
        trainer(ours(timeout=soon)).fit(Regression(), data())


@on_ranks(2, fresh=True)
def test_a_destroyed_group_does_not_stay() -> None:
    fits = trainer(ours())
    fits.fit(Regression(), data())
    group: Any = weakref.ref(dist.group.WORLD)  # type: ignore[type-var]
    dist.destroy_process_group()
    gc.collect()
    assert group() is None, f"the next one would meet the store of {fits.strategy}"


class SlowToValidate(Regression):
    def validation_step(self, *_: Any) -> None:
        if dist.get_rank() == 1 and not self.trainer.sanity_checking:
            listener = listen(Collectives(None))
            eventually(lambda: listener.failure)  # by which time the other rank has said that it waits in vain


@on_ranks(2, fresh=True, may_exit=[1], cases=[(False, "ended training after 3 pass"), (True, "begun a validation")])
def test_a_rank_with_fewer_batches_is_named(validates: bool, words: str) -> None:
    count = 4 - dist.get_rank()
    loader = DataLoader(TensorDataset(torch.randn(count, 4, 8), torch.randn(count, 4, 4)), batch_size=None)
    words = rf"(?s)rank 1{WHERE} has {words}.*uneven_inputs"
    with raises_soon(PeerFailureError, RankMismatchError, match=words):
        trainer(ours(timeout=timedelta(seconds=30))).fit(SlowToValidate(), loader, data(1) if validates else None)
        os._exit(0)  # as a script that ends: until then Lightning waits in a broadcast of its own


class Backwards(Regression):
    """Runs as many backwards as are given: in the third step, and in the others."""

    automatic_optimization = False

    def __init__(self, unequal: int, others: int) -> None:
        super().__init__()
        self.unequal, self.others = unequal, others

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(self.unequal if batch_idx == 2 else self.others):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


@on_ranks(2, fresh=True)
def test_a_rank_that_skips_a_backward_is_named() -> None:
    trainer(ours()).fit(Backwards(0, 1), data())  # all together: no error
    rank = dist.get_rank()
    skipped = "rank 1 ran no backward in step 3, in which rank 0 is in pass 2"
    wait = LambdaCallback(on_train_batch_end=lambda *_: dist.barrier())
    with raises_soon(RankMismatchError if rank == 0 else RuntimeError, match=skipped):
        trainer(ours(), callbacks=[wait]).fit(Backwards(1 - rank, 1), data())


@on_ranks(2, cases=[1, 3], quick=["3"], fresh=True)
def test_another_number_of_backwards_is_an_error_on_all_ranks(of_rank_0: int) -> None:
    """As with PPO that stops early on KL."""
    rank, fewer = dist.get_rank(), int(of_rank_0 > 2)
    steps = rf"rank {1 - fewer} in step 3, rank {fewer} in step 4\."
    with raises_soon(RankMismatchError, match=rf"rank {rank}: ranks met in pass \d from different steps: {steps}"):
        trainer(ours()).fit(Backwards(of_rank_0 if rank == 0 else 2, 2), data())


def hooks_of(model: nn.Module) -> list[int]:
    return [len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()]


@on_ranks(2)
def test_fit_again_leaves_one_set_of_hooks_and_no_memory() -> None:
    model, tensors, at_end = Regression(), [], []
    look = LambdaCallback(on_train_end=lambda *_: at_end.append(hooks_of(model)))
    for fits in range(3):
        trainer(ours(), callbacks=[look]).fit(model, data(2))
        assert at_end == [[1] * 8] * (fits + 1)
        assert hooks_of(model) == [0] * 8
        model.after_backward, model.before_step = [], []
        gc.collect()
        tensors.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    assert drift(model) == 0
    assert tensors[2] <= tensors[1], tensors


class FailingIn(Regression):
    """Rank 1 raises in a hook."""

    def __init__(self, hook: str) -> None:
        super().__init__("conv")
        if dist.get_rank() == 1:
            setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        raise ArithmeticError("no group today")


GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "checkpoints": ("on_train_start", {"state_dict_type": "sharded", "async_save": True}, {}),
    "statistics": ("configure_model", {}, {"sync_batchnorm": True}),
}


@on_ranks(2, fresh=True, cases=GROUPS)
def test_a_rank_raises_while_the_other_makes_a_group(hook: str, options: dict[str, Any], given: dict[str, Any]) -> None:
    """torch waits there in the store, and cannot be woken: the process was ended."""
    with pytest.raises(ArithmeticError if dist.get_rank() else RuntimeError):
        trainer(ours(**options), **given).fit(FailingIn(hook), data())


@on_ranks(2)
def test_gradients_are_dropped_at_the_end_of_fit() -> None:
    """To keep them, they would have to be copied out of the buffers, beside which there may be no room."""
    module = Regression()
    trainer(ours(), max_steps=2).fit(module, data())
    assert all(param.grad is None for param in module.parameters())


@on_ranks(2)
def test_networks_that_are_trained_in_turn_meet_in_the_store_until_their_turns_have_come_once() -> None:
    parts = TensorDataset(torch.randn(24, 8), torch.randn(24, 4))
    module, asked = Gan(), list[str]()
    exchange = Peers.exchange

    def noting(peers: Peers, topic: str, mine: str) -> list[str]:
        asked.append(topic)
        return exchange(peers, topic, mine)

    with patch.object(Peers, "exchange", noting):
        trainer(ours()).fit(module, DataLoader(parts, 4))
    assert module.trainer.global_step == 12
    assert [topic for topic in asked if "trainable" in topic] == [
        f"the trainable parameters of pass {number}" for number in range(3)
    ]
    assert drift(module) == 0
