"""Saving and loading of sharded optimizers: whole or in parts, at other world sizes, sharded or not."""

import copy
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import StepLR

from lightning_bucketddp import BucketDDP, declare_element_wise
from lightning_bucketddp.optim.swap import swap_of
from tests.fixtures import checkpoints
from tests.fixtures.checkpoints import EPOCHS, FOLDER, KINDS, At, held, precision_of
from tests.models import AllKinds
from tests.optim.common import OPTIMIZERS, TINY, assert_close, assert_equal, stepped, two_groups
from tests.pool import RunRanks, case, on_ranks
from tests.reference import WHERE, drift, everyones
from tests.sampling import some_slow


class Training:
    """The same batches on every rank; there is no wrapper if ``shard`` is None."""

    def __init__(self, optimizer: str, seed: int, low: bool, shard: bool | None, frozen: str = "") -> None:
        torch.manual_seed(seed)
        self.module = AllKinds(low)
        for name, param in self.module.named_parameters():
            param.requires_grad_(param.requires_grad and not (frozen and name.startswith(frozen)))
        options = {"grad_dtype": {"low.*": torch.float32} if low else None, "bucket_cap_mb": TINY}
        self.ours: Any = None if shard is None else BucketDDP(self.module, shard_optimizer=shard, **options)
        self.optimizer = OPTIMIZERS[optimizer](two_groups(self.module))
        self.scheduler = StepLR(self.optimizer, 2, 0.5)

    def run(self, first: int, last: int) -> "Training":
        for step in range(first, last):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            (self.ours or self.module)(x).square().mean().backward()
            stepped(self.optimizer)
            self.scheduler.step()
        return self

    def state(self, **options: Any) -> dict[str, Any] | None:
        if self.ours is None:
            return self.optimizer.state_dict()
        return self.ours.optimizer_state_dict(self.optimizer, **options)

    def end(self) -> dict[str, Tensor]:
        assert drift(self.module) == 0
        return copy.deepcopy(self.module.state_dict())


SAVED, LAST = 3, 6


def save(folder: str, optimizer: str, low: bool, shard: bool | None) -> dict[str, Tensor]:
    """Trains and saves in both ways; the values at the end of a training that was not interrupted."""
    training = Training(optimizer, 0, low, shard).run(0, SAVED)
    state, scheduler = training.state(), training.scheduler.state_dict()
    assert (state is None) == (dist.get_rank() != 0)
    if state is not None:  # a checkpoint as training frameworks write it
        whole = {"model": training.module.state_dict(), "optimizer": state, "scheduler": scheduler}
        torch.save(whole, f"{folder}/whole.pt")
    if shard is not None:
        training.ours.save_sharded(f"{folder}/parts", [training.optimizer], extra={"scheduler": scheduler})
    return training.run(SAVED, LAST).end()


def load(folder: str, optimizer: str, low: bool, expected: dict[str, Tensor]) -> None:
    whole = torch.load(f"{folder}/whole.pt")
    assert low == ("master_params" in whole["optimizer"])
    ways = [(True, "whole", 2), (True, "whole", 0)]
    ways += [(True, "parts", 2), (False, "parts", 2)] if Path(f"{folder}/parts").exists() else []
    ways += [] if low else [(None, "unknowing", 0), (True, "unknowing", 0)]
    for shard, how, steps_before in ways:
        training = Training(optimizer, 1, low, shard).run(100, 100 + steps_before)
        ours, stepper = training.ours, training.optimizer
        given = copy.deepcopy(whole)  # torch keeps references
        if how == "parts":
            given = ours.load_sharded(f"{folder}/parts", [stepper])
        else:  # "unknowing": as somebody would who does not know of shards
            training.module.load_state_dict(given["model"])
            load_state = partial(ours.load_optimizer_state_dict, stepper) if how == "whole" else stepper.load_state_dict
            load_state(given["optimizer"])
        training.scheduler.load_state_dict(given["scheduler"])
        if ours is not None:
            assert_equal(training.state(every_rank=True), whole["optimizer"], how)
        assert_equal(training.module.state_dict(), whole["model"])
        assert_close(training.run(SAVED, LAST).end(), expected, how)


LOADED = [
    (("adamw", True, True), 3, 2),
    (("adagrad", False, True), 2, 3),
    (("adamw", True, True), 3, 1),
    (("adamw", False, None), 1, 3),
    (("sgd", True, True), 3, 3),
    (("rmsprop", True, True), 1, 3),
    (("nadam", True, False), 2, 3),
]


@pytest.mark.parametrize(("kind", "saved_at", "loaded_at"), some_slow(LOADED, LOADED[:2]))
def test_training_goes_on_at_any_world_size(
    run_ranks: RunRanks, tmp_path: Path, kind: tuple[str, bool, bool | None], saved_at: int, loaded_at: int
) -> None:
    expected = run_ranks(saved_at, save, str(tmp_path), *kind)[0]
    run_ranks(loaded_at, load, str(tmp_path), *kind[:2], expected)


@on_ranks(2)
@pytest.mark.parametrize("shard", [True, False])
def test_a_whole_state_stays_as_it_was(shard: bool) -> None:
    training = Training("adamw", 0, True, shard).run(0, 2)
    state = training.state(every_rank=True)
    before = copy.deepcopy(state)
    training.run(2, 4)
    assert_equal(state, before)


@on_ranks(2)
def test_an_optimizer_that_kept_a_part_of_its_state_is_refused() -> None:
    training = Training("adamw", 0, True, True).run(0, 2)
    whole = training.state(every_rank=True)
    training.ours.close()
    with pytest.raises(ValueError, match="kept this rank's part from an earlier fit"):
        BucketDDP(training.module, shard_optimizer=True).prepare_optimizer(training.optimizer)
    for mend in (lambda: training.optimizer.load_state_dict(whole), lambda: training.optimizer.state.clear()):
        mend()
        ours = BucketDDP(training.module, shard_optimizer=True)
        assert swap_of(ours.prepare_optimizer(training.optimizer)) is not None
        ours.close()


def change_what_is_trained(optimizer: str, shard: bool) -> dict[str, Tensor]:
    """Loads, unfreezes and adds a group in between."""
    first = Training(optimizer, 0, True, shard).run(0, 2)
    training = Training(optimizer, 1, True, shard, frozen="low")  # has state, and masters
    ours, module = training.ours, training.module
    ours.load_state_dict(first.module.state_dict())
    ours.load_optimizer_state_dict(training.optimizer, first.state(every_rank=True))
    layouts = [ours.layout]
    for step in range(2, 9):
        if step == 4:
            module.frozen.requires_grad_(True)
            module.low.requires_grad_(True)
        if step == 6:
            training.optimizer.add_param_group({"params": [module.later], "lr": 0.01})
            module.later.requires_grad_(True)
            with torch.no_grad():  # masters follow, where buckets move before the next step too
                module.low.weight.mul_(0.5)
        training.run(step, step + 1)
        layouts.append(ours.layout)
    pairs = pairwise([layout.buckets for layout in layouts])
    assert not shard or all(later[: len(earlier)] == earlier for earlier, later in pairs), "shards stay"
    assert len(set(layouts)) >= 3
    return training.end()


@on_ranks(3, cases=("adamw", "adagrad"), quick=["adamw"])
def test_state_of_parameters_that_are_trained_later_is_cut_into_shards(optimizer: str) -> None:
    assert_close(*(change_what_is_trained(optimizer, shard) for shard in (True, False)), optimizer)


class Wide(nn.Module):
    """One layer, large enough for its values to outweigh what files say of them; extra state of changing size."""

    def __init__(self, seen: int = 5, **buffers: int) -> None:
        super().__init__()
        self.layer = nn.Linear(800, 128)
        self.tail = nn.Module()  # behind the layer, which divides the work of writing
        for name, size in buffers.items():
            self.tail.register_buffer(name, torch.zeros(size))
        self.seen = torch.arange(seen)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Tensor:
        return self.seen.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state


def optimizers_of(module: Wide) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([module.layer.weight]), torch.optim.SGD([module.layer.bias], lr=0.1)]


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 800)).square().mean().backward()
    stepped(optimizer)


def save_wide(folder: str) -> list[dict[str, Any]]:
    module = Wide(3, mean=2)
    ours = BucketDDP(module, shard_optimizer=True)
    optimizers, extra = optimizers_of(module), {"rank": dist.get_rank()}
    for optimizer in optimizers:
        one_step(ours, optimizer)
    module.tail.mean.fill_(dist.get_rank() + 1.0)
    ours.save_sharded(f"{folder}/parts", optimizers, extra=extra)
    with pytest.raises(FileExistsError, match=r"expected nothing at .*/parts, found something"):
        ours.save_sharded(f"{folder}/parts", optimizers)
    left = Path(f"{folder}/parts.partial/__9_0.distcp")  # of a save that was interrupted, with more ranks
    if dist.get_rank() == 0:
        left.parent.mkdir(exist_ok=True)
        left.touch()
    ours.save_sharded(f"{folder}/parts", optimizers, extra=extra, overwrite=True)
    states = [ours.optimizer_state_dict(optimizer, every_rank=True) for optimizer in optimizers]
    ours.close()
    ours.save_sharded(f"{folder}/late", optimizers, extra=extra)
    with pytest.raises(RuntimeError, match="load before that"):
        ours.load_sharded(f"{folder}/late")
    for shard in (True, False):
        loaded = BucketDDP(Wide(mean=2), shard_optimizer=shard)
        loaded.load_sharded(f"{folder}/parts")
        assert_equal(loaded.module.state_dict()["_extra_state"], torch.arange(3))
        loaded.close()
    return states


class RaisingOnce(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {}["no state"] if dist.get_rank() == 1 else super().state_dict()


def test_shared_writing_is_read_by_torch(run_ranks: RunRanks, tmp_path: Path) -> None:
    states = run_ranks(3, save_wide, str(tmp_path))[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "parts"]
    most = 1.05 * sum(param.nbytes for param in Wide().parameters())  # a third of parameters and two moments
    for folder in ("parts", "late"):  # the latter from a wrapper that was closed
        sizes = {path.name: path.stat().st_size for path in (tmp_path / folder).iterdir() if path.suffix == ".distcp"}
        assert sorted(sizes) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
        assert max(sizes.values()) < most
        dcp_to_torch_save(tmp_path / folder, tmp_path / "one.pt")
        whole = torch.load(tmp_path / "one.pt", weights_only=False)
        Wide(mean=2).load_state_dict(whole["model"])
        assert torch.equal(whole["model"]["tail.mean"], torch.ones(2)), "module buffers are rank 0's"
        assert whole["extra"] == {"rank": 0}
        for saved, state, name in zip(whole["optimizers"], states, ["layer.weight", "layer.bias"], strict=True):
            assert saved["param_groups"][0]["params"] == [name]
            assert_equal(saved.get("state", {}).get(name, {}), state["state"].get(0, {}))


MISFITS: dict[str, tuple[dict[str, int], slice, str]] = {
    "a buffer more": ({"mean": 2, "other": 1}, slice(2), "module in the checkpoint, found one without 'tail.other'"),
    "a buffer less": ({}, slice(2), "the names of the module in the checkpoint, found one with unknown 'tail.mean'"),
    "another size": (
        {"mean": 4},
        slice(2),
        r"saved torch.Size\(\[2\]\) and current: torch.Size\(\[4\]\) for model.tail.m",
    ),
    "one optimizer": ({"mean": 2}, slice(1), "expected as many optimizers as the checkpoint has, 2, found 1"),
    "another order": (
        {"mean": 2},
        slice(None, None, -1),
        "of optimizer 0 to hold the parameters .*, found 'layer.bias' in",
    ),
}
"""Module buffers, which optimizers, and the error."""


def wide(**buffers: int) -> tuple[Wide, BucketDDP]:
    module = Wide(**buffers)
    return module, BucketDDP(module, shard_optimizer=True)


@on_ranks(2)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    module, ours = wide(mean=2)
    ours.save_sharded(tmp_path / "parts", optimizers_of(module))
    for name, (buffers, which, words) in MISFITS.items():
        with case(name):
            module, ours = wide(**buffers)
            before, optimizers = copy.deepcopy(module.state_dict()), optimizers_of(module)
            with pytest.raises((ValueError, RuntimeError), match=words):
                ours.load_sharded(tmp_path / "parts", optimizers[which])
            assert_equal(module.state_dict(), before)
            one_step(ours, optimizers[0])
            ours.close()


@on_ranks(2, 3)
def test_a_checkpoint_that_is_not_there_or_lacks_a_rank_s_part_is_refused(tmp_path: Path) -> None:
    module, ours = wide(mean=2)
    with pytest.raises(RuntimeError, match=r"expected a directory that save_sharded\(\) has written, found none"):
        ours.load_sharded(tmp_path / "parts", optimizers_of(module))
    ours.save_sharded(tmp_path / "parts", optimizers_of(module))
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "parts" / "__1_0.distcp").unlink()
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"__1_0\.distcp"):
        ours.load_sharded(tmp_path / "parts")


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    module, ours = wide(mean=2)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(5))], lr=0.1)
    with pytest.raises(
        ValueError, match=r"expected optimizer 0 to hold parameters of the module, .*; found another one"
    ):
        ours.save_sharded(tmp_path / "new", [stranger])
    raising = declare_element_wise(RaisingOnce)([module.layer.weight], lr=0.1)
    with pytest.raises(RuntimeError, match=f"failed on rank 1{WHERE}: KeyError: 'no state'"):
        ours.save_sharded(tmp_path / "new", [raising])
    with pytest.raises(RuntimeError, match=f"failed on rank 0{WHERE}: "):
        ours.save_sharded(tmp_path / "new", [], extra={"cannot be pickled": lambda: None})
    assert not (tmp_path / "new").exists()


def layer_of(value: float) -> tuple[nn.Linear, BucketDDP]:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, value)
    return layer, BucketDDP(layer, shard_optimizer=True)


def save_and_die(path: str, at: int) -> bool:
    """Saves ones, then twos. The process is killed at the ``at``-th change of names in the second save."""
    layer_of(1)[1].save_sharded(path)
    done: list[str] = []

    def dying(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if len(done) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(name)
            return change(*args, **options)

        return call

    names = {name: dying(name, getattr(os, name)) for name in ("rename", "replace", "unlink", "rmdir")}
    with patch.multiple(os, **names):
        layer_of(2)[1].save_sharded(path, overwrite=True)
    return True


def load_and_save(path: str) -> list[float]:
    """What a killed save has left, what is there after another one, and how many names there are then."""
    found = []
    for value in (0, 3):
        layer, ours = layer_of(value)
        if value:
            ours.save_sharded(path, overwrite=True)
        ours.load_sharded(path)
        found.append(layer.weight.unique().item())
        ours.close()
    return [*found, len(os.listdir(Path(path).parent))]


@pytest.mark.parametrize("name", some_slow(["last.ckpt", "parts"], {"parts"}))
def test_a_save_that_is_killed_leaves_a_checkpoint(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    """The old one or the new one, whenever it is killed; and the next save starts from there."""
    left = []
    for at in range(40):
        path = tmp_path / str(at) / name
        path.parent.mkdir()
        ended = run_ranks(1, save_and_die, str(path), at, fresh=True, may_exit=[0])[0]
        listed = {entry.name for entry in path.parent.iterdir()}
        if name == "last.ckpt" and not ended:  # ckpt_path="last" finds one that is complete
            lasts = [ckpt for ckpt in path.parent.iterdir() if ckpt.suffix == ".ckpt" and ckpt.stem.startswith("last")]
            assert lasts
            assert all((ckpt / ".metadata").is_file() for ckpt in lasts), listed
        value, after, count = run_ranks(1, load_and_save, str(path))[0]
        assert (value in (1, 2), after, count) == (True, 3, 1), (at, listed, value)
        left.append((path.name in listed, value))
        if ended:
            break
    assert ended
    assert {(True, 1), (False, 2), (True, 2)} <= set(left), left


@on_ranks(2)
def test_a_ranks_own_state_dict_is_its_own() -> None:
    """What ``optimizer.state_dict()`` and ``load_state_dict()`` of a sharded optimizer do by themselves."""
    training = Training("adamw", 0, True, True).run(0, 2)
    optimizer, rank = training.optimizer, dist.get_rank()
    if rank == 0:
        assert "bucketddp_shard" in optimizer.state_dict()  # alone, and does not wait
    states = everyones(optimizer.state_dict())
    training.run(2, 4)
    optimizer.load_state_dict(copy.deepcopy(states[rank]))
    assert_equal(optimizer.state_dict(), states[rank])
    with pytest.raises(ValueError, match=r"found one of another shard; save BucketDDP.optimizer_state_dict"):
        optimizer.load_state_dict(states[1 - rank])
    with pytest.raises(TypeError, match="rank 1: expected the whole state on every") if rank else nullcontext():
        training.ours.load_optimizer_state_dict(optimizer, training.state())
    training.run(2, 4).end()


@on_ranks(2)
def test_a_filtered_state_dict_holds_its_tensors_only() -> None:
    ours = BucketDDP(Wide(), shard_optimizer=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    one_step(ours, optimizer)
    assert len(ours.layout.buckets) == 1
    bias = ours.module.state_dict()["layer.bias"]
    for value in (bias, ours.optimizer_state_dict(optimizer, every_rank=True)["state"][1]):
        assert len(pickle.dumps(value)) < bias.nbytes + 2000


def go_on(kind: str) -> None:
    expected = torch.load(FOLDER / "expected.pt", weights_only=True)[kind]
    seen: list[int] = []

    def look(trainer: pl.Trainer) -> None:
        assert_equal(held(trainer), expected["saved"])
        seen.append(trainer.global_step)

    look_first = At("on_train_start", look)
    runs = checkpoints.run(kind, EPOCHS + 1, look_first, seed=1, ckpt_path=str(FOLDER / kind), weights_only=False)
    assert (*seen, runs.global_step) == (EPOCHS, EPOCHS + 1)
    tolerance = 2e-2 if precision_of(kind) == "bf16-true" else 1e-4  # what processors round differently
    weights = dict(runs.lightning_module.state_dict())
    torch.testing.assert_close(weights, dict(expected["next"]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 2) for kind in KINDS), ("directory.ckpt", 1), ("sharded.ckpt", 1)]
)
def test_training_goes_on_from_a_checkpoint_of_0_1_0(run_ranks: RunRanks, kind: str, ranks: int) -> None:
    run_ranks(ranks, go_on, kind)
