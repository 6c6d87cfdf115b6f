"""Parameters on their way: whoever uses one waits for it, by whatever way.

Gathers are put off to the moment in which somebody waits for them, so that code that does not wait sees old values.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.optim.lazy_all_gather import AwaitedParameter, reads_past_python
from tests.optim.common import average, stepped
from tests.pool import on_ranks
from tests.reference import drift, inputs_of, seeded


@contextmanager
def gathers_put_off() -> Iterator[None]:
    gather = Collectives.all_gather_shards

    def put_off(collectives: Collectives, flat: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: gather(collectives, flat).wait())

    with patch.object(Collectives, "all_gather_shards", put_off):
        yield


class Zoo(nn.Module):
    """Every way of using a parameter that is not its owner's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.table, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
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


def loss_of(model: nn.Module, step: int, order: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    index = torch.randint(5, (3, 4), generator=generator)
    return nn.functional.cross_entropy(model(index, order).flatten(0, 1), index.roll(1, 1).flatten())


class Twins:
    def __init__(self) -> None:
        self.plain = Zoo()
        self.module = copy.deepcopy(self.plain)
        self.ours = BucketDDP(self.module, shard_optimizer=True, bucket_cap_mb=0.002)
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (self.plain, self.ours)]
        self.steps = 0

    def step(self) -> None:
        """One step, whose values are on their way."""
        order = [(0, 1, 2), (2, 0, 1), (1, 1), (0,)][self.steps % 4]
        for model in (self.plain, self.ours):
            model.zero_grad()
            loss_of(model, self.steps, order).backward()
        average(self.plain)
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1
        assert all(isinstance(param, AwaitedParameter) for param in self.module.parameters())

    def assert_same(self, found: dict[str, Tensor], what: str) -> None:
        expected = {name: param.detach() for name, param in named(self.plain).items()}
        assert len(found.keys() & expected.keys()) >= 10
        for name in found.keys() & expected.keys():
            torch.testing.assert_close(found[name].detach(), expected[name], rtol=1e-4, atol=1e-5, msg=f"{what} {name}")


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def each(do: Callable[[Any], Tensor]) -> Callable[[nn.Module], dict[str, Tensor]]:
    return lambda module: {name: do(param) for name, param in named(module).items()}


def averaged(module: nn.Module) -> dict[str, Tensor]:
    model = AveragedModel(Zoo())
    model.update_parameters(module)
    return named(model.module)


READERS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "state_dict": lambda module: module.state_dict(),
    "deepcopy": lambda module: dict(named(copy.deepcopy(module))),
    "pickle": lambda module: pickle.loads(pickle.dumps(named(module))),
    "type": each(lambda p: type(p)(p)),
    "average": averaged,
    "data": each(lambda p: p.data),
    "detach": each(lambda p: p.detach()),
    "stack": each(lambda p: torch.stack([p, p])[1]),
}


@on_ranks(2, 3)
def test_whatever_uses_a_parameter_waits_for_it() -> None:
    with gathers_put_off():
        twins = Twins()
        for _ in range(5):
            twins.step()
        loss = loss_of(twins.ours, 20, (1, 0, 2))
        torch.testing.assert_close(loss, loss_of(twins.plain, 20, (1, 0, 2)), rtol=1e-4, atol=1e-5)
        del loss  # whose graph may show parameters to others
        assert {type(param) for param in twins.module.parameters()} == {nn.Parameter}, "they have their class back"
        twins.assert_same(named(twins.module), "forward")
        assert drift(twins.module) == 0
        for name, read in READERS.items():
            twins.step()
            twins.assert_same(read(twins.module), name)
            twins.ours.wait_for_parameters()


@on_ranks(2)
def test_nobody_waits_for_more_than_is_used() -> None:
    with gathers_put_off():
        twins = Twins()
        twins.step()
        for param in twins.module.parameters():
            assert (param.requires_grad, param.is_leaf, param.is_sparse) == (True, True, False)
            assert (param.shape, param.numel(), param.dtype) == (param.size(), param.nelement(), torch.float32)
            param.grad = None
        twins.ours.zero_grad()
        assert all(isinstance(param, AwaitedParameter) for param in twins.module.parameters()), "nobody needed a value"
        twins.module.layers[0](torch.ones(1, 8))
        late = {name for name, param in twins.module.named_parameters() if isinstance(param, AwaitedParameter)}
        assert not {"layers.0.weight", "layers.0.bias"} & late
        assert {"recurrent.weight_hh_l0", "attention.in_proj_weight"} <= late


@on_ranks(2)
def test_a_module_that_is_dropped_on_the_way_leaves_no_memory() -> None:
    twins = Twins()
    twins.step()
    gone = weakref.ref(twins.module.head.weight)
    del twins
    gc.collect()
    assert gone() is None


class Part(nn.Module):
    """Not of torch's own classes, whose forwards are not compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Part(), Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, fresh=True, cases=["scripted", "all scripted", "wrapped", "inside", "outside"])
def test_code_that_is_not_asked_waits_for_everything_before(kind: str) -> None:
    assert not reads_past_python(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)))
    plain = seeded(Parts)
    module: Any = copy.deepcopy(plain)
    if kind == "scripted":
        module.first = torch.jit.script(module.first)
    elif kind == "all scripted":
        module = torch.jit.script(module)
    elif kind == "wrapped":
        module.first = torch.compile(module.first, backend="aot_eager")
    elif kind == "inside":
        module.last.compile(backend="aot_eager")
    assert reads_past_python(module) == (kind != "outside")
    ours: Any = BucketDDP(module, shard_optimizer=True)
    assert not hasattr(ours, "an attribute"), "KeyError of what scripted modules have instead of dictionaries"
    compiled = torch.compile(lambda x: ours(x), backend="aot_eager")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, ours)]
    with gathers_put_off():
        for number in range(4):
            x = inputs_of(number)[:, :4]
            for called in (plain, compiled if kind == "outside" and number > 1 else ours):
                called(x).square().mean().backward()
            average(plain)
            stepped(*optimizers)
        torch.testing.assert_close([*ours.module.state_dict().values()], [*plain.state_dict().values()])
    calls = {"wrapped": 3, "inside": 3, "outside": 6}
    assert counters["stats"]["calls_captured"] == calls.get(kind, 0), "waits left something uncompiled"
