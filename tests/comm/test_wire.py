"""What travels, and how exactly: the collectives, low-precision wires, bytes."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.reducer.reductions import AllReduce
from tests.models import Mlp, batch, loss_of
from tests.pool import RunRanks, on_ranks
from tests.reference import TINY, backward, grads

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("on_gloo", [True, False], ids=["gloo", "other"])
@on_ranks(1, 2, 3)
def test_reductions_give_the_mean(on_gloo: bool) -> None:
    original = dist.get_backend_config
    if not on_gloo:
        dist.get_backend_config = lambda _: "cpu:other"
    collectives = Collectives(None)
    dist.get_backend_config = original
    collectives.probe(torch.device("cpu"))
    world, rank = collectives.world_size, collectives.rank
    for dtype, wire_dtype, numel in itertools.product(DTYPES, [None, *HALVES], (1, 2, 7, 96, 1000)):
        generator = torch.Generator().manual_seed(numel)
        values = [torch.randn(numel, dtype=dtype, generator=generator) for _ in range(world)]
        exact = torch.complex128 if dtype.is_complex else torch.float64
        mean = torch.stack([value.to(exact) for value in values]).mean(0).to(dtype)
        tolerance = 2**-6 if wire_dtype or dtype.itemsize == 2 else 1e-6
        case = f"{dtype}, {wire_dtype}, {numel} elements"
        close = {"rtol": tolerance, "atol": tolerance, "msg": lambda m, case=case: f"{case}: {m}"}
        flat = values[rank].clone()
        collectives.all_reduce_mean(flat, wire_dtype).wait()
        torch.testing.assert_close(flat, mean, **close)
        flat = values[rank].clone()
        shard = collectives.shard(flat)
        length = -(-numel // world)
        collectives.reduce_scatter_mean(flat, wire_dtype).wait()
        torch.testing.assert_close(shard, mean[rank * length : (rank + 1) * length], **close)


@on_ranks(3)
def test_a_sum_in_fp16_does_not_overflow() -> None:
    collectives = Collectives(None)
    collectives.probe(torch.device("cpu"))
    flat = torch.full((9,), 60000.0, dtype=torch.float16)
    collectives.all_reduce_mean(flat).wait()
    assert flat.tolist() == pytest.approx([60000.0] * 9, rel=2**-9)


@on_ranks(2, 3)
def test_pieces_give_the_same_bits() -> None:
    collectives = Collectives(None)
    world, rank = collectives.world_size, collectives.rank
    for dtype, wire_dtype, numel in itertools.product(DTYPES, [None, torch.bfloat16], (96, 1000, 1003)):
        found, longest = [], []
        for piece in (wire.PIECE_BYTES, 64):
            values = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(rank))
            reduced, scattered, gathered = values.clone(), values.clone(), values.repeat(world)
            with patch.object(wire, "PIECE_BYTES", piece), recorded() as calls:
                collectives.all_reduce_mean(reduced, wire_dtype).wait()
                collectives.reduce_scatter_mean(scattered, wire_dtype).wait()
                collectives.all_gather_shards(gathered).wait()
            found.append([reduced, collectives.shard(scattered), gathered])
            longest.append(max(nbytes for name, nbytes in calls if name != "allreduce"))
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert longest[1] <= 64 * (world - 1) < longest[0]


def reduced_in(wire_dtype: torch.dtype, options: dict[str, Any]) -> tuple[float, float, dict[str, Tensor | None]]:
    """The relative error against the mean in fp64; the share of elements that a sum without rounding would give."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    module = Mlp(width=61, depth=3)  # buckets whose length 3 does not divide
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    squares, norm, as_exact, elements = 0.0, 0.0, 0, 0
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            backward(model, step)
        for param, other in zip(module.parameters(), plain.parameters(), strict=True):
            exact, summed_exactly = other.grad.double(), other.grad.to(wire_dtype).double()
            dist.all_reduce(exact)
            dist.all_reduce(summed_exactly)
            squares += float((param.grad.double() - exact / world).square().sum())
            norm += float((exact / world).square().sum())
            as_exact += int((param.grad == (summed_exactly / world).to(wire_dtype)).sum())
            elements += param.numel()
    assert world == 2 or any(bucket.numel % world for bucket in ours.layout.buckets)
    assert ours.last_pass().early_launches > 0
    ours.close()
    return (squares / norm) ** 0.5, as_exact / elements, grads(module)


def reduced_in_each() -> list[Any]:
    return [
        *(reduced_in(wire_dtype, {"wire_dtype": wire_dtype}) for wire_dtype in HALVES),
        reduced_in(torch.bfloat16, {"comm_hook": "bf16"}),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_low_wire_is_summed_in_fp32(run_ranks: RunRanks, world_size: int) -> None:
    by_rank = run_ranks(world_size, reduced_in_each)
    for wire_dtype, *found in zip(HALVES, *by_rank, strict=False):
        for _, _, grad_of in found:
            for name, grad in grad_of.items():
                assert torch.equal(grad, found[0][2][name]), f"{name}: all ranks end with the same bits"
                assert torch.equal(grad, grad.to(wire_dtype).float())
    (error, as_exact, _), _, (error_of_hook, as_exact_of_hook, _) = by_rank[0]
    assert as_exact > 0.999
    if world_size == 3:  # the hook sums in bf16
        assert 0 < error < 0.8 * error_of_hook
        assert as_exact_of_hook < 0.8


@contextmanager
def recorded() -> Iterator[list[tuple[str, float]]]:
    """The name of each collective, and the bytes that this rank gets from others."""
    calls: list[tuple[str, float]] = []
    world = dist.get_world_size()
    trips = {"allreduce": 2.0}  # in an all-reduce everything travels twice

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[1] if name == "allreduce" else args[0]
            nbytes = sum(tensor.nbytes for tensor in (given if isinstance(given, list) else [given]))
            in_pieces = name == "all_to_all_single" and len(args) > 2  # nothing is this rank's own
            calls.append((name, nbytes if in_pieces else nbytes * trips.get(name, 1.0) * (world - 1) / world))
            return original(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for owner, name in (
            (dist.ProcessGroup, "allreduce"),
            (dist, "all_to_all_single"),
            (dist, "all_gather_into_tensor"),
            (dist, "all_gather_single"),
            (dist, "all_gather"),
        ):
            if (original := getattr(owner, name, None)) is not None:
                patches.enter_context(patch.object(owner, name, recording(name, original)))
        yield calls


def bytes_of_passes(choices: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Per choice, bytes handed to collectives in one pass, and bytes that this process wrote, the store's included."""
    return [bytes_of_a_pass(options) for options in choices]


def bytes_of_a_pass(options: dict[str, Any]) -> tuple[float, int]:
    torch.manual_seed(0)
    if options.get("comm_hook") == "powersgd":
        options = {**options, "comm_hook_state": PowerSGDState(None, 1, start_powerSGD_iter=3)}
    ours = BucketDDP(Mlp(width=512, depth=3), **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    for step in range(4):
        loss_of(ours(batch(step, dist.get_rank())[0]), batch(step, 0)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = loss_of(ours(batch(4, dist.get_rank())[0]), batch(4, 0)[1])
    dist.barrier()
    before = written()
    with recorded() as calls:
        loss.backward()
    really = written() - before
    ours.close()
    return sum(nbytes for _, nbytes in calls), really


def written() -> int:
    """Bytes this process has written anywhere, sockets included (Linux)."""
    file = Path("/proc/self/io")
    if not file.exists():
        return 0
    return int(dict(line.split(": ") for line in file.read_text().splitlines())["wchar"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_on_the_wire(run_ranks: RunRanks, world_size: int) -> None:
    halved = [*({"comm_hook": name} for name in ("bf16", "fp16")), *({"wire_dtype": dtype} for dtype in HALVES)]
    plain, *halves, power_sgd = run_ranks(world_size, bytes_of_passes, [{}, *halved, {"comm_hook": "powersgd"}])[0]
    elements = 8 * 512 + 2 * 512 * 512 + 512 * 4 + 3 * 512 + 4
    assert plain[0] == pytest.approx(elements * 4 * 2 * (world_size - 1) / world_size, rel=0.01)
    for counted, really in halves:
        assert counted == pytest.approx(plain[0] / 2, rel=0.02)
        assert really == pytest.approx(plain[1] / 2, rel=0.05)
    assert power_sgd[0] < plain[0] / 30
    assert power_sgd[1] < plain[1] / 10 or plain[1] == 0


@on_ranks(2)
def test_on_accelerators_second_stages_have_a_fixed_place() -> None:
    """Reduce three buckets as on an accelerator, where the second stages have no group of their own."""
    collectives, buckets = Collectives(None), Buckets.__new__(Buckets)
    rank = dist.get_rank()
    flats = [torch.full((10,), 1.0 + index + rank) for index in range(3)]
    buckets.active = [Bucket(index, (), False, flat) for index, flat in enumerate(flats)]
    reduction = AllReduce(collectives, buckets, torch.bfloat16, scales=True)
    with recorded() as calls:
        for bucket in buckets.active:
            bucket.work = reduction.start(bucket)
        reduction.proceed(lambda: None)
    for bucket in buckets.active:
        bucket.work.wait()
    to_all, gather = "all_to_all_single", "all_gather"
    names = [gather if gather in name else name for name, _ in calls]
    assert names == [to_all, to_all, gather, to_all, gather, gather]
    for index, flat in enumerate(flats):
        assert torch.equal(flat, torch.full((10,), 1.5 + index))


@on_ranks(2)
def test_second_stages_start_during_backward() -> None:
    torch.manual_seed(0)
    ours = BucketDDP(Mlp(depth=3), wire_dtype=torch.bfloat16, bucket_cap_mb=TINY)
    inputs, target = batch(0, dist.get_rank())
    inputs.requires_grad_()
    seen = False

    def wait_for_a_gather(_: Tensor) -> None:
        nonlocal seen
        deadline = time.monotonic() + 20
        while not (seen := any("all_gather" in name for name, _ in calls)) and time.monotonic() < deadline:
            time.sleep(0.001)

    loss_of(ours(inputs), target).backward()  # teaches the order
    inputs.register_hook(wait_for_a_gather)  # the last gradient of all
    with recorded() as calls:
        loss_of(ours(inputs), target).backward()
    assert seen
