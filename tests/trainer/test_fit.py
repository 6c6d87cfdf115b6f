"""``Trainer(strategy="bucketddp").fit`` where ``ddp`` hangs, raises or drifts; errors; fits one after the other."""

import copy
import gc
import os
import signal
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import PeerFailureError, RankMismatchError
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches
from tests.pool import RunRanks, case, on_ranks
from tests.reference import largest_difference_between_ranks, raises_soon

Batch = tuple[Tensor, Tensor]


class Trained(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ByRank(Trained):
    def __init__(self, kind: str) -> None:
        torch.manual_seed(5)
        super().__init__(Branches())
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
    trainer(ours(find_unused_parameters=find_unused), accumulate_grad_batches=accumulate).fit(model, data())
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


@on_ranks(3)
def test_what_a_rank_uses_may_depend_on_the_rank() -> None:
    for at, kind in enumerate(["constant loss", "branch", "unused", "local only"]):
        with case(kind):
            unused = {"net.right.weight", "net.right.bias"} if kind == "unused" else set()
            assert by_rank(kind, find_unused=bool(at % 2)) == {"net.idle"} | unused


class UnfreezesWithin(Trained):
    """Unfreezes another network inside ``training_step``; some steps have a local pass first."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]))
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer, net = self.optimizers(), self.net[int(batch_idx >= 2)]
        self.requires_grad_(False)
        net.requires_grad_(True)
        optimizer.zero_grad()
        if batch_idx % 3 == 1:
            with self.trainer.strategy.block_backward_sync():
                nn.functional.mse_loss(net(batch[1] @ torch.ones(4, 8)), batch[1]).backward()
        nn.functional.mse_loss(net(batch[0]), batch[1]).backward()
        optimizer.step()

    def on_train_end(self) -> None:
        assert self.trainer.strategy.bucket_ddp.passes == 6


@on_ranks(2)
def test_a_training_step_unfreezes_what_it_trains() -> None:
    model = UnfreezesWithin()
    before = copy.deepcopy(model.net)
    trainer(ours()).fit(model, data())
    assert not any(torch.equal(net.weight, old.weight) for net, old in zip(model.net, before, strict=True))
    assert largest_difference_between_ranks(model) == 0


class Failing(Trained):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if dist.get_rank() == 1 and batch_idx == 3:
            raise ArithmeticError("no output today")
        return super().training_step(batch, batch_idx)


def fails(model: pl.LightningModule, *errors: type[BaseException], within: float = 12) -> str:
    with raises_soon(*errors, within=within) as error:
        trainer(ours(timeout=timedelta(seconds=30))).fit(model, data())
    return f"{type(error.value).__name__}: {error.value}"


@on_ranks(3, fresh=True)
def test_an_exception_on_one_rank_is_an_error_everywhere() -> None:
    rank = dist.get_rank()
    message = fails(Failing(nn.Linear(8, 4)), ArithmeticError, PeerFailureError)
    later = fails(Regression(), RuntimeError)
    if rank == 1:
        assert message.startswith("ArithmeticError")
    else:
        assert f"PeerFailureError: rank {rank}: pass 3 cannot be completed: rank 1 raised Arithm" in message
    assert "expected a process group without unfinished collectives" in later, "no fit in this group again"
    assert "ArithmeticError: no output today" in later


def more_batches() -> str:
    count = 4 - dist.get_rank()
    dataset = TensorDataset(torch.randn(count, 4, 8), torch.randn(count, 4, 4))
    try:
        trainer(ours(timeout=timedelta(seconds=30))).fit(Regression(), DataLoader(dataset, batch_size=None))
    except PeerFailureError as error:
        return str(error)
    os._exit(0)  # as a script that ends: until then Lightning waits in a broadcast of its own


class Skipping(Trained):
    def __init__(self, *ranks: int) -> None:
        super().__init__(nn.Linear(8, 4))
        self.automatic_optimization = False
        self.ranks = ranks

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
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


def test_a_rank_with_another_number_of_backwards_is_noticed(run_ranks: RunRanks) -> None:
    message, _ = run_ranks(2, more_batches, fresh=True, may_exit=[1])
    assert "rank 1 has ended training after 3 passes" in message
    assert "uneven_inputs" in message
    message, _ = run_ranks(2, skipping, fresh=True, may_exit=[1])
    assert "rank 0: rank 1 ran no backward in step 3, in which rank 0 is in pass 2" in message


class Look(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.hooks = [len(param._post_accumulate_grad_hooks) for param in module.parameters()]


@on_ranks(2)
def test_fit_again_leaves_one_set_of_hooks_and_no_memory() -> None:
    model, tensors, look = Regression(), [], Look()
    for _ in range(3):
        trainer(ours(), callbacks=[look]).fit(model, data(2))
        assert look.hooks == [1] * 8
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
        model.after_backward.clear()
        model.before_step.clear()
        gc.collect()
        tensors.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    assert largest_difference_between_ranks(model) == 0
    assert tensors[2] <= tensors[1], tensors


class Copies(pl.Callback):
    copied = 0

    def on_fit_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.trainer = trainer
        (copied,) = copy.deepcopy(trainer.callbacks)
        assert copied.trainer is not trainer
        assert copied.trainer.callbacks[0] is copied
        self.copied += 1

    on_train_batch_start = on_fit_start


class Unobserved(Regression):
    """Sharded gradients cannot be looked at one by one."""

    def _grads(self) -> dict[str, Tensor]:
        return {}


@on_ranks(2, cases=(False, True))
def test_callbacks_can_be_copied_in_fit(sharded: bool) -> None:
    callback, model = Copies(), Unobserved()
    trainer(ours(shard_optimizer=sharded), callbacks=[callback]).fit(model, data(2))
    assert callback.copied == 3
    assert largest_difference_between_ranks(model) == 0
