"""``torch.distributed.checkpoint.state_dict`` on a wrapper, as on torch's DDP."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bucketddp import BucketDDP
from tests.models import ConvBatchNorm, Mlp
from tests.optim.common import TINY, assert_equal
from tests.pool import on_ranks
from tests.reference import backward, train

bucket_ddp = partial(BucketDDP, bucket_cap_mb=TINY)
OPTIONS = {
    "default": {},
    "full": {"full_state_dict": True},
    "full on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "no frozen": {"ignore_frozen_params": True, "strict": False},
}


class Own(nn.Module):
    """A child that is called as the wrapper's is, a frozen parameter, a module buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.norm = Mlp(), nn.BatchNorm1d(8)
        self.offset = nn.Parameter(torch.ones(4), requires_grad=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.module(self.norm(x)) + self.offset

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def made(wrap: Callable[..., nn.Module], build: Callable[[], nn.Module], steps: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(steps)
    model = wrap(build())
    optimizer = torch.optim.RMSprop([param for param in model.parameters() if param.requires_grad], 0.01, momentum=0.9)
    train(model, optimizer, range(steps), rank=0)
    return model, optimizer


def got(model: nn.Module, optimizers: Any, **options: Any) -> list[Any]:
    """Copies: setting takes things out of what it is given."""
    return copy.deepcopy(list(get_state_dict(model, optimizers, options=StateDictOptions(**options))))


def set_(model: nn.Module, optimizers: Any, given: Any, **options: Any) -> None:
    state = {"model_state_dict": given[0], "optim_state_dict": given[1]}
    set_state_dict(model, optimizers, **state, options=StateDictOptions(**options))


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda wrapped: wrapped,
    "nested": lambda wrapped: nn.Sequential(wrapped, nn.Tanh()),
    "compiled": lambda wrapped: torch.compile(wrapped, backend="eager"),
}


def wrapping(wrap: Callable[..., nn.Module], around: str) -> Callable[[nn.Module], nn.Module]:
    return lambda module: AROUND[around](wrap(module))


CASES = [*((option, Own, "bare") for option in OPTIONS), ("default", Mlp, "nested"), ("default", Mlp, "compiled")]


@on_ranks(2, cases=CASES)
def test_states_are_got_and_set_as_with_torch_ddp(option: str, build: Callable[[], nn.Module], around: str) -> None:
    assert dcp._StateDictInfo.dsd_fqn_modifiers == BucketDDP._fqn_modifiers.__name__, "private to torch"
    wrap, torchs_wrap = wrapping(bucket_ddp, around), wrapping(DistributedDataParallel, around)
    options = OPTIONS[option]
    model, optimizer = made(wrap, build, 2)
    expected = got(*made(torchs_wrap, build, 2), **options)
    assert_equal(got(model, optimizer, **options), expected)
    assert expected[0] or (option == "full on the CPU" and dist.get_rank() == 1)
    others = [made(wrap, build, 1)]
    if option != "from rank 0":  # which torch's own DDP fails at (torch 2.13): other ranks' keys keep their prefix
        others.append(made(torchs_wrap, build, 0))
    for other in others:
        given = got(model, optimizer, **options)
        set_(*other, given if given[0] else got(model, optimizer), **options)  # what rank 0 has got is for all
        assert_equal(got(*other, **options), expected)


def assert_loads(model: nn.Module, names: Iterable[str], expected: Iterable[str]) -> None:
    """Asserts that other values under ``names`` arrive, under ``expected``."""
    values = [value + 1 for value in model.state_dict().values()]
    model.load_state_dict(dict(zip(names, values, strict=True)))
    loaded = model.state_dict()
    assert list(loaded) == list(expected)
    assert all(map(torch.equal, loaded.values(), values))


@on_ranks(2)
def test_state_dicts_are_those_of_the_module() -> None:
    names = list(Mlp().state_dict())
    outer = nn.ModuleDict({"net": BucketDDP(Mlp()), "head": nn.Linear(8, 1)})
    expected = [*(f"net.{name}" for name in names), "head.weight", "head.bias"]
    for model in (outer, copy.deepcopy(outer)):
        assert_loads(model, expected, expected)
    ours, torchs = BucketDDP(Mlp()), DistributedDataParallel(Mlp()).state_dict()
    for given in (torchs, names):
        assert_loads(ours, given, names)
    with pytest.raises(RuntimeError, match="nonsense"):
        ours.load_state_dict({**torchs, "nonsense": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        ours.load_state_dict({name: value for name, value in torchs.items() if not name.endswith("bias")})
    inside = nn.ModuleDict({"module": nn.Linear(8, 4)})  # a child that is called as the wrapper's is
    for given in (inside, DistributedDataParallel(inside)):
        assert_loads(BucketDDP(inside), given.state_dict(), inside.state_dict())


@on_ranks(2)
def test_parameters_have_the_names_of_the_state_dict() -> None:
    model = BucketDDP(Own())
    assert dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys() == {
        name for name in model.state_dict() if not name.endswith("_extra_state")
    }
    assert list(model.modules()) == [model, *model.module.modules()]
    outer = nn.Sequential(bucket_ddp(ConvBatchNorm()), nn.Tanh())
    assert dict(outer.named_parameters()).keys() <= outer.state_dict().keys()
    for name, param in outer.named_parameters():
        assert outer.get_parameter(name) is param, name
    with pytest.raises(AttributeError, match="no attribute 'calls'"):  # not the module's state, so not the wrapper's
        model.calls  # noqa: B018


@on_ranks(2)
def test_shards_and_masters_are_refused_to_torchs_functions() -> None:
    """Shards take whole state, and refuse to give their part; masters are not left out silently."""
    model, optimizer = made(bucket_ddp, Mlp, 2)
    other, other_optimizer = made(partial(bucket_ddp, shard_optimizer=True), Mlp, 0)
    set_(other, other_optimizer, got(model, optimizer))
    assert_equal(other.optimizer_state_dict(other_optimizer, every_rank=True)["state"], optimizer.state_dict()["state"])
    assert_equal(other.state_dict(), model.state_dict())
    assert dcp.get_model_state_dict(other).keys() == model.state_dict().keys()
    low = BucketDDP(Mlp().bfloat16(), grad_dtype=torch.float32)
    low_optimizer = torch.optim.AdamW(low.parameters())
    backward(low)
    low_optimizer.step()
    for each in ((other, other_optimizer), (low, low_optimizer)):
        with pytest.raises(RuntimeError, match=r"expected optimizer_state_dict\(\).*found get_optimizer_state_dict"):
            dcp.get_optimizer_state_dict(*each)
