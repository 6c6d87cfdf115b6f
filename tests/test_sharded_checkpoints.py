"""Saving and loading of sharded optimizers: whole or in parts, at other world sizes, sharded or not, and by torch."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import LRScheduler, StepLR

import lightning_bucketddp
from lightning_bucketddp import BucketDDP
from tests.models import AllKinds
from tests.reference import largest_difference_between_ranks

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


@pytest.mark.parametrize(
    ("optimizer", "shard", "saved_at"),
    [*((name, True, 3) for name in OPTIMIZERS), ("adamw", False, 3), ("adamw", True, 1)],
)
def test_training_goes_on_at_any_world_size(
    run_ranks: RunRanks, tmp_path: Path, optimizer: str, shard: bool, saved_at: int
) -> None:
    expected = run_ranks(saved_at, save, str(tmp_path), optimizer, True, shard)[0]
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


def change_what_is_trained(optimizer: str, shard: bool) -> tuple[dict[str, Tensor], int]:
    """Loads, unfreezes and adds a group in between; the values and how many layouts there were."""
    training = Training(optimizer, 0, shard_optimizer=shard)
    assert training.ours is not None
    training.run(0, 2)
    state = training.ours.optimizer_state_dict(training.optimizer, every_rank=True)
    assert state is not None
    values = training.end()

    training = Training(optimizer, 1, frozen="low", shard_optimizer=shard, bucket_cap_mb=TINY)  # has state, and masters
    ours, module = training.ours, training.module
    assert ours is not None
    assert isinstance(module, AllKinds)
    ours.load_state_dict(values)
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


class Wide(nn.Module):
    """One layer, large enough for its values to outweigh what files say of them."""

    def __init__(self, width: int = 800) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 128)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 800)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_wide(folder: str) -> tuple[int, list[dict[str, Any]]]:
    module = Wide()
    ours = BucketDDP(module, shard_optimizer=True)
    optimizers = [torch.optim.AdamW([module.layer.weight]), torch.optim.SGD([module.layer.bias], lr=0.1)]
    module.mean.fill_(dist.get_rank() + 1.0)
    for optimizer in optimizers:
        one_step(ours, optimizer)
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
    return sum(value.nbytes for value in module.state_dict().values() if isinstance(value, Tensor)), states


def test_each_rank_writes_its_share_in_a_format_that_torch_reads(run_ranks: RunRanks, tmp_path: Path) -> None:
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
        assert module.seen == 7
        assert torch.equal(module.mean, torch.ones(2)), "module buffers are rank 0's"
        assert whole["extra"] == {"rank": 0}
        for saved, state, name in zip(whole["optimizers"], states, ["layer.weight", "layer.bias"], strict=True):
            assert saved["param_groups"][0]["params"] == [name]
            assert_equal(saved.get("state", {}).get(name, {}), state["state"].get(0, {}))


class CountsInTensor(nn.Linear):
    """Has a tensor as its extra state, of a size that changes."""

    def __init__(self, seen: int) -> None:
        super().__init__(2, 2)
        self.seen = torch.arange(seen)

    def get_extra_state(self) -> Tensor:
        return self.seen.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state


def extra_state_in_tensors(folder: str, shard: bool) -> None:
    ours = BucketDDP(CountsInTensor(3), shard_optimizer=shard)
    ours.save_sharded(folder)
    ours.close()
    loaded = BucketDDP(CountsInTensor(5), shard_optimizer=shard)
    loaded.load_sharded(folder)
    assert torch.equal(loaded.module.seen, torch.arange(3))
    assert_equal(loaded.module.state_dict(), ours.module.state_dict())
    loaded.close()


@pytest.mark.parametrize("shard", [True, False])
def test_modules_get_extra_state_back_that_is_a_tensor(run_ranks: RunRanks, tmp_path: Path, shard: bool) -> None:
    run_ranks(2, extra_state_in_tensors, str(tmp_path / "parts"), shard)


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
        module.layer.bias.requires_grad_(number != 0)
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
    try_load(ValueError, lambda module: module.__delattr__("mean"))
    try_load(ValueError, lambda module: module.register_buffer("mean", torch.zeros(4)))
    try_load(ValueError, lambda module: None, number=1)
    try_load(ValueError, lambda module: module.layer.register_parameter("bias", module.layer.bias), number=3)
    try_load(RuntimeError, lambda module: None, path="nothing")

    module = Wide()
    ours = BucketDDP(module, shard_optimizer=True)
    swapped = [torch.optim.SGD([module.layer.bias], lr=0.1), torch.optim.AdamW([module.layer.weight])]
    note(ValueError, lambda: ours.load_sharded(f"{folder}/parts", swapped))
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(5))], lr=0.1)
    note(ValueError, lambda: ours.save_sharded(f"{folder}/new", [stranger]))
    raising = RaisingOnce([module.layer.weight], lr=0.1)
    lightning_bucketddp.declare_element_wise(RaisingOnce)
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
    for said, expected in zip(
        first,
        [
            "with the same names, found without 'other'",
            "with the same names, found with unknown 'mean'",
            "Size mismatch between saved torch.Size([2]) and current: torch.Size([4]) for model.mean",
            "expected as many optimizers as the checkpoint has, 2, found 1",
            "expected as many optimizers as the checkpoint has, 2, found 3",
            "expected a directory, found none",
            "expected group 0 of optimizer 0 to hold the parameters with which it was saved, found 'layer.bias' in",
            "expected optimizer 0 to hold parameters of the module, which are saved by name; found another one",
            "failed on rank 1: Odd: no state today",
            "failed on rank 0: ",
            "__2_0.distcp",
        ],
        strict=True,
    ):
        assert expected in said
    assert not (tmp_path / "new").exists()


def local_state_dicts(folder: str) -> None:
    """What ``optimizer.state_dict()`` and ``load_state_dict()`` of a sharded optimizer do by themselves."""
    training = Training("adamw", 0, shard_optimizer=True)
    training.run(0, 2)
    rank = dist.get_rank()
    if rank == 0:
        assert "bucketddp_shard" in training.optimizer.state_dict()  # alone, and does not wait
    torch.save(training.optimizer.state_dict(), f"{folder}/{rank}.pt")
    values = training.values()
    training.run(2, 4)
    mine = torch.load(f"{folder}/{rank}.pt")
    training.optimizer.load_state_dict(copy.deepcopy(mine))
    assert_equal(training.optimizer.state_dict(), mine)
    training.module.load_state_dict(values)
    dist.barrier()
    with pytest.raises(ValueError, match=r"found one of another shard; save BucketDDP.optimizer_state_dict"):
        training.optimizer.load_state_dict(torch.load(f"{folder}/{1 - rank}.pt"))
    training.run(2, 4)
    training.end()


def test_a_rank_s_own_state_dict_is_its_own(run_ranks: RunRanks, tmp_path: Path) -> None:
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
    assert saved_bytes(state_dict) < weight.nbytes + bias.nbytes + 4000
    assert copy.deepcopy(bias).untyped_storage().nbytes() == bias.nbytes
    # Nothing was copied for it.
    with torch.no_grad():
        ours.module.layer.bias.fill_(3.0)  # type: ignore[union-attr, operator]
    assert torch.equal(bias, torch.full_like(bias, 3.0))
    assert (ours._runtime.optimizers.parts._buffers.flats[0] == 3.0).sum() == bias.numel()
    kept = [bias, weight.clone()]
    ours.close()
    del ours, optimizer, state_dict, weight
    assert torch.equal(kept[0], torch.full_like(kept[0], 3.0)), "memory lives as long as somebody has it"


def test_a_filtered_state_dict_holds_its_tensors_only(run_ranks: RunRanks) -> None:
    run_ranks(2, filtered)


def replaced_memory() -> None:
    trainings = [Training("adamw", 0, shard_optimizer=shard) for shard in (True, False)]
    for training in trainings:
        training.run(0, 2)
        training.values()  # all parameters have come
        for param in training.module.parameters():
            param.data = param.data.clone()
        training.run(2, 4)
        training.values()
        training.module.share_memory()  # as sending a tensor to another process does
        training.run(4, 6)
    assert_close(*(training.end() for training in trainings))


def test_parameters_whose_memory_was_replaced_are_taken_in_again(run_ranks: RunRanks) -> None:
    run_ranks(3, replaced_memory)
