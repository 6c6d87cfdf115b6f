"""Saving and loading of sharded optimizers: whole or in parts, at other world sizes, sharded or not."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import StepLR

from lightning_bucketddp import BucketDDP, declare_element_wise
from tests.fixtures import checkpoints
from tests.fixtures.checkpoints import EPOCHS, FOLDER, KINDS, At, Saved, copies, held, precision_of, samples
from tests.models import AllKinds
from tests.optim.common import TINY, RunRanks, assert_close, assert_equal, stepped
from tests.reference import largest_difference_between_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.002, momentum=0.9, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02, initial_accumulator_value=0.3),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.005),
}


class Training:
    """A module, an optimizer with two groups and a scheduler; every rank gets the same batches."""

    def __init__(self, optimizer: str, seed: int, low: bool = True, frozen: str = "", **options: Any) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module = AllKinds(low)
        for name, param in self.module.named_parameters():
            param.requires_grad_(param.requires_grad and not (frozen and name.startswith(frozen)))
        self.ours: Any = None
        if options:
            grad_dtype = {"low.*": torch.float32} if low else None
            self.ours = BucketDDP(self.module, grad_dtype=grad_dtype, bucket_cap_mb=TINY, **options)
        params = [param for name, param in self.module.named_parameters() if name != "later"]
        self.optimizer = OPTIMIZERS[optimizer]([{"params": params[::2]}, {"params": params[1::2], "lr": 0.004}])
        self.scheduler = StepLR(self.optimizer, 2, 0.5)

    def run(self, first: int, last: int) -> "Training":
        """Trains from one step to another."""
        for step in range(first, last):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            (self.ours or self.module)(x).square().mean().backward()
            stepped(self.optimizer)
            self.scheduler.step()
        return self

    def saved(self) -> dict[str, Any] | None:
        """A checkpoint as training frameworks write it, on rank 0."""
        state = self.optimizer.state_dict() if self.ours is None else self.ours.optimizer_state_dict(self.optimizer)
        if state is None:
            return None
        whole = {"model": self.module.state_dict(), "optimizer": state, "scheduler": self.scheduler.state_dict()}
        return copy.deepcopy(whole)

    def load(self, whole: dict[str, Any], prepared: bool = True) -> None:
        self.module.load_state_dict(whole["model"])
        if prepared and self.ours is not None:
            self.ours.load_optimizer_state_dict(self.optimizer, whole["optimizer"])
        else:  # as somebody would who does not know of shards
            self.optimizer.load_state_dict(whole["optimizer"])
        self.scheduler.load_state_dict(whole["scheduler"])

    def end(self) -> dict[str, Tensor]:
        """The values, which are the same on all ranks."""
        found = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        if self.ours is not None:
            assert largest_difference_between_ranks(self.module) == 0
            self.ours.close()
        return found


SAVED, LAST = 3, 6


def save(folder: str, optimizer: str, low: bool, shard: bool) -> dict[str, Tensor]:
    """Trains and saves in both ways; the values at the end of a training that was not interrupted."""
    training = Training(optimizer, 0, low, shard_optimizer=shard).run(0, SAVED)
    whole = training.saved()
    assert (whole is None) == (dist.get_rank() != 0)
    if whole is not None:
        torch.save(whole, f"{folder}/whole.pt")
    extra = {"scheduler": training.scheduler.state_dict()}
    training.ours.save_sharded(f"{folder}/parts", [training.optimizer], extra=extra)
    return training.run(SAVED, LAST).end()


def load(folder: str, optimizer: str, low: bool, expected: dict[str, Tensor]) -> None:
    """Loads in all ways, goes on and compares."""
    whole = torch.load(f"{folder}/whole.pt")
    assert low == ("master_params" in whole["optimizer"])
    for shard, parts, steps_before in [(True, True, 2), (True, False, 2), (True, False, 0), (False, True, 2)]:
        training = Training(optimizer, 1, low, shard_optimizer=shard).run(100, 100 + steps_before)
        if parts:
            extra = training.ours.load_sharded(f"{folder}/parts", [training.optimizer])
            training.scheduler.load_state_dict(extra["scheduler"])
        else:
            training.load(copy.deepcopy(whole))  # torch keeps references
        assert_equal(training.ours.optimizer_state_dict(training.optimizer, every_rank=True), whole["optimizer"])
        assert_equal(training.module.state_dict(), whole["model"])
        assert largest_difference_between_ranks(training.module) == 0
        assert_close(training.run(SAVED, LAST).end(), expected)


@pytest.mark.parametrize(
    ("optimizer", "shard", "saved_at", "loaded_at"),
    [
        ("adamw", True, 3, (3, 2, 1)),
        ("sgd", True, 3, (2,)),
        ("rmsprop", True, 1, (3,)),
        ("adagrad", True, 2, (3,)),
        ("nadam", False, 2, (3,)),
    ],
)
def test_training_goes_on_at_any_world_size(
    run_ranks: RunRanks, tmp_path: Path, optimizer: str, shard: bool, saved_at: int, loaded_at: tuple[int, ...]
) -> None:
    expected = run_ranks(saved_at, save, str(tmp_path), optimizer, True, shard)[0]
    for world_size in loaded_at:
        run_ranks(world_size, load, str(tmp_path), optimizer, True, expected)


def load_plain(whole: dict[str, Any], optimizer: str) -> list[dict[str, Tensor]]:
    found = []
    for prepared in (True, False):
        training = Training(optimizer, 1, low=False, shard_optimizer=True)
        training.load(copy.deepcopy(whole), prepared)
        found.append(training.run(SAVED, LAST).end())
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_plain_optimizers_load_what_a_sharded_one_saved_and_back(
    run_ranks: RunRanks, tmp_path: Path, optimizer: str
) -> None:
    expected = run_ranks(3, save, str(tmp_path), optimizer, False, True)[0]
    plain = Training(optimizer, 1, low=False)
    plain.load(torch.load(tmp_path / "whole.pt"))
    assert_close(plain.run(SAVED, LAST).end(), expected)
    for found in run_ranks(3, load_plain, Training(optimizer, 0, low=False).run(0, SAVED).saved(), optimizer)[0]:
        assert_close(found, expected)


def change_what_is_trained(optimizer: str, shard: bool) -> tuple[dict[str, Tensor], int]:
    """Loads, unfreezes and adds a group in between; the values and how many layouts there were."""
    training = Training(optimizer, 0, shard_optimizer=shard).run(0, 2)
    state = training.ours.optimizer_state_dict(training.optimizer, every_rank=True)
    found = training.end()
    training = Training(optimizer, 1, frozen="low", shard_optimizer=shard)  # has state, and masters
    ours, module = training.ours, training.module
    assert isinstance(module, AllKinds)
    ours.load_state_dict(found)
    ours.load_optimizer_state_dict(training.optimizer, state)
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
        if ours.layout != layouts[-1]:
            layouts.append(ours.layout)
    return training.end(), len(layouts)


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_state_moves_with_its_parameters(run_ranks: RunRanks, optimizer: str) -> None:
    expected, _ = run_ranks(3, change_what_is_trained, optimizer, False)[0]
    found, layouts = run_ranks(3, change_what_is_trained, optimizer, True)[0]
    assert layouts > 3
    assert_close(found, expected)


# -- directories ---------------------------------------------------------------------------------------


class Wide(nn.Module):
    """One layer, large enough for its values to outweigh what files say of them; extra state of changing size."""

    def __init__(self, seen: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(800, 128)
        self.tail = nn.Module()  # behind the layer, which divides the work of writing
        self.tail.register_buffer("mean", torch.zeros(2))
        self.seen = torch.arange(seen)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Tensor:
        return self.seen.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 800)).square().mean().backward()
    stepped(optimizer)


def save_wide(folder: str) -> tuple[int, list[dict[str, Any]]]:
    module = Wide(3)
    ours = BucketDDP(module, shard_optimizer=True)
    optimizers = [torch.optim.AdamW([module.layer.weight]), torch.optim.SGD([module.layer.bias], lr=0.1)]
    for optimizer in optimizers:
        one_step(ours, optimizer)
    module.tail.mean.fill_(dist.get_rank() + 1.0)
    ours.save_sharded(f"{folder}/parts", optimizers, extra={"rank": dist.get_rank()})
    with pytest.raises(FileExistsError, match=r"expected nothing at .*/parts, found something"):
        ours.save_sharded(f"{folder}/parts", optimizers)
    left = Path(f"{folder}/parts.partial/__9_0.distcp")  # of a save that was interrupted, with more ranks
    if dist.get_rank() == 0:
        left.parent.mkdir(exist_ok=True)
        left.touch()
    ours.save_sharded(f"{folder}/parts", optimizers, extra={"rank": dist.get_rank()}, overwrite=True)
    states = [ours.optimizer_state_dict(optimizer, every_rank=True) for optimizer in optimizers]
    ours.close()
    ours.save_sharded(f"{folder}/late", optimizers, extra={"rank": dist.get_rank()})
    with pytest.raises(RuntimeError, match="load before that"):
        ours.load_sharded(f"{folder}/late")
    for shard in (True, False):
        loaded = BucketDDP(Wide(), shard_optimizer=shard)
        loaded.load_sharded(f"{folder}/parts")
        assert_equal(loaded.module.state_dict()["_extra_state"], torch.arange(3))
        loaded.close()
    return sum(value.nbytes for value in module.state_dict().values()), states


def test_each_rank_writes_its_share_and_torch_reads_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    model_bytes, states = run_ranks(3, save_wide, str(tmp_path))[0]
    assert sorted(it.name for it in tmp_path.iterdir()) == ["late", "parts"]
    for folder in ("parts", "late"):  # the latter from a wrapper that was closed
        sizes = {it.name: it.stat().st_size for it in (tmp_path / folder).iterdir() if it.suffix == ".distcp"}
        assert sorted(sizes) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
        assert max(sizes.values()) < 1.05 * 3 * model_bytes / 3, "more than a third of parameters and two moments"
        dcp_to_torch_save(tmp_path / folder, tmp_path / "one.pt")
        whole = torch.load(tmp_path / "one.pt", weights_only=False)
        module = Wide()
        module.load_state_dict(whole["model"])
        assert torch.equal(module.tail.mean, torch.ones(2)), "module buffers are rank 0's"
        assert whole["extra"] == {"rank": 0}
        for saved, state, name in zip(whole["optimizers"], states, ["layer.weight", "layer.bias"], strict=True):
            assert saved["param_groups"][0]["params"] == [name]
            assert_equal(saved.get("state", {}).get(name, {}), state["state"].get(0, {}))


class Odd(Exception):
    """One that cannot be unpickled."""

    def __init__(self, *, why: str) -> None:
        super().__init__(why)


class RaisingOnce(torch.optim.SGD):
    """Cannot tell its state on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise Odd(why="no state today")
        return super().state_dict()


def refused(folder: str) -> list[str]:
    """What is said of checkpoints that do not fit."""
    found: list[str] = []

    def note(kind: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(kind) as caught:
            call()
        found.append(str(caught.value))

    def try_load(kind: type[Exception], change: Callable[[Wide], object], number: int = 2, path: str = "parts") -> None:
        module = Wide()
        change(module)
        before = copy.deepcopy(module.state_dict())
        ours = BucketDDP(module, shard_optimizer=True)
        groups = [[param for name, param in module.named_parameters() if name.endswith("weight")], [module.layer.bias]]
        optimizers = [torch.optim.AdamW(groups[0]), torch.optim.SGD(groups[1], lr=0.1), torch.optim.SGD(groups[1])]
        note(kind, lambda: ours.load_sharded(f"{folder}/{path}", optimizers[:number]))
        assert_equal(module.state_dict(), before)
        one_step(ours, optimizers[0])
        ours.close()

    try_load(ValueError, lambda module: module.register_buffer("other", torch.zeros(1)))
    try_load(ValueError, lambda module: module.tail.__delattr__("mean"))
    try_load(ValueError, lambda module: module.tail.register_buffer("mean", torch.zeros(4)))
    try_load(ValueError, lambda module: None, number=1)
    try_load(ValueError, lambda module: None, number=3)
    try_load(RuntimeError, lambda module: None, path="nothing")
    module = Wide()
    ours = BucketDDP(module, shard_optimizer=True)
    swapped = [torch.optim.SGD([module.layer.bias], lr=0.1), torch.optim.AdamW([module.layer.weight])]
    note(ValueError, lambda: ours.load_sharded(f"{folder}/parts", swapped))
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(5))], lr=0.1)
    note(ValueError, lambda: ours.save_sharded(f"{folder}/new", [stranger]))
    raising = declare_element_wise(RaisingOnce)([module.layer.weight], lr=0.1)
    note(RuntimeError, lambda: ours.save_sharded(f"{folder}/new", [raising]))
    note(RuntimeError, lambda: ours.save_sharded(f"{folder}/new", extra={"cannot be pickled": lambda: None}))
    if dist.get_rank() == 1:
        Path(f"{folder}/parts/__2_0.distcp").unlink()
    dist.barrier()
    note(RuntimeError, lambda: ours.load_sharded(f"{folder}/parts"))
    ours.close()
    return found


def test_what_does_not_fit_is_refused_by_every_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(3, save_wide, str(tmp_path))
    first, second = run_ranks(2, refused, str(tmp_path))
    assert first == second
    expected = [
        "the names of the module in the checkpoint, found one without 'other'",
        "the names of the module in the checkpoint, found one with unknown 'tail.mean'",
        "Size mismatch between saved torch.Size([2]) and current: torch.Size([4]) for model.tail.mean",
        "expected as many optimizers as the checkpoint has, 2, found 1",
        "expected as many optimizers as the checkpoint has, 2, found 3",
        "expected a directory that save_sharded() has written, found none",
        "expected group 0 of optimizer 0 to hold the parameters with which it was saved, found 'layer.bias' in",
        "expected optimizer 0 to hold parameters of the module, which are saved by name; found another one",
        "failed on rank 1: Odd: no state today",
        "failed on rank 0: ",
        "__2_0.distcp",
    ]
    assert [words for words, said in zip(expected, first, strict=True) if words not in said] == []
    assert not (tmp_path / "new").exists()


# -- one rank's own ------------------------------------------------------------------------------------


def local_state_dicts(folder: str) -> None:
    """What ``optimizer.state_dict()`` and ``load_state_dict()`` of a sharded optimizer do by themselves."""
    training = Training("adamw", 0, shard_optimizer=True).run(0, 2)
    rank = dist.get_rank()
    if rank == 0:
        assert "bucketddp_shard" in training.optimizer.state_dict()  # alone, and does not wait
    torch.save(training.optimizer.state_dict(), f"{folder}/{rank}.pt")
    training.run(2, 4)
    mine = torch.load(f"{folder}/{rank}.pt")
    training.optimizer.load_state_dict(copy.deepcopy(mine))
    assert_equal(training.optimizer.state_dict(), mine)
    dist.barrier()
    with pytest.raises(ValueError, match=r"found one of another shard; save BucketDDP.optimizer_state_dict"):
        training.optimizer.load_state_dict(torch.load(f"{folder}/{1 - rank}.pt"))
    training.run(2, 4).end()


def test_a_ranks_own_state_dict_is_its_own(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, local_state_dicts, str(tmp_path))


def saved_bytes(value: Any) -> int:
    stream = io.BytesIO()
    torch.save(value, stream)
    return len(stream.getvalue())


def filtered() -> None:
    ours = BucketDDP(Wide(), shard_optimizer=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):  # buckets are laid out again after the first pass
        one_step(ours, optimizer)
    momentum = ours.optimizer_state_dict(optimizer, every_rank=True)["state"][1]
    assert saved_bytes(momentum) < ours.module.layer.bias.nbytes + 2000
    assert len(ours.layout.buckets) == 1
    state_dict = ours.module.state_dict()
    weight, bias = state_dict["layer.weight"], state_dict["layer.bias"]
    assert saved_bytes({"layer.bias": bias}) < bias.nbytes + 2000
    assert saved_bytes(state_dict) < weight.nbytes + bias.nbytes + 5000
    assert copy.deepcopy(bias).untyped_storage().nbytes() == bias.nbytes
    with torch.no_grad():
        ours.module.layer.bias.fill_(3.0)
    assert torch.equal(bias, torch.full_like(bias, 3.0)), "nothing was copied for it"
    ours.close()
    del ours, optimizer, state_dict, weight
    assert torch.equal(bias, torch.full_like(bias, 3.0)), "memory lives as long as somebody has it"


def test_a_filtered_state_dict_holds_its_tensors_only(run_ranks: RunRanks) -> None:
    run_ranks(2, filtered)


# -- checkpoints of version 0.1.0 ------------------------------------------------------------------------

EXPECTED: dict[str, Any] = torch.load(FOLDER / "expected.pt", weights_only=True)


def assert_next(module: nn.Module, kind: str) -> None:
    """The weights after one more step, up to what processors round differently."""
    tolerance = 2e-2 if precision_of(kind) == "bf16-true" else 1e-4
    expected = EXPECTED[kind]["next"]
    torch.testing.assert_close(dict(module.state_dict()), dict(expected), rtol=tolerance, atol=tolerance)


def go_on(kind: str) -> None:
    """In a Trainer, and with a wrapper."""
    expected, path = EXPECTED[kind], FOLDER / kind
    seen: list[int] = []

    def look(trainer: pl.Trainer) -> None:
        assert_equal(held(trainer), expected["saved"])
        seen.append(trainer.global_step)

    look_first = At("on_train_start", look)
    runs = checkpoints.run(kind, EPOCHS + 1, look_first, seed=1, ckpt_path=str(path), weights_only=False)
    assert seen == [EPOCHS]
    assert runs.global_step == EPOCHS + 1
    assert_next(runs.lightning_module, kind)

    module = Saved(seed=1)
    if precision_of(kind) == "bf16-true":
        module.bfloat16()
    options = {name: value for name, value in KINDS[kind].items() if name != "state_dict_type"}
    model = BucketDDP(module, bucket_cap_mb=0.0003, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)  # the checkpoint has the rate
    if path.is_dir():
        assert model.load_sharded(path, [optimizer])["epoch"] == EPOCHS - 1
    else:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["state_dict"])
        model.load_optimizer_state_dict(optimizer, saved["optimizer_states"][0])
    assert_equal(copies(model, optimizer), expected["saved"])
    inputs, target = (tensor.to(model.module.head.weight.dtype) for tensor in samples())
    nn.functional.mse_loss(model(inputs), target).backward()
    optimizer.step()
    assert_next(model, kind)
    model.close()


@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 2) for kind in KINDS), ("directory.ckpt", 1), ("sharded.ckpt", 1)], ids=str
)
def test_training_goes_on_from_a_checkpoint_of_0_1_0(run_ranks: RunRanks, kind: str, ranks: int) -> None:
    run_ranks(ranks, go_on, kind)
