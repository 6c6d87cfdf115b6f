"""Parameters on their way: whoever uses one waits for it, by whatever way.

Gathers are put off to the moment in which somebody waits for them, so that what does not wait sees old values for sure.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.optim.lazy_all_gather import GatheredLater, reads_past_python
from tests.reference import largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]


class PutOff:
    """A collective that is started when somebody waits for it."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    def wait(self, on_idle: Callable[[], None] | None = None) -> None:
        self._start().wait(on_idle)


def put_off_gathers() -> None:
    gather = Collectives.all_gather_shards

    def later(self: Collectives, flat: Tensor) -> Any:
        return PutOff(lambda: gather(self, flat))

    Collectives.all_gather_shards = later  # type: ignore[assignment, method-assign]


class Zoo(nn.Module):
    """Every way of using a parameter that is not its owner's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.table = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.kept = [layer.bias for layer in self.layers]

    def forward(self, index: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.table(index)
        x, _ = self.attention(x, x, x)
        x, _ = self.recurrent(x)
        x = self.normed(x) * self.scales[0]
        for at in order:  # in any order, several times or never
            x = torch.tanh(self.layers[at](x))
        x = nn.functional.linear(x, self.layers[2].weight) + self.kept[1] * self.scales[1]
        return self.head(x)


def zoo() -> Zoo:
    torch.manual_seed(0)
    return Zoo()


def loss_of(model: nn.Module, step: int, order: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    index = torch.randint(5, (3, 4), generator=generator)
    return nn.functional.cross_entropy(model(index, order).flatten(0, 1), index.roll(1, 1).flatten())


def trained(steps: int) -> tuple[BucketDDP, Zoo]:
    """Trained, with the last step's values on their way; and the same by plain means."""
    put_off_gathers()
    plain = zoo()
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, bucket_cap_mb=0.002)
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.1, momentum=0.9) for it in (plain, ours)]
    for step in range(steps):
        order = [(0, 1, 2), (2, 0, 1), (1, 1), (0,)][step % 4]
        for model in (plain, ours):
            model.zero_grad()
            loss_of(model, step, order).backward()
        expected = mean_over_ranks(plain)
        for name, param in plain.named_parameters():
            param.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
    assert all(isinstance(param, GatheredLater) for param in held(ours.module))
    return ours, plain


def held(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


def assert_same(found: dict[str, Tensor], plain: nn.Module) -> None:
    expected = {name: param.detach() for name, param in plain.named_parameters(remove_duplicate=False)}
    compared = 0
    for name, value in found.items():
        if name in expected:
            torch.testing.assert_close(value.detach(), expected[name], rtol=1e-4, atol=1e-5, msg=name)
            compared += 1
    assert compared >= 10


def forwards() -> None:
    ours, plain = trained(9)
    values = dict(ours.module.named_parameters(remove_duplicate=False))
    loss = loss_of(ours, 20, (1, 0, 2))
    torch.testing.assert_close(loss, loss_of(plain, 20, (1, 0, 2)), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(param, GatheredLater) for param in values.values())
    assert all(type(param) is nn.Parameter for param in values.values())
    assert_same(values, plain)
    assert largest_difference_between_ranks(ours.module) == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_forward_waits_whatever_uses_a_parameter(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, forwards, fresh=True)


def unused_is_not_waited_for() -> tuple[set[str], set[str]]:
    ours, _ = trained(3)
    late = {name for name, param in ours.module.named_parameters() if isinstance(param, GatheredLater)}
    ours.module.layers[0](torch.ones(1, 8))
    return late, {name for name, param in ours.module.named_parameters() if isinstance(param, GatheredLater)}


def test_a_module_waits_for_what_it_uses_and_no_more(run_ranks: RunRanks) -> None:
    for before, after in run_ranks(2, unused_is_not_waited_for, fresh=True):
        assert {"layers.0.weight", "layers.0.bias", "recurrent.weight_hh_l0"} <= before
        assert not {"layers.0.weight", "layers.0.bias"} & after
        assert {"recurrent.weight_hh_l0", "attention.in_proj_weight"} <= after


def through_file(module: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def average(module: nn.Module) -> dict[str, Tensor]:
    averaged = AveragedModel(nn.Linear(1, 1))
    averaged.module = copy.deepcopy(zoo())
    averaged.update_parameters(module)
    return dict(averaged.module.named_parameters(remove_duplicate=False))


def functional(module: nn.Module) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        seen[name] = torch.func.functional_call(nn.Identity(), {}, (param,)) * 1
    return seen


READERS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "state_dict": lambda module: module.state_dict(),
    "deepcopy": lambda module: dict(copy.deepcopy(module).named_parameters(remove_duplicate=False)),
    "pickle": lambda module: pickle.loads(pickle.dumps(dict(module.named_parameters(remove_duplicate=False)))),
    "type": lambda module: {n: type(p)(p) for n, p in module.named_parameters(remove_duplicate=False)},
    "file": through_file,
    "average": average,
    "functional": functional,
    "data": lambda module: {n: p.data for n, p in module.named_parameters(remove_duplicate=False)},
    "detach": lambda module: {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)},
    "numpy": lambda module: {
        n: torch.from_numpy(p.detach().numpy().copy()) for n, p in module.named_parameters(remove_duplicate=False)
    },
    "list": lambda module: {n: torch.tensor(p.tolist()) for n, p in module.named_parameters(remove_duplicate=False)},
    "foreach": lambda module: dict(
        zip(
            dict(module.named_parameters(remove_duplicate=False)),
            torch._foreach_mul([p for _, p in module.named_parameters(remove_duplicate=False)], 1.0),
            strict=True,
        )
    ),
    "stack": lambda module: {n: torch.stack([p, p])[1] for n, p in module.named_parameters(remove_duplicate=False)},
    "buffer": lambda module: {
        n: torch.frombuffer(memoryview(p.detach().numpy()), dtype=p.dtype).view(p.shape)
        for n, p in module.named_parameters(remove_duplicate=False)
    },
}


def read(name: str) -> None:
    ours, plain = trained(3)
    assert_same(READERS[name](ours.module), plain)


@pytest.mark.parametrize("name", list(READERS))
def test_readers_wait(run_ranks: RunRanks, name: str) -> None:
    run_ranks(2, read, name, fresh=True)


def metadata() -> None:
    ours, _ = trained(1)
    for param in held(ours.module):
        assert param.requires_grad
        assert param.is_leaf
        assert param.shape == torch.Size(param.size())
        assert param.numel() == param.nelement()
        assert param.dtype is torch.float32
        assert param.device.type == "cpu"
        assert not param.is_sparse
        param.grad = None
        assert param.grad is None
        assert isinstance(param, nn.Parameter)
    ours.zero_grad()
    assert all(isinstance(param, GatheredLater) for param in held(ours.module)), "nobody needed a value"
    ours.wait_for_parameters()
    assert not any(isinstance(param, GatheredLater) for param in held(ours.module))


def test_what_tells_nothing_of_values_does_not_wait(run_ranks: RunRanks) -> None:
    run_ranks(2, metadata, fresh=True)


class Special(nn.Parameter):
    """Somebody's own kind of parameter."""


def own_kind() -> None:
    put_off_gathers()
    module = nn.Linear(4, 4)
    module.weight = Special(torch.ones(4, 4))
    ours = BucketDDP(module, shard_optimizer=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert isinstance(module.weight, GatheredLater)
    assert isinstance(module.weight, Special)
    torch.testing.assert_close(module.weight.detach().clone(), torch.full((4, 4), 0.8))
    assert type(module.weight) is Special


def test_parameters_of_an_own_class(run_ranks: RunRanks) -> None:
    run_ranks(2, own_kind, fresh=True)


def closed_early() -> None:
    ours, _ = trained(1)
    params = held(ours.module)
    ours.wait_for_parameters()
    ours.close()
    assert all(type(param) is nn.Parameter for param in params)
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in params), "memory of their own"


def test_close_gives_parameters_memory_of_their_own(run_ranks: RunRanks) -> None:
    run_ranks(2, closed_early, fresh=True)


def test_modules_that_read_past_python_are_found() -> None:
    assert not reads_past_python(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)))
    assert reads_past_python(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    assert reads_past_python(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile()
    assert reads_past_python(module)


def compiled(kind: str) -> None:
    put_off_gathers()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    module = copy.deepcopy(plain)
    if kind == "scripted":
        module[0] = torch.jit.script(module[0])
    elif kind == "inside":
        module[2].compile(backend="eager")
    ours: Any = BucketDDP(module, shard_optimizer=True)
    step = torch.compile(ours, backend="eager") if kind == "outside" else ours
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.1) for it in (plain, ours)]
    for number in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number + dist.get_rank()))
        for model, optimizer in zip((plain, step), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
        expected = mean_over_ranks(plain)
        for name, param in plain.named_parameters():
            param.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(ours.module.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", ["scripted", "inside", "outside"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_asked_waits_for_everything_before(run_ranks: RunRanks, kind: str) -> None:
    run_ranks(2, compiled, kind, fresh=True)
