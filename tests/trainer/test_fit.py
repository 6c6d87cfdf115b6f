"""``Trainer(strategy="bucketddp").fit``: like ``ddp`` where ``ddp`` is right, and right where it is not."""

import copy
import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from tests.lightning_models import Regression, close_to, data, ddp, ours, trainer
from tests.models import Branches, Fragile
from tests.reference import largest_difference_between_ranks
from tests.trainer.cases import case

RunRanks = Callable[..., list[Any]]
Batch = tuple[Tensor, Tensor]


class Passes(pl.Callback):
    """Counts synchronised passes."""

    count = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        assert isinstance(trainer.model, BucketDDP)
        self.count = trainer.strategy.bucket_ddp.passes


# -- like ddp ----------------------------------------------------------------------------------------

FEATURES: list[tuple[str, str, dict[str, Any]]] = [
    ("conv", "sgd", {}),
    ("mlp", "adamw", {"accumulate_grad_batches": 3}),
    ("conv", "adamw", {"gradient_clip_val": 0.05}),
    ("mlp", "sgd", {"precision": "bf16-mixed"}),
]


def with_both(net: str, optimizer: str, options: dict[str, Any]) -> None:
    passes, models = Passes(), []
    for strategy in (ddp(), ours()):
        model = Regression(net, optimizer)
        runs = trainer(strategy, max_epochs=2, callbacks=[passes] if models else [], **options)
        runs.fit(model, data())
        models.append(model)
    assert runs.model is model, "unwrapped after fit"
    accumulated = options.get("accumulate_grad_batches", 1)
    assert passes.count == runs.global_step == 12 // accumulated
    theirs, found = models
    pairs = zip(found.parameters(), theirs.parameters(), strict=True)  # `ddp` does not share its last module buffers
    torch.testing.assert_close(*zip(*pairs, strict=True))
    torch.testing.assert_close(found.before_step, theirs.before_step)
    reduced = slice(accumulated - 1, None, accumulated)
    torch.testing.assert_close(found.after_backward[reduced], theirs.after_backward[reduced])
    assert largest_difference_between_ranks(found) == 0


def all_features() -> None:
    for feature in FEATURES:
        with case(feature):
            with_both(*feature)


def test_weights_and_gradients_are_those_of_ddp(run_ranks: RunRanks) -> None:
    run_ranks(2, all_features)


class Scaled(Regression):
    """A module buffer enters the loss, and follows the batches of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.differences: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.differences.append(largest_difference_between_ranks(self))
        loss = nn.functional.mse_loss(self.net(batch[0]) * self.scale.clone(), batch[1])
        self.scale.mul_(0.8).add_(0.2 * batch[1].abs().mean(0))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.differences.append(largest_difference_between_ranks(self))


def module_buffers() -> None:
    for flags in (None, {"num_sanity_val_steps": 0}, {"val_check_interval": 2}):
        with case(flags):
            models = []
            for strategy in (ddp(), ours()):
                models.append(Scaled())
                loaders = [data()] if flags is None else [data(), data(2)]
                trainer(strategy, max_epochs=2, **(flags or {})).fit(models[-1], *loaders)
            theirs, model = models
            assert largest_difference_between_ranks(model) == 0, "at the end of fit"
            if flags is None:  # `ddp` leaves each rank its own at the end
                theirs.scale.copy_(model.scale)
            close_to(model, theirs)
            assert model.differences == [0.0] * (12 if flags is None else 16 if "num_sanity_val_steps" in flags else 26)


def test_ranks_train_and_validate_with_the_same_module_buffers(run_ranks: RunRanks) -> None:
    run_ranks(2, module_buffers)


# -- where ddp hangs, raises or drifts ---------------------------------------------------------------


class ByRank(pl.LightningModule):
    """What a rank uses depends on the rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Branches()
        self.kind = kind

    def loss_of_rank(self, batch: Batch, rank: int, batch_idx: int) -> Tensor:
        if self.kind == "constant loss" and rank == 1:
            return torch.ones((), requires_grad=True)
        take = {"branch": "left" if rank == 0 else "right", "unused": "left"}.get(self.kind, "both")
        if self.kind == "local only" and (batch_idx % 2 or rank):
            take = "left"
        return nn.functional.mse_loss(self.net(batch[0], take), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss_of_rank(batch, dist.get_rank(), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Weight decay moves a parameter whose gradient is zero and leaves one alone that has none.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def by_rank(kind: str, find_unused: bool) -> set[str]:
    """Trains on all ranks and in one process; returns the parameters that did not move."""
    accumulate, world = 2 if kind == "local only" else 1, dist.get_world_size()
    model, alone, initial = ByRank(kind), ByRank(kind), ByRank(kind)
    runs = trainer(ours(find_unused_parameters=find_unused), accumulate_grad_batches=accumulate)
    runs.fit(model, data())
    optimizer = alone.configure_optimizers()
    inputs, targets = data().dataset.tensors
    for index in range(6):
        for rank in range(world):
            rows = torch.arange(4) * world + index * 4 * world + rank  # as the distributed sampler deals them
            (alone.loss_of_rank((inputs[rows], targets[rows]), rank, index) / world / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    close_to(model, alone)
    assert largest_difference_between_ranks(model) == 0
    before = dict(initial.named_parameters())
    return {name for name, value in model.named_parameters() if torch.equal(value, before[name])}


def uses_of_ranks() -> None:
    for at, kind in enumerate(["constant loss", "branch", "unused", "local only"]):
        with case(kind):
            unused = {"net.right.weight", "net.right.bias"} if kind == "unused" else set()
            assert by_rank(kind, find_unused=bool(at % 2)) == {"net.idle"} | unused


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_rank_uses_may_depend_on_the_rank(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, uses_of_ranks)


class Backboned(Regression):
    """A frozen backbone that ``BackboneFinetuning`` unfreezes."""

    def __init__(self, net: str) -> None:
        super().__init__(net)
        self.backbone, self.head = self.net, nn.Linear(4, 4)
        del self.net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], lr=0.05, momentum=0.9)


def finetune(net: str) -> None:
    model, initial = Backboned(net), Backboned(net)
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)
    trainer(ours(), max_epochs=3, callbacks=[unfreeze]).fit(model, data())
    for value, before in zip(model.backbone.parameters(), initial.backbone.parameters(), strict=True):
        assert not torch.equal(value, before)
    assert largest_difference_between_ranks(model) == 0


@pytest.mark.parametrize(("world_size", "net"), [(2, "conv"), (3, "mlp")])
def test_an_unfrozen_backbone_stays_the_same_on_all_ranks(run_ranks: RunRanks, world_size: int, net: str) -> None:
    run_ranks(world_size, finetune, net)


class Gan(pl.LightningModule):
    """Two toggled optimizers in manual optimisation."""

    def __init__(self, plain_backward: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 4), nn.Linear(4, 1)
        self.plain_backward = plain_backward

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            fake = self.generator(batch[0])
            loss = -self.critic(fake).mean() if index == 0 else (self.critic(fake) - self.critic(batch[1])).mean()
            optimizer.zero_grad()
            loss.backward() if self.plain_backward else self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.generator, self.critic)]


class UnfreezesWithin(pl.LightningModule):
    """Unfreezes another network inside ``training_step``; some steps have a local pass first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer, net = self.optimizers(), self.second if batch_idx >= 2 else self.first
        self.requires_grad_(False)
        net.requires_grad_(True)
        optimizer.zero_grad()
        if batch_idx % 3 == 1:
            with self.trainer.strategy.block_backward_sync():
                nn.functional.mse_loss(net(batch[1] @ torch.ones(4, 8)), batch[1]).backward()
        nn.functional.mse_loss(net(batch[0]), batch[1]).backward()
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def manually() -> None:
    for make, expected in ((Gan, 12), (lambda: Gan(plain_backward=True), 12), (UnfreezesWithin, 6)):
        passes, model, initial = Passes(), make(), make()
        with case(type(model).__name__):
            trainer(ours(), callbacks=[passes]).fit(model, data())
            assert passes.count == expected
            before = dict(initial.named_parameters())
            assert not any(torch.equal(value, before[n]) for n, value in model.named_parameters() if "weight" in n)
            assert largest_difference_between_ranks(model) == 0


def test_manual_optimisation_toggles_and_unfreezes(run_ranks: RunRanks) -> None:
    run_ranks(2, manually)


# -- errors ------------------------------------------------------------------------------------------


class Failing(pl.LightningModule):
    """Rank 1 does something of its own in the fourth batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = Fragile()
        self.kind = kind
        self.net.first.requires_grad_(kind != "unfreezes")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        alone = dist.get_rank() == 1 and batch_idx == 3
        if alone and self.kind == "raises in forward":
            raise ArithmeticError("no output today")
        return nn.functional.mse_loss(self.net(batch[0], fail=alone and self.kind == "raises in backward"), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if dist.get_rank() == 1 and batch_idx == 3 and self.kind == "unfreezes":
            self.net.first.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fails(model: pl.LightningModule, *errors: type[BaseException], within: float = 12) -> str:
    begin = time.monotonic()
    with pytest.raises(errors) as error:
        trainer(ours(timeout=timedelta(seconds=30))).fit(model, data())
    assert time.monotonic() - begin < within
    return f"{type(error.value).__name__}: {error.value}"


def failing_alone(kind: str) -> list[str]:
    first = fails(Failing(kind), ArithmeticError, PeerFailureError, RankMismatchError)
    return [first, fails(Regression(), RuntimeError)] if kind == "raises in forward" else [first]


@pytest.mark.parametrize("kind", ["raises in backward", "raises in forward", "unfreezes"])
def test_what_one_rank_does_alone_is_an_error_everywhere(run_ranks: RunRanks, kind: str) -> None:
    for rank, (message, *later) in enumerate(run_ranks(3, failing_alone, kind, fresh=True)):
        if kind == "unfreezes":
            assert f"RankMismatchError: rank {rank}: ranks disagree on which parameters are trainable" in message
            assert "in pass 3" in message
            assert "'net.first.weight'" in message
            continue
        if rank == 1:
            assert message.startswith("ArithmeticError")
        else:
            assert f"PeerFailureError: rank {rank}: pass 3 cannot be completed: rank 1 raised Arithm" in message
        if later:
            assert "expected a process group without unfinished collectives" in later[0], "no fit in this group again"
            assert "ArithmeticError: no output today" in later[0]


def more_batches() -> str:
    count = 4 - dist.get_rank()
    dataset = TensorDataset(torch.randn(count, 4, 8), torch.randn(count, 4, 4))
    try:
        trainer(ours(timeout=timedelta(seconds=30))).fit(Regression(), DataLoader(dataset, batch_size=None))
    except PeerFailureError as error:
        return str(error)
    os._exit(0)  # as a script that ends: until then Lightning waits in a broadcast of its own


def test_a_rank_with_more_batches_is_told_of_uneven_inputs(run_ranks: RunRanks) -> None:
    message, _ = run_ranks(2, more_batches, fresh=True, may_exit=[1])
    assert "rank 1 has ended training after 3 passes" in message
    assert "uneven_inputs" in message


class Skipping(Gan):
    """Some ranks skip ``manual_backward`` in the third batch."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.critic(self.generator(batch[0])).mean()
        if batch_idx != 2 or dist.get_rank() not in self.ranks:
            self.manual_backward(loss)


def skipping() -> str:
    trainer(ours()).fit(Skipping(0, 1), data())  # all together: no error
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    message = fails(Skipping(1), RankMismatchError)
    # Lightning broadcasts something in each batch; rank 1 waits there, and would until rank 0's process has ended.
    os.kill(processes[1], signal.SIGKILL)
    return message


def test_a_manual_backward_that_one_rank_skips_is_noticed(run_ranks: RunRanks) -> None:
    message = run_ranks(2, skipping, fresh=True, may_exit=[1])[0]
    assert "rank 0: rank 1 ran no backward in step 3, in which rank 0 is in pass 2" in message


# -- lifecycle ---------------------------------------------------------------------------------------


def fit_again() -> tuple[list[int], list[int]]:
    model, hooks, tensors = Regression(), [], []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            hooks.append(sum(len(param._post_accumulate_grad_hooks) for param in module.parameters()))

    for _ in range(3):
        trainer(ours(), callbacks=[Look()]).fit(model, data(2))
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
        model.after_backward.clear()
        model.before_step.clear()
        gc.collect()
        tensors.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    assert largest_difference_between_ranks(model) == 0
    return hooks, tensors


def test_fit_again_leaves_one_set_of_hooks_and_no_memory(run_ranks: RunRanks) -> None:
    for hooks, tensors in run_ranks(2, fit_again):
        assert hooks == [8] * 3, "one for each parameter"
        assert tensors[1] == tensors[2]


class Copies(pl.Callback):
    """Copies all callbacks in the given hook. They hold the Trainer, and so the strategy."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.copied = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer = trainer

    def _copy(self, hook: str) -> None:
        if hook == self.hook:
            self.copied += 1
            (copied,) = copy.deepcopy(self.trainer.callbacks)
            assert copied.trainer is not self.trainer
            assert copied.trainer.callbacks[0] is copied

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copy("on_fit_start")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._copy("on_train_batch_start")


class Unobserved(Regression):
    """Sharded gradients cannot be looked at one by one."""

    def _grads(self) -> dict[str, Tensor]:
        return {}


def copies() -> None:
    for hook in ("on_fit_start", "on_train_batch_start"):
        for sharded in (False, True):
            with case((hook, sharded)):
                callback, model = Copies(hook), Unobserved()
                trainer(ours(shard_optimizer=sharded), callbacks=[callback]).fit(model, data(2))
                assert callback.copied == 1
                assert largest_difference_between_ranks(model) == 0


def test_callbacks_can_be_copied_in_fit(run_ranks: RunRanks) -> None:
    run_ranks(2, copies)
