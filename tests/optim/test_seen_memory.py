"""What others see of a sharded parameter's memory: aliases, arrays, other processes. They read each step's values.

Gathers are put off to the moment in which somebody waits for them: whoever reads memory without a wait sees old values.
"""

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.optim.lazy_all_gather import AwaitedParameter
from tests.models import Mlp
from tests.optim.test_lazy_all_gather import gathers_put_off
from tests.pool import on_ranks
from tests.reference import TINY, backward, drift, eventually, everyones, seeded

SHARDED = {"shard_optimizer": True, "bucket_cap_mb": TINY}
WRAPS: dict[str, dict[str, Any]] = {
    "plain": {"bucket_cap_mb": TINY},
    "sharded": SHARDED,
    "groups of one": {**SHARDED, "shard_group_size": 1},
}
Read = Callable[[], Tensor]
STEPS = 4


def first(net: nn.Module) -> nn.Parameter:
    return net.layers[0].weight


def step(model: nn.Module, number: int, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model, number)
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def trained(steps: int) -> list[list[Tensor]]:
    """All parameters after each of some steps with torch's DDP."""
    model = DistributedDataParallel(seeded(Mlp))
    optimizer, found = sgd(model), []
    for number in range(steps):
        step(model, number, optimizer)
        found.append([param.detach().clone() for param in model.parameters()])
    return found


# -- aliases -------------------------------------------------------------------------------------------


def numpy(net: nn.Module) -> Read:
    array = first(net).detach().numpy()
    return lambda: torch.tensor(array)


def dlpack(net: nn.Module) -> Read:
    alias = torch.from_dlpack(first(net).detach())
    return lambda: alias.clone()


def functional(net: nn.Module) -> Read:
    """A dict for `functional_call`; its bias is made zero, and the inputs are one."""
    params = {name: param.detach() for name, param in net.layers[0].named_parameters()}
    params["bias"] = torch.zeros_like(params["bias"])
    layer = copy.deepcopy(net.layers[0])
    return lambda: functional_call(layer, params, torch.eye(params["weight"].shape[1])).t()


def probe(net: nn.Module) -> Read:
    """A layer outside of the module, with the same memory."""
    layer = nn.Linear(*reversed(first(net).shape), bias=False)
    layer.weight.data = first(net).data
    return lambda: layer(torch.eye(layer.in_features)).detach().t()


def alias(make: Callable[[Tensor], Tensor], net: nn.Module) -> Read:
    memory = make(first(net))
    return lambda: memory.clone()


ALIASES: dict[str, Callable[[nn.Module], Read]] = {
    "detach": lambda net: alias(lambda param: param.detach(), net),
    "data": lambda net: alias(lambda param: param.data, net),
    "rows": lambda net: alias(lambda param: param.detach()[:3], net),
    "state_dict": lambda net: alias(lambda _: net.state_dict()["layers.0.weight"], net),
    "numpy": numpy,
    "dlpack": dlpack,
    "functional_call": functional,
    "probe": probe,
}


@on_ranks(2, 3, cases=WRAPS, quick=["sharded"], timeout=200)
def test_an_alias_reads_each_steps_values_whenever_it_was_taken(options: dict[str, Any]) -> None:
    expected = trained(STEPS)
    with gathers_put_off():
        for name, make in ALIASES.items():
            # Before the module is wrapped, before the first step, after steps.
            for taken in (-2, -1, 0, 2) if name == "detach" else (1,):
                net = seeded(Mlp)
                read = make(net) if taken == -2 else None
                model = BucketDDP(net, **options)
                optimizer = sgd(model)
                for number in range(STEPS):
                    read = make(net) if taken == number - 1 and read is None else read
                    step(model, number, optimizer)
                    if read is not None:
                        values = read()  # before anybody waits
                        torch.testing.assert_close(values, expected[number][0][: len(values)], msg=f"{name} {taken}")
                assert read is not None
                model.close()
                step(net, 5, torch.optim.SGD(net.parameters(), lr=0.2))
                torch.testing.assert_close(read(), first(net)[: len(values)].detach(), msg=f"{name} after close()")


@on_ranks(2)
def test_only_what_others_see_is_waited_for_in_the_step() -> None:
    net = seeded(Mlp)
    model = BucketDDP(net, **{**SHARDED, "bucket_cap_mb": 0})
    optimizer = sgd(model)
    step(model, 0, optimizer)
    late = [isinstance(param, AwaitedParameter) for param in net.parameters()]
    kept = first(net).detach()
    step(model, 1, optimizer)
    late_with_alias = [isinstance(param, AwaitedParameter) for param in net.parameters()]
    del kept
    step(model, 2, optimizer)
    assert late == [isinstance(param, AwaitedParameter) for param in net.parameters()] == [True] * len(late)
    assert late_with_alias == [False, *late[1:]]


# -- memory that is exchanged under a parameter --------------------------------------------------------


def give(net: nn.Module, make: Callable[[Tensor], Tensor]) -> Read:
    """Let parameters lie in other memory, which is kept."""
    memory = [make(param) for param in net.parameters()]
    for param, other in zip(net.parameters(), memory, strict=True):
        param.data = other
    return lambda: memory[0].clone()


def set_to(net: nn.Module) -> Read:
    memory = first(net).detach().clone()
    with torch.no_grad():
        first(net).set_(memory)
    return memory.clone


def each(do: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    return lambda net: [do(param) for param in net.parameters()] and None


EXCHANGES: dict[str, Callable[[nn.Module], Read | None]] = {
    "param.share_memory_()": each(lambda param: param.share_memory_()),
    "detach().share_memory_()": each(lambda param: param.detach().share_memory_()),
    "storage.share_memory_()": each(lambda param: param.untyped_storage().share_memory_()),
    "module.share_memory()": lambda net: net.share_memory() and None,
    "a queue": lambda net: ForkingPickler.dumps(net.state_dict()) and None,
    "a copy that is shared": lambda net: copy.deepcopy(net).share_memory() and None,
    "data, kept elsewhere": lambda net: give(net, lambda param: param.detach().clone()),
    "data": each(lambda param: setattr(param, "data", param.data.clone())),
    "set_()": set_to,
}


@on_ranks(2, 3, cases=WRAPS, quick=["sharded"], timeout=200)
def test_training_is_the_same_whatever_exchanges_the_memory_of_parameters(options: dict[str, Any]) -> None:
    expected = trained(STEPS)
    with gathers_put_off():
        for name, exchange in EXCHANGES.items():
            before = name in ("param.share_memory_()", "data, kept elsewhere")
            for when in ([-1], [1, 2]) if before else ([1, 2],):  # -1: before the module is wrapped
                net, read = seeded(Mlp), None
                if when == [-1]:
                    read = exchange(net)
                model = BucketDDP(net, **options)
                optimizer = sgd(model)
                for number in range(STEPS):
                    step(model, number, optimizer)
                    if read is not None:
                        torch.testing.assert_close(read(), expected[number][0], msg=f"{name} {when} seen")
                    if number in when:
                        optimizer.zero_grad()
                        read = exchange(net)
                torch.testing.assert_close(list(net.parameters()), expected[-1], msg=lambda m, n=name: f"{n}: {m}")
                model.close()


@on_ranks(2)
def test_masters_go_into_exchanged_memory() -> None:
    nets = []
    for exchange in (None, "param.share_memory_()", "data, kept elsewhere"):
        net, read = seeded(Mlp).bfloat16(), None
        model = BucketDDP(net, grad_dtype=torch.float32, **SHARDED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(4):
            step(model, number, optimizer)
            if exchange is not None and number == 1:
                optimizer.zero_grad()
                read = EXCHANGES[exchange](net)
        if read is not None:
            torch.testing.assert_close(read(), first(net).detach())
        assert drift(net) == 0
        nets.append(net)
        model.close()
    for net in nets[1:]:
        torch.testing.assert_close(list(net.parameters()), list(nets[0].parameters()), rtol=0, atol=0)


def loaded(sent: bytes) -> dict[str, Tensor]:
    """Nothing where the other process's manager of shared memory is late: torch waits for it for a moment only."""
    try:
        return pickle.load(io.BytesIO(sent))
    except RuntimeError as error:
        if "Shared memory manager" not in str(error):
            raise
        return {}


@on_ranks(2, cases=WRAPS, quick=["sharded"], fresh=True)
def test_another_process_reads_each_steps_values_in_shared_memory(options: dict[str, Any]) -> None:
    """As an evaluation worker does that got a state dict through a queue: here the other rank is one."""
    mp.set_sharing_strategy("file_system")  # else only children may open it
    expected, net = trained(4), seeded(Mlp)
    model = BucketDDP(net, **options)
    optimizer, others = sgd(model), dict[str, Tensor]()
    with gathers_put_off():
        for number in range(4):
            step(model, number, optimizer)
            dist.barrier()
            if others:
                found = [others[name] for name, _ in net.named_parameters()]
                torch.testing.assert_close(found, expected[number], msg=lambda m, n=number: f"step {n}: {m}")
            dist.barrier()
            if number == 0:
                message = bytes(ForkingPickler.dumps(net.state_dict()))
                received = everyones(message)[1 - dist.get_rank()]
                eventually(lambda sent=received: others.update(loaded(sent)) or others)
    assert others


@on_ranks(2, cases={"alias": False, "shared": True})
def test_a_comparison_of_ranks_looks_at_what_others_see(shared: bool) -> None:
    """A write by whoever holds the memory, on one rank."""
    net = seeded(Mlp)
    model = BucketDDP(net, check_ranks_every=1, **SHARDED)
    optimizer = sgd(model)
    step(model, 0, optimizer)
    kept = first(net).share_memory_().detach() if shared else first(net).detach()
    for number in (1, 2):
        step(model, number, optimizer)
    kept.add_(dist.get_rank())
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"1 of 8 that differ in pass 3: 'layers.0.weight'"):
        backward(model, 3)


class Conv(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten())


@on_ranks(2)
def test_conversions_between_step_and_zero_grad_say_to_call_it_first() -> None:
    plain = seeded(Conv)
    net = copy.deepcopy(plain)
    model, theirs = BucketDDP(net, **SHARDED), DistributedDataParallel(plain)
    optimizers = [sgd(model), sgd(theirs)]
    conversions = (
        nn.Module.double,
        nn.Module.share_memory,
        lambda module: module.to(memory_format=torch.channels_last),
    )
    for number in range(4):
        for each_model, optimizer in zip((model, theirs), optimizers, strict=True):
            step(each_model, number, optimizer)
        for convert in conversions[1:]:
            with pytest.raises(RuntimeError, match=r"'1.weight' is sharded.*call zero_grad\(\) first"):
                convert(net)
        optimizers[0].zero_grad()
        for convert in conversions[1:]:
            convert(net)
        torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))
    step(model, 4, optimizers[0])
    with pytest.raises(RuntimeError, match=r"'1.weight' is sharded.*call zero_grad\(\) first"):
        conversions[0](net)


@on_ranks(2, cases=WRAPS)
def test_torch_refuses_what_would_take_a_parameters_memory_away(options: dict[str, Any]) -> None:
    net = seeded(Mlp)
    model = BucketDDP(net, **options)
    optimizer = sgd(model)
    step(model, 0, optimizer)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="swap"):
        torch.utils.swap_tensors(first(net), nn.Parameter(torch.zeros_like(first(net))))
    if "shard_optimizer" in options:
        with pytest.raises(RuntimeError, match="not resizable"):
            first(net).untyped_storage().resize_(10_000)
    for number in range(1, 3):
        step(model, number, optimizer)
    torch.testing.assert_close(list(net.parameters()), trained(3)[-1])
