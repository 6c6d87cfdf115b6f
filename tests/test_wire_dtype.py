"""What travels, in which order and how exactly: low-precision wires, bytes, and the collectives themselves."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.collectives import Collectives
from tests.hooks import WAYS, options_for
from tests.models import Mlp, batch, loss_of
from tests.reference import grads

RunRanks = Callable[..., list[Any]]
TINY = 0.0003


# -- a low-precision wire ----------------------------------------------------------------------------


def reduced_in(wire_dtype: torch.dtype, options: dict[str, Any]) -> tuple[float, float, dict[str, Tensor | None]]:
    """The relative error against the mean in fp64; the share of elements that a sum without rounding would give."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    module = Mlp(width=61, depth=3)  # buckets whose length 3 does not divide
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    squares, norm, as_exact, elements = 0.0, 0.0, 0, 0
    for step in range(3):
        inputs, target = batch(step, dist.get_rank())
        ours.zero_grad()
        plain.zero_grad()
        loss_of(ours(inputs), target).backward()
        loss_of(plain(inputs), target).backward()
        for param, other in zip(module.parameters(), plain.parameters(), strict=True):
            exact = other.grad.double()
            dist.all_reduce(exact)
            exact /= world
            squares += float((param.grad.double() - exact).square().sum())
            norm += float(exact.square().sum())
            summed_exactly = other.grad.to(wire_dtype).double()
            dist.all_reduce(summed_exactly)
            as_exact += int((param.grad == (summed_exactly / world).to(wire_dtype)).sum())
            elements += param.numel()
    assert world == 2 or any(bucket.numel % world for bucket in ours.layout.buckets)
    assert ours.early_launches > 0
    ours.close()
    return (squares / norm) ** 0.5, as_exact / elements, grads(module)


def test_a_bf16_wire_is_summed_in_fp32(run_ranks: RunRanks) -> None:
    error, as_exact, _ = run_ranks(3, reduced_in, torch.bfloat16, {"wire_dtype": torch.bfloat16})[0]
    error_of_hook, as_exact_of_hook, _ = run_ranks(3, reduced_in, torch.bfloat16, {"comm_hook": "bf16"})[0]
    assert 0 < error < 0.8 * error_of_hook
    assert as_exact > 0.999
    assert as_exact_of_hook < 0.8


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_a_wire_dtype_all_ranks_end_with_the_same_bits(
    run_ranks: RunRanks, world_size: int, wire_dtype: torch.dtype
) -> None:
    results = run_ranks(world_size, reduced_in, wire_dtype, {"wire_dtype": wire_dtype})
    for _, _, found in results:
        for name, grad in found.items():
            assert torch.equal(grad, results[0][2][name]), name
            assert torch.equal(grad, grad.to(wire_dtype).float())


@contextmanager
def recorded(record: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls ``record`` with the name of each collective and the largest tensor it is given."""
    names = ["all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single", "broadcast"]
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            record(name, args[0])
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, recording(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def order_of_collectives(way: str) -> tuple[list[tuple[str, int]], int]:
    rank = dist.get_rank()
    module = Mlp(depth=5)
    for index, layer in enumerate(module.layers):
        layer.weight.register_hook(lambda _, index=index: time.sleep(0.01 * ((index * (rank + 1)) % 3)))
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options_for(way))
    calls: list[tuple[str, int]] = []
    with recorded(lambda name, tensor: calls.append((name, tensor.numel()))):
        for step in range(4):
            inputs, target = batch(step, rank)
            loss_of(ours(inputs), target).backward()
    buckets = len(ours.layout.buckets)
    ours.close()
    return calls, buckets


@pytest.mark.parametrize("way", [*WAYS, "powersgd"])
def test_collectives_come_in_the_same_order_on_every_rank(run_ranks: RunRanks, way: str) -> None:
    by_rank = run_ranks(3, order_of_collectives, way)
    assert all(result == by_rank[0] for result in by_rank)
    if way == "wire":
        calls, buckets = by_rank[0]
        stages = [name.split("_")[1] for name, _ in calls[-2 * buckets - 1 :]]
        assert buckets > 1
        assert stages == ["to"] * buckets + ["gather"] * buckets + ["reduce"]


def sent_bytes(calls: list[tuple[str, int]]) -> float:
    """Bytes that a rank sends at least, by collective; in an all-reduce everything travels twice."""
    world = dist.get_world_size()
    trips = {"all_reduce": 2.0, "broadcast": 1.0}
    return sum(nbytes * trips.get(name, 1.0) * (world - 1) / world for name, nbytes in calls)


def bytes_of_a_pass(options: dict[str, Any]) -> tuple[float, int]:
    """Bytes handed to collectives in one pass, and bytes that this process wrote, the store's included."""
    torch.manual_seed(0)
    if options.get("comm_hook") == "powersgd":
        options = {**options, "comm_hook_state": PowerSGDState(None, 1, start_powerSGD_iter=3)}
    ours = BucketDDP(Mlp(width=512, depth=3), **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    calls: list[tuple[str, int]] = []
    before = 0
    with recorded(lambda name, tensor: calls.append((name, tensor.nbytes))):
        for step in range(5):
            inputs, target = batch(step, dist.get_rank())
            loss = loss_of(ours(inputs), target)
            optimizer.zero_grad()
            if step == 4:
                dist.barrier()
                calls.clear()
                before = written()
            loss.backward()
            if step < 4:
                optimizer.step()
    really = written() - before
    ours.close()
    return sent_bytes(calls), really


def written() -> int:
    """Bytes this process has written anywhere, sockets included (Linux)."""
    file = Path("/proc/self/io")
    if not file.exists():
        return 0
    return int(dict(line.split(": ") for line in file.read_text().splitlines())["wchar"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_on_the_wire(run_ranks: RunRanks, world_size: int) -> None:
    plain, *compressed = (
        run_ranks(world_size, bytes_of_a_pass, options)[0]
        for options in (
            {},
            {"comm_hook": "bf16"},
            {"comm_hook": "fp16"},
            {"wire_dtype": torch.bfloat16},
            {"wire_dtype": torch.float16},
            {"comm_hook": "powersgd"},
        )
    )
    *halves, power_sgd = compressed
    elements = 8 * 512 + 2 * 512 * 512 + 512 * 4 + 3 * 512 + 4
    assert plain[0] == pytest.approx(elements * 4 * 2 * (world_size - 1) / world_size, rel=0.01)
    for counted, really in halves:
        assert counted == pytest.approx(plain[0] / 2, rel=0.02)
        assert really == pytest.approx(plain[1] / 2, rel=0.05)
    assert power_sgd[0] < plain[0] / 30
    assert power_sgd[1] < plain[1] / 10 or plain[1] == 0


# -- the collectives themselves ----------------------------------------------------------------------


def scatter(dtype: torch.dtype, wire_dtype: torch.dtype | None, on_gloo: bool) -> None:
    original = dist.get_backend_config
    if not on_gloo:
        dist.get_backend_config = lambda _: "cpu:other"
    try:
        collectives = Collectives(None)
        collectives.probe(torch.device("cpu"))
        world, rank = collectives.world_size, collectives.rank
        for numel in (1, 2, 7, 96, 1000):
            values = [
                torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(17 * numel + other))
                for other in range(world)
            ]
            mean = torch.stack([v.to(torch.complex128 if dtype.is_complex else torch.float64) for v in values]).mean(0)
            flat = values[rank].clone()
            shard = collectives.shard(flat)
            lengths = [-(-numel // world)] * world
            start = min(rank * lengths[0], numel)
            assert shard.numel() == min(start + lengths[0], numel) - start
            collectives.reduce_scatter_mean(flat, wire_dtype).wait()
            tolerance = 2**-6 if wire_dtype or dtype.itemsize == 2 else 1e-6
            expected = mean[start : start + shard.numel()].to(dtype)
            torch.testing.assert_close(shard, expected, rtol=tolerance, atol=tolerance)
            if wire_dtype is not None:
                flat = values[rank].clone()
                collectives.all_reduce_mean(flat, wire_dtype).wait()
                torch.testing.assert_close(flat, mean.to(dtype), rtol=tolerance, atol=tolerance)
    finally:
        dist.get_backend_config = original


@pytest.mark.parametrize("on_gloo", [True, False], ids=["gloo", "other"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_and_all_reduce_give_the_mean(
    run_ranks: RunRanks, world_size: int, dtype: torch.dtype, wire_dtype: torch.dtype | None, on_gloo: bool
) -> None:
    run_ranks(world_size, scatter, dtype, wire_dtype, on_gloo)
