"""The simulated communicator by itself, and the checks of the order of collectives."""

import time
from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.optim.checkpoint_writer import CheckpointWriter
from tests.accelerator import DEVICE, on_stream, simulated, sleep
from tests.models import Mlp, batch, loss_of
from tests.pool import on_ranks
from tests.reference import all_ranks, everyones, several_machines
from tests.simulated.order import order_conflicts
from tests.simulated.training import SMALL

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def values(device: torch.device, dtype: torch.dtype, numel: int = 12) -> Tensor:
    return (torch.arange(numel) + 100 * dist.get_rank()).to(dtype).to(device)


def all_reduce(x: Tensor) -> list[Tensor]:
    dist.all_reduce(x)
    return [x]


def mean(x: Tensor) -> list[Tensor]:
    if not x.is_floating_point():
        return []
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return [x]


def maximum(x: Tensor) -> list[Tensor]:
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return [x]


def reduced(x: Tensor) -> list[Tensor]:
    dist.reduce(x, dst=1)
    return [x] if dist.get_rank() == 1 else []


def broadcast(x: Tensor) -> list[Tensor]:
    dist.broadcast(x, src=1)
    return [x]


def all_gather(x: Tensor) -> list[Tensor]:
    out = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(out, x)
    return out


def all_gather_into_tensor(x: Tensor) -> list[Tensor]:
    out = x.new_empty(2 * x.numel())
    dist.all_gather_into_tensor(out, x)
    return [out]


def reduce_scatter(x: Tensor) -> list[Tensor]:
    out, parts = x.new_empty(6), x.new_empty(6)
    dist.reduce_scatter_tensor(out, x)
    dist.reduce_scatter(parts, list(x.chunk(2)))
    return [out, parts]


def all_to_all(x: Tensor) -> list[Tensor]:
    equal, uneven, rank = torch.empty_like(x), x.new_empty(4 if dist.get_rank() == 0 else 20), dist.get_rank()
    dist.all_to_all_single(equal, x)
    dist.all_to_all_single(uneven, x, [2, 2] if rank == 0 else [10, 10], [2, 10])
    if x.device.type == "cpu":  # gloo has none of lists; the parts are the same as above
        return [equal, uneven, *equal.chunk(2)]
    lists = [x.new_empty(6) for _ in range(2)]
    dist.all_to_all(lists, list(x.chunk(2)))
    return [equal, uneven, *lists]


def gather_and_scatter(x: Tensor) -> list[Tensor]:
    first = dist.get_rank() == 0
    gathered = [torch.empty_like(x) for _ in range(2)] if first else None
    dist.gather(x, gathered)
    out = torch.empty_like(x)
    dist.scatter(out, gathered)
    return [out, *(gathered or [])]


COLLECTIVES = (
    all_reduce,
    mean,
    maximum,
    reduced,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    all_to_all,
    gather_and_scatter,
)


@on_ranks(2, cases={f.__name__: f for f in COLLECTIVES})
def test_collectives_give_what_gloo_gives(collective: Callable[[Tensor], list[Tensor]]) -> None:
    for dtype in DTYPES:
        expected = collective(values(torch.device("cpu"), dtype))
        before = len(simulated().started_collectives())
        found = collective(values(DEVICE, dtype))
        assert (len(simulated().started_collectives()) > before) == bool(expected) or collective is reduced
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.device.type == DEVICE.type
            assert torch.equal(one.cpu(), other), (collective, dtype)


@on_ranks(2)
def test_waiting_makes_the_stream_wait_and_not_the_host() -> None:
    x = torch.ones(1000, device=DEVICE)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    simulated().clear()
    sleep(1.5)
    x.mul_(2)
    began = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    y = x + 1
    assert not work.is_completed()
    assert time.perf_counter() - began < 1
    assert simulated().host_waits() == []
    assert y.cpu().tolist() == [9.0] * 1000
    assert work.is_completed()
    assert simulated().unordered_accesses() == []


@on_ranks(2)
def test_reading_without_waiting_for_a_collective_is_reported() -> None:
    side = torch.Stream(DEVICE)
    for where in (None, side):
        x = torch.ones(1000, device=DEVICE)
        torch.accelerator.synchronize()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        if where is not None:
            work.wait()  # on the current stream, and not on the other
        with on_stream(where):
            y = x + 1
        found = simulated().unordered_accesses()
        assert len(found) == 1
        assert "collective allreduce on communicator stream" in found[0]
        simulated().clear()
        torch.accelerator.synchronize()
        del y
    dist.barrier()
    simulated().clear()


@on_ranks(2)
def test_a_collective_keeps_its_memory_until_somebody_has_waited() -> None:
    x, other = torch.ones(1000, device=DEVICE), torch.ones(1, device=DEVICE)
    sleep(0.1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    used = torch.accelerator.memory_allocated()
    del x
    assert torch.accelerator.memory_allocated() == used
    work.wait()
    del work  # it has the result
    torch.accelerator.synchronize()
    dist.all_reduce(other)  # the next start forgets what is over
    assert torch.accelerator.memory_allocated() == used - 4000


@on_ranks(2)
def test_futures_of_collectives_carry_their_stream() -> None:
    x = torch.ones(1000, device=DEVICE)
    sleep(0.1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    assert doubled.cpu().tolist() == [4.0] * 1000


@on_ranks(2)
def test_what_the_device_could_not_send_is_refused() -> None:
    x = torch.ones(4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="cannot send and receive in the same memory"):
        dist.all_to_all_single(x, x)
    with pytest.raises((RuntimeError, ValueError), match="contiguous"):
        dist.all_reduce(x[:, :2])
    numbers = torch.ones(2, device=DEVICE).to(torch.uint16)
    with pytest.raises(RuntimeError, match="NCCL cannot send UInt16"):
        dist.all_gather_into_tensor(numbers.repeat(2), numbers)


def in_other_orders() -> None:
    first, second = (dist.new_group(backend="simccl") for _ in range(2))
    simulated().clear()
    x, y = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    pairs = [(x, first), (y, second)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in (reversed(pairs) if dist.get_rank() else pairs)]
    for work in works:
        assert work is not None
        work.wait()
    assert x.tolist() == [2.0] * 4, "gloo does not mind"
    with pytest.raises(AssertionError, match="ranks start collectives in different orders"):
        simulated().check_ranks()
    simulated().clear()


@on_ranks(2)
def test_another_order_of_two_communicators_is_found() -> None:
    in_other_orders()


def test_conflicts_of_order_are_found_in_groups_that_ranks_share() -> None:
    both, mine, others = ("both", "all_reduce", 4, "Float"), ("mine", "all_reduce", 4, "Float"), ("o", "x", 1, "Float")
    longer = ("both", "all_reduce", 5, "Float")
    assert order_conflicts([[both, mine, both], [both, others, both]]) == []
    assert order_conflicts([[], []]) == []
    (found,) = order_conflicts([[both, longer], [longer, both]])
    assert "collective 0" in found
    (found,) = order_conflicts([[both, both], [both]])
    assert "starts 2 collectives, rank 1 1" in found
    second = ("second", "all_reduce", 4, "Float")
    (found,) = order_conflicts([[both, both, second], [both, second, both], [mine]])
    assert "collective 1" in found
    assert len(order_conflicts([[both], [longer], [longer]])) == 2


@on_ranks(2, fresh=True)
def test_aborting_wakes_what_waits_and_every_later_use_raises() -> None:
    group = dist.new_group(backend="simccl")
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x, group=group)
    torch.accelerator.synchronize()
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, group=group, async_op=True)  # the other rank never comes
        assert work is not None
        work.wait()
        group.abort()
        torch.accelerator.synchronize()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
        with pytest.raises(RuntimeError, match="aborted on rank 0"):
            dist.all_reduce(x, group=group)
    simulated().clear()


@on_ranks(2, fresh=True)
def test_wrappers_of_cpu_modules_have_parts_of_their_own() -> None:
    """Where a thread of each wrapper starts collectives in them."""
    with several_machines():
        wrappers = [BucketDDP(Mlp(), bucket_cap_mb=SMALL) for _ in range(2)]
    assert "simccl" in dist.get_backend_config()
    first, second = (wrapper._runtime.collectives.of_stage[0].group for wrapper in wrappers)
    assert first is not second
    for model in wrappers:
        model.close()
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(first)


@on_ranks(2, fresh=True)
def test_parameters_of_another_type_of_device_are_refused_after_wrapping() -> None:
    model = BucketDDP(Mlp())
    loss_of(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    model.zero_grad()
    for module in list(model.module.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().to(DEVICE)))
    x, target = (tensor.to(DEVICE) for tensor in batch(0, 0))
    with pytest.raises(RuntimeError, match=r"expected parameters on 'cpu' devices.* found '.*weight' on sim"):
        loss_of(model(x), target).backward()


@on_ranks(2)
def test_parts_have_the_backend_of_their_group_and_writers_its_device() -> None:
    whole = Collectives(dist.new_group(backend="simccl"), DEVICE)
    assert dist.get_backend_config(whole.split([range(2)]).group) == dist.get_backend_config(whole.group)
    here = torch.accelerator.current_device_index()
    writer = CheckpointWriter(all_ranks(torch.device(DEVICE.type, here)))
    assert everyones((here, writer._thread.submit(torch.accelerator.current_device_index).result())) == [(0, 0), (1, 1)]
    writer.end()
    whole.end_subgroups()


@on_ranks(4, cases={"one group": (None, 2), "groups of two": (2, 4)}, quick=["groups of two"])
def test_close_ends_no_communicator_and_the_next_wrapper_has_the_same(group_size: int | None, number: int) -> None:
    def train() -> tuple[list[str], list[Tensor]]:
        torch.manual_seed(3)
        model = BucketDDP(Mlp().to(DEVICE), bucket_cap_mb=SMALL, shard_optimizer=True, shard_group_size=group_size)
        optimizer = torch.optim.Adam(model.parameters())
        simulated().clear()
        for step in range(3):
            x, target = (tensor.to(DEVICE) for tensor in batch(step, dist.get_rank()))
            loss_of(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.wait_for_parameters()
        model.close()
        return sorted({group for group, *_ in simulated().started_collectives()}), list(model.module.parameters())

    groups, params = train()
    assert len(groups) == number, "of all ranks, and for parameters; in and across groups of shards"
    made = Mock(side_effect=AssertionError)
    with patch.object(dist, "new_subgroups_by_enumeration", made), patch.object(dist, "destroy_process_group", made):
        again, same = train()
    assert again == groups
    assert all(map(torch.equal, same, params))
