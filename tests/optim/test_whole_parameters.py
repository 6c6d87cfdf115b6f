"""Sharded optimizers that need whole matrices: each matrix is one rank's."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp import BucketDDP, declare_whole_parameter
from tests.lightning_models import data, ddp, ours, trainer
from tests.optim.common import TINY, assert_equal, stepped, values
from tests.pool import RunRanks, on_ranks
from tests.reference import drift, everyones, seeded
from tests.sampling import some_slow

BF16 = torch.bfloat16


class Matrices(nn.Module):
    """Two widths, a matrix with strides of its own, biases and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.wide, self.narrow = nn.Linear(8, 24), nn.Linear(24, 8)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.wide.weight = nn.Parameter(self.wide.weight.detach().t().contiguous().t())

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.narrow(self.wide(self.table(tokens)).relu())
        return self.layers(hidden).square().mean()


def optimizers_of(module: nn.Module) -> list[Optimizer]:
    matrices = [param for name, param in module.named_parameters() if param.ndim == 2 and name != "table.weight"]
    chosen = {id(param) for param in matrices}
    rest = [param for param in module.parameters() if id(param) not in chosen]
    return [Muon(matrices, lr=0.02, weight_decay=0.1), AdamW(rest, lr=0.01)]


def tokens(number: int) -> Tensor:
    return torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


class Training:
    """A sharded one, beside the same optimizers on whole parameters with the same gradients."""

    def __init__(self, low: bool = False, **options: Any) -> None:
        plain = seeded(Matrices)
        masters: dict[str, Any] = {"grad_dtype": torch.float32, "master_params": True} if low else {}
        module = copy.deepcopy(plain).to(BF16 if low else torch.float32)
        self.plain = module if not low else copy.deepcopy(module).float()
        self.plain = copy.deepcopy(self.plain)
        self.ours = BucketDDP(module, shard_optimizer=True, bucket_cap_mb=TINY, **masters, **options)
        self.use(optimizers_of(self.ours.module), optimizers_of(self.plain))

    def use(self, steppers: list[Optimizer], reference: list[Optimizer]) -> None:
        self.steppers, self.reference = steppers, reference
        for stepper in steppers:
            self.ours.prepare_optimizer(stepper)

    def run(self, first: int, last: int, accumulate: int = 1) -> "Training":
        for number in range(first, last):
            for at in range(accumulate):
                with self.ours.no_sync() if at < accumulate - 1 else nullcontext():
                    self.ours(tokens(accumulate * number + at)).backward()
            for param, twin in zip(self.ours.module.parameters(), self.plain.parameters(), strict=True):
                grad = self.ours.full_grad(param)
                twin.grad = None if grad is None else grad.to(twin.dtype)
            stepped(*self.steppers, *self.reference)
        return self

    def state(self) -> list[dict[str, Any] | None]:
        return [self.ours.optimizer_state_dict(stepper, every_rank=True) for stepper in self.steppers]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "scattered": {"scatter_every_pass": True, "accumulate": 2},
    "one bucket": {"overlap": False},
}


@on_ranks(2, 3, cases=OPTIONS, quick=["scattered", "one bucket"])
def test_steps_are_those_of_whole_parameters_to_the_bit(options: dict[str, Any]) -> None:
    options = dict(options)
    accumulate = options.pop("accumulate", 1)
    training = Training(**options).run(0, 5, accumulate)
    assert_equal(values(training.ours.module), values(training.plain))
    for mine, stepper in zip(training.state(), training.reference, strict=True):
        assert mine is not None
        assert_equal(mine["state"], stepper.state_dict()["state"])
    assert drift(training.ours.module) == 0


@on_ranks(4)
def test_groups_of_ranks_divide_the_matrices() -> None:
    training = Training(shard_group_size=2).run(0, 3)
    assert_equal(values(training.ours.module), values(training.plain))
    owned = everyones(len(training.steppers[0].state))
    assert owned[0] + owned[1] == owned[2] + owned[3] == 6


@on_ranks(2)
def test_masters_are_whole_too() -> None:
    training = Training(low=True).run(0, 4)
    rounded = {name: value.to(BF16) for name, value in values(training.plain).items()}
    assert_equal(values(training.ours.module), rounded)


@on_ranks(2, 3)
def test_each_matrix_is_one_ranks_and_the_work_is_balanced() -> None:
    training = Training().run(0, 2)
    muon = training.steppers[0]
    shapes = [tuple(state["momentum_buffer"].shape) for state in muon.state.values()]
    everybodys = everyones(shapes)
    assert sorted(chain(*everybodys)) == sorted(tuple(param.shape) for param in muon.param_groups[0]["params"])
    assert all(everybodys), "every rank has some"
    adam = sum(everyones(sum(state["exp_avg"].numel() for state in training.steppers[1].state.values())))
    assert adam == sum(param.numel() for param in training.steppers[1].param_groups[0]["params"]), "divided anywhere"


@on_ranks(2)
def test_shards_that_divide_a_matrix_stay_so_muon_must_not_come_late() -> None:
    ours = BucketDDP(seeded(Matrices), shard_optimizer=True, bucket_cap_mb=TINY)
    before, (muon, adam) = values(ours.module), optimizers_of(ours.module)
    adam.add_param_group({"params": [muon.param_groups[0]["params"].pop()]})  # may be divided
    ours(tokens(0)).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"divide '(\w|\.)+weight' and stay .* prepare_optimizer\(\) as soon as"):
            muon.step()
    assert_equal(values(ours.module), before)
    adam.step()


@on_ranks(2)
def test_a_matrix_that_is_trained_later_is_whole() -> None:
    training = Training()
    for step in range(4):
        for module in (training.ours.module, training.plain):
            module.wide.weight.requires_grad_(step >= 2)
        training.run(step, step + 1)
    assert_equal(values(training.ours.module), values(training.plain))
    owned = everyones([tuple(state["momentum_buffer"].shape) for state in training.steppers[0].state.values()])
    assert (24, 8) in chain(*owned)


@on_ranks(2)
def test_a_declared_class_gets_whole_parameters() -> None:
    @declare_whole_parameter
    class Normed(torch.optim.SGD):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.grad.div_(param.grad.norm() + 1)
            return super().step(closure)

    training = Training()
    training.use(*([Normed(of.parameters(), lr=0.1, momentum=0.5)] for of in (training.ours.module, training.plain)))
    training.run(0, 3)
    assert_equal(values(training.ours.module), values(training.plain))


@on_ranks(2)
def test_a_hook_that_comes_later_would_cut_shards_anew_and_is_refused() -> None:
    training = Training().run(0, 1)
    with pytest.raises(RuntimeError, match="when the module is wrapped"):
        training.ours.register_comm_hook(None, allreduce_hook)
    training.run(1, 3)
    assert_equal(values(training.ours.module), values(training.plain))


def save(folder: str) -> tuple[dict[str, Tensor], list[dict[str, Any] | None]]:
    training = Training().run(0, 3)
    training.ours.save_sharded(f"{folder}/parts", training.steppers)
    state = training.state()
    if dist.get_rank() == 0:
        torch.save((training.ours.module.state_dict(), state), f"{folder}/whole.pt")
    return values(training.ours.module), state


def load(folder: str, parts: bool, expected: dict[str, Tensor], state: list[dict[str, Any]]) -> None:
    training = Training().run(0, 2)
    if parts:
        training.ours.load_sharded(f"{folder}/parts", training.steppers)
    else:
        module, states = torch.load(f"{folder}/whole.pt")
        training.ours.module.load_state_dict(module)
        for stepper, loaded in zip(training.steppers, states, strict=True):
            training.ours.load_optimizer_state_dict(stepper, loaded)
    assert_equal(values(training.ours.module), expected)
    assert_equal(training.state(), state)
    training.plain.load_state_dict(expected)
    for stepper, loaded in zip(training.reference, state, strict=True):
        stepper.load_state_dict(copy.deepcopy(loaded))
    training.run(3, 5)
    assert_equal(values(training.ours.module), values(training.plain))


WORLDS = [((3, 2), False), ((2, 3), True), ((1, 2), True), ((3, 2), True)]


@pytest.mark.parametrize(("world_sizes", "parts"), some_slow(WORLDS, WORLDS[:2]))
def test_checkpoints_load_at_another_world_size(
    run_ranks: RunRanks, tmp_path: Path, world_sizes: tuple[int, int], parts: bool
) -> None:
    expected, state = run_ranks(world_sizes[0], save, str(tmp_path))[0]
    run_ranks(world_sizes[1], load, str(tmp_path), parts, expected, state)


class OnlyMatrices(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.second(self.first(batch[0]).relu()), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return Muon(self.parameters(), lr=0.02)


class CountsAddmm(TorchDispatchMode):
    """Counts the multiplications of matrices that Muon alone makes here: ten for each that it orthogonalises."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


@on_ranks(2)
def test_each_rank_orthogonalises_its_matrices_where_with_ddp_each_rank_does_all() -> None:
    found = []
    for strategy, matrices in ((ddp(), 2), (ours(shard_optimizer=True), 1)):
        torch.manual_seed(0)
        module, runs = OnlyMatrices(), trainer(strategy, max_epochs=2)
        with CountsAddmm() as counts:
            runs.fit(module, data())
        assert counts.calls == 12 * 10 * matrices
        assert len(runs.optimizers[0].state) == matrices
        found.append(values(module))
    assert_equal(found[1], found[0])


@pytest.mark.slow
@on_ranks(2)
def test_other_ways_to_shard_muon() -> None:
    """What ``docs/sharded.md`` says of them."""
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    sizes = (8, 24, 12, 6)

    def stepped_with(wrap: Callable[[nn.Module], nn.Module], make: Callable[..., Optimizer]) -> Any:
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(*each, bias=False) for each in pairwise(sizes)])
        wrapped = wrap(module)
        optimizer = make(wrapped.parameters(), lr=0.02)
        wrapped(inputs).square().mean().backward()
        with CommDebugMode() as communication:
            optimizer.step()
        full = [param.full_tensor() if isinstance(param, DTensor) else param for param in module.parameters()]
        return [param.detach() for param in full], optimizer, communication.get_total_counts()

    expected, _, _ = stepped_with(DistributedDataParallel, Muon)
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=Muon)
    found, optimizer, _ = stepped_with(DistributedDataParallel, zero)
    assert_equal(found, expected)
    assert 0 < len(optimizer.optim.state) < 3
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        stepped_with(partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu")), Muon)
    mesh = init_device_mesh("cpu", (2,))
    found, _, communications = stepped_with(partial(fully_shard, mesh=mesh), Muon)
    assert communications == 43
    assert not all(map(torch.equal, found, expected)), "products of bf16 matrices are rounded elsewhere"
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
