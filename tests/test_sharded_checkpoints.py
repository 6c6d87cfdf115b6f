"""Saving and loading of sharded optimizers: whole or in parts, at other world sizes, sharded or not, and by torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from lightning_bucketddp import BucketDDP
from tests.models import AllKinds
from tests.reference import largest_difference_between_ranks
from tests.test_planned_buckets import one_per_piece, with_plan

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB: several buckets

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.002, momentum=0.9, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02, initial_accumulator_value=0.3),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.005),
}
LOW = {"low.*": torch.float32}


class Training:
    """A module, an optimizer with two groups and a scheduler; every rank gets the same batches."""

    def __init__(self, optimizer: str, seed: int, low: bool = True, frozen: str = "", **options: Any) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module = AllKinds(low)
        for name, param in self.module.named_parameters():
            param.requires_grad_(param.requires_grad and not (frozen and name.startswith(frozen)))
        self.ours: BucketDDP | None = None
        if options:
            grad_dtype = LOW if low else None
            self.ours = BucketDDP(self.module, grad_dtype=grad_dtype, **{"bucket_cap_mb": TINY, **options})
        params = [param for name, param in self.module.named_parameters() if name != "later"]
        self.optimizer = OPTIMIZERS[optimizer]([{"params": params[::2]}, {"params": params[1::2], "lr": 0.004}])
        self.scheduler: LRScheduler = StepLR(self.optimizer, 2, 0.5)

    def run(self, first: int, last: int) -> None:
        """Trains from one step to another."""
        for step in range(first, last):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            (self.ours or self.module)(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def saved(self) -> dict[str, Any] | None:
        """A checkpoint as training frameworks write it, on rank 0."""
        state = self.optimizer.state_dict() if self.ours is None else self.ours.optimizer_state_dict(self.optimizer)
        if state is None:
            return None
        whole = {"model": self.module.state_dict(), "optimizer": state, "scheduler": self.scheduler.state_dict()}
        return copy.deepcopy(whole)

    def load(self, whole: dict[str, Any]) -> None:
        """Loads one."""
        self.module.load_state_dict(whole["model"])
        if self.ours is None:
            self.optimizer.load_state_dict(whole["optimizer"])
        else:
            self.ours.load_optimizer_state_dict(self.optimizer, whole["optimizer"])
        self.scheduler.load_state_dict(whole["scheduler"])

    def values(self) -> dict[str, Tensor]:
        """Copies of parameters and module buffers."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def end(self) -> dict[str, Tensor]:
        """The values, which are the same on all ranks."""
        values = self.values()
        if self.ours is not None:
            assert largest_difference_between_ranks(self.module) == 0
            self.ours.close()
        return values


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        tolerance = 1e-2 if value.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(mine: Any, theirs: Any, where: str = "") -> None:
    """Asserts that nested containers are the same, bit for bit."""
    if isinstance(theirs, Tensor):
        assert isinstance(mine, Tensor), where
        assert mine.dtype is theirs.dtype, f"{where}: {mine.dtype} {theirs.dtype}"
        assert torch.equal(mine, theirs), f"{where}: {mine} {theirs}"
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), f"{where}: {list(mine)} {list(theirs)}"
        for key in theirs:
            assert_equal(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), where
        for at, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(one, other, f"{where}.{at}")
    else:
        assert mine == theirs, f"{where}: {mine} {theirs}"


SAVED, LAST = 3, 6


def save(folder: str, optimizer: str, low: bool, shard: bool) -> dict[str, Tensor]:
    """Trains and saves in both ways; the values at the end of a training that was not interrupted."""
    training = Training(optimizer, 0, low, shard_optimizer=shard)
    training.run(0, SAVED)
    whole = training.saved()
    assert (whole is None) == (dist.get_rank() != 0)
    if whole is not None:
        torch.save(whole, f"{folder}/whole.pt")
    assert training.ours is not None
    training.ours.save_sharded(
        f"{folder}/parts", [training.optimizer], extra={"scheduler": training.scheduler.state_dict()}
    )
    training.run(SAVED, LAST)
    return training.end()


def load(folder: str, optimizer: str, low: bool, expected: dict[str, Tensor]) -> None:
    """Loads in all ways, goes on and compares."""
    whole = torch.load(f"{folder}/whole.pt")
    assert low == ("master_params" in whole["optimizer"])
    ways = [(True, parts, before) for parts in (True, False) for before in (0, 2)]
    for shard, parts, steps_before in [*ways, (False, True, 2), (False, False, 0)]:
        training = Training(optimizer, 1, low, shard_optimizer=shard)
        ours = training.ours
        assert ours is not None
        training.run(100, 100 + steps_before)
        if parts:
            extra = ours.load_sharded(f"{folder}/parts", [training.optimizer])
            training.scheduler.load_state_dict(extra["scheduler"])
        else:
            training.load(copy.deepcopy(whole))  # torch keeps references
        assert_equal(ours.optimizer_state_dict(training.optimizer, every_rank=True), whole["optimizer"])
        assert_equal(training.module.state_dict(), whole["model"])
        assert largest_difference_between_ranks(training.module) == 0
        training.run(SAVED, LAST)
        assert_close(training.end(), expected)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_goes_on_at_any_world_size(run_ranks: RunRanks, tmp_path: Path, optimizer: str) -> None:
    expected = run_ranks(3, save, str(tmp_path), optimizer, True, True)[0]
    for world_size in (3, 2, 1):
        run_ranks(world_size, load, str(tmp_path), optimizer, True, expected)


def to_and_from_plain(folder: str, optimizer: str) -> dict[str, Tensor] | None:
    """One process without a wrapper: loads what was saved, goes on, and saves what it has trained itself."""
    plain = Training(optimizer, 1, low=False)
    plain.load(torch.load(f"{folder}/whole.pt"))
    plain.run(SAVED, LAST)
    first = plain.end()
    plain = Training(optimizer, 0, low=False)
    plain.run(0, SAVED)
    torch.save(plain.saved(), f"{folder}/plain.pt")
    return first


def load_plain(folder: str, optimizer: str, prepared: bool) -> dict[str, Tensor]:
    training = Training(optimizer, 1, low=False, shard_optimizer=True)
    whole = torch.load(f"{folder}/plain.pt")
    if prepared:
        training.load(whole)
    else:  # as somebody would who does not know of shards
        training.module.load_state_dict(whole["model"])
        training.optimizer.load_state_dict(whole["optimizer"])
        training.scheduler.load_state_dict(whole["scheduler"])
    training.run(SAVED, LAST)
    return training.end()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad"])
def test_plain_optimizers_load_what_a_sharded_one_saved_and_back(
    run_ranks: RunRanks, tmp_path: Path, optimizer: str
) -> None:
    expected = run_ranks(3, save, str(tmp_path), optimizer, False, True)[0]
    assert_close(to_and_from_plain(str(tmp_path), optimizer), expected)
    for prepared in (True, False):
        assert_close(run_ranks(3, load_plain, str(tmp_path), optimizer, prepared)[0], expected)


def change_what_is_trained(optimizer: str, shard: bool, planned: bool, last: int) -> tuple[dict[str, Tensor], int]:
    """Loads, unfreezes and adds a group in between; the values and how many layouts there were."""
    training = Training(optimizer, 0, shard_optimizer=shard)
    assert training.ours is not None
    training.run(0, 2)
    state = training.ours.optimizer_state_dict(training.optimizer, every_rank=True)
    assert state is not None
    values = training.end()

    if planned:
        with_plan(one_per_piece, 1.0, 1.1)  # tried and given up
    cap = "auto" if planned else TINY
    training = Training(optimizer, 1, frozen="low", shard_optimizer=shard, bucket_cap_mb=cap)  # has state, and masters
    ours, module = training.ours, training.module
    assert ours is not None
    assert isinstance(module, AllKinds)
    ours.load_state_dict(values)
    ours.load_optimizer_state_dict(training.optimizer, state)
    layouts = [ours.layout]
    for step in range(2, last):
        if step == 4:
            module.frozen.requires_grad_(True)
            module.low.requires_grad_(True)
        if step == 6:
            training.optimizer.add_param_group({"params": [module.later], "lr": 0.01})
            module.later.requires_grad_(True)
        training.run(step, step + 1)
        if ours.layout != layouts[-1]:
            layouts.append(ours.layout)
    assert (ours.bucket_plan is not None) == planned
    return training.end(), len(layouts)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_state_moves_with_its_parameters(run_ranks: RunRanks, optimizer: str, planned: bool) -> None:
    last = 24 if planned else 9
    expected, _ = run_ranks(3, change_what_is_trained, optimizer, False, False, last)[0]
    found, layouts = run_ranks(3, change_what_is_trained, optimizer, True, planned, last, fresh=planned)[0]
    assert layouts > (5 if planned else 3)
    assert_close(found, expected)
