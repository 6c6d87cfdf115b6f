"""What travels, and how exactly: the collectives, low-precision wires, bytes."""

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm import broadcast, gloo, wire
from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.gloo import GlooCollectives, collectives_of
from lightning_bucketddp.comm.lane import ThreadLane
from lightning_bucketddp.comm.work import Stages
from tests.models import Mlp
from tests.pool import case, on_ranks
from tests.reference import TINY, backward, everyones, inner, local_if, loss_at, noted, pair

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
HALVES = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def run(stages: Stages) -> None:
    """Run the stages of a reduction one after the other."""
    for stage in stages:
        stage.handle.wait()


@pytest.mark.parametrize("on_gloo", [True, False], ids=["gloo", "other"])
@on_ranks(2, 3, 1)
def test_reductions_give_the_mean(on_gloo: bool) -> None:
    collectives = collectives_of(None, CPU) if on_gloo else Collectives(None)
    assert isinstance(collectives, GlooCollectives) == on_gloo
    collectives.probe(CPU)
    world, rank = collectives.world_size, collectives.rank
    for dtype, wire_dtype, numel in itertools.product(DTYPES, [None, *HALVES], (1, 2, 7, 96, 1000)):
        generator = torch.Generator().manual_seed(numel)
        values = [torch.randn(numel, dtype=dtype, generator=generator) for _ in range(world)]
        exact = torch.complex128 if dtype.is_complex else torch.float64
        mean = torch.stack([value.to(exact) for value in values]).mean(0).to(dtype)
        tolerance = 2**-6 if wire_dtype or dtype.itemsize == 2 else 1e-6
        whole, scattered = values[rank].clone(), values[rank].clone()
        run(collectives.reduce(whole, wire.packed(whole), wire_dtype))
        run(collectives.reduce_scatter(scattered, wire.packed(scattered), wire_dtype))
        length = -(-numel // world)
        with case(dtype, wire_dtype, numel):
            torch.testing.assert_close(whole, mean, rtol=tolerance, atol=tolerance)
            part = mean[rank * length : (rank + 1) * length]
            torch.testing.assert_close(collectives.shard(scattered), part, rtol=tolerance, atol=tolerance)
    flat = torch.full((9,), 60000.0, dtype=torch.float16)
    collectives.all_reduce_mean(flat).wait()
    assert flat.tolist() == pytest.approx([60000.0] * 9, rel=2**-9), "no overflow"


@on_ranks(2, 3, cases=[0, gloo.SHORT_BYTES])
def test_sums_and_gathers_are_right_at_once_and_in_rounds(short: int) -> None:
    collectives = collectives_of(None, CPU)
    world, rank = collectives.world_size, collectives.rank
    with patch.object(gloo, "SHORT_BYTES", short), noted("allreduce") as in_rounds:
        for dtype, shape in itertools.product([*DTYPES, torch.int64], [(), (5,), (3, 7)]):
            generators = [torch.Generator().manual_seed(seed) for seed in range(world)]
            values = [(torch.randn(shape, generator=generator) * 9).to(dtype) for generator in generators]
            total, gathered = values[rank].clone(), values[rank].flatten().repeat(world)
            collectives.all_reduce_sum(total).wait()
            collectives.all_gather_shards(gathered).wait()
            with case(dtype, shape):
                torch.testing.assert_close(total, sum(values), rtol=0, atol=0.5 if dtype.itemsize == 2 else 1e-5)
                assert all(torch.equal(total, other) for other in everyones(total))
                assert gathered.equal(torch.stack(values).flatten())
    assert bool(in_rounds) == (short == 0)


@on_ranks(2, 3)
def test_pieces_give_the_same_bits() -> None:
    collectives = collectives_of(None, CPU)
    world, rank = collectives.world_size, collectives.rank
    for dtype, wire_dtype, numel in itertools.product(DTYPES, [None, torch.bfloat16], (480, 1000, 1003)):
        found, counts = [], []
        for piece in (gloo.LONG_BYTES, 64):
            values = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(rank))
            reduced, scattered, gathered = values.clone(), values.clone(), values.repeat(world)
            pieces = patch.multiple(gloo, SHORT_BYTES=0, LONG_BYTES=piece, PIECE_BYTES=piece)
            with pieces, noted("all_to_all_single", "allgather") as calls:
                run(collectives.reduce(reduced, wire.packed(reduced), wire_dtype))
                run(collectives.reduce_scatter(scattered, wire.packed(scattered), wire_dtype))
                collectives.all_gather_shards(gathered).wait()
            found.append([reduced, collectives.shard(scattered), gathered])
            counts.append((calls.count("all_to_all_single"), calls.count("allgather")))
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert counts[0][0] < counts[1][0]
        assert counts[0][1] == 0
        assert (counts[1][1] > 0) == (world > 2)


@on_ranks(2, 3, cases=HALVES)
def test_a_low_wire_is_summed_in_fp32(wire_dtype: torch.dtype) -> None:
    """Nearly all elements are those of a sum without rounding, and all ranks end with the same bits."""
    world = dist.get_world_size()
    plain, ours = pair(partial(Mlp, width=61, depth=3), TINY, wire_dtype=wire_dtype)  # 3 does not divide the buckets
    as_exact = []
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
        backward(plain, step)
        with patch.object(ThreadLane, "run", autospec=True, side_effect=ThreadLane.run) as ran:
            backward(ours, step)
        for param, other in zip(ours.parameters(), plain.parameters(), strict=True):
            exact = other.grad.to(wire_dtype).double()
            dist.all_reduce(exact)
            mean = exact / world if world == 2 else (exact / world).to(wire_dtype)  # two ranks gather all values
            as_exact.append((param.grad == mean.float()).flatten())
            assert all(torch.equal(param.grad, grad) for grad in everyones(param.grad))
    assert torch.cat(as_exact).float().mean() > 0.999
    assert all(bucket.numel % (8 * world) == 0 for bucket in ours.layout.buckets), "parts of 16 bytes"
    assert ran.called, "second stages start during backward"
    assert ours.last_pass().early_launches > 0


def test_8_bits_are_off_by_half_a_step_at_most() -> None:
    """Whatever the size of a block's values, and with zeros among them or alone."""
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.arange(-148, 128, dtype=torch.float64)
    values = torch.randn(len(sizes) + 4, wire.BLOCK_NUMEL, dtype=torch.float64, generator=generator).clamp(-1.9, 1.9)
    values[: len(sizes)].mul_(sizes[:, None])
    values[len(sizes) :] = 0
    values[:, ::3] = 0
    values[0, :3] = torch.tensor([2.0**-149, 0.0, -190 * 2.0**-149])  # a step of 1.5 times the smallest number
    sent = values.float()
    found = sent_in_8_bits(sent)
    step = sent.double().abs().amax(1, keepdim=True) / 127
    assert torch.all((found.double() - sent.double()).abs() <= step * 0.50001 + 2.0**-149)
    assert torch.all(found[len(sizes) :] == 0)
    assert torch.all(found.abs().amax(1)[: len(sizes)] > 0), "no block is lost"


def sent_in_8_bits(values: Tensor) -> Tensor:
    message = torch.empty(values.numel() // wire.RECORD_NUMEL * wire.RECORD_BYTES, dtype=torch.uint8)
    wire.write_8_bits(values.flatten().clone(), message)
    return wire.values_of(message).view(values.shape)


def largest_of_blocks(values: Tensor) -> Tensor:
    """Each value's largest neighbour in its block, in absolute value."""
    largest = wire.real(values).abs().view(-1, wire.BLOCK_NUMEL).amax(1, keepdim=True).double()
    return largest.expand(-1, wire.BLOCK_NUMEL).flatten()


@pytest.mark.parametrize("on_gloo", [True, False], ids=["gloo", "other"])
@on_ranks(2, 3)
def test_8_bits_lose_what_the_option_says(on_gloo: bool) -> None:
    """1/254 of the largest value of a block, as a mean over the ranks; twice that where the mean is rounded, too."""
    collectives = collectives_of(None, CPU) if on_gloo else Collectives(None)
    world, rank = collectives.world_size, collectives.rank
    for dtype, scale in itertools.product(DTYPES, (1.0, 1e-6)):
        numel = wire.RECORD_NUMEL * world * 2
        generator = torch.Generator().manual_seed(1)
        values = [(torch.randn(numel, dtype=dtype, generator=generator) * scale) for _ in range(world)]
        exact = torch.complex128 if dtype.is_complex else torch.float64
        mean = wire.real(torch.stack([value.to(exact) for value in values]).mean(0))
        largest = torch.stack([largest_of_blocks(value) for value in values]).mean(0)
        info = torch.finfo(dtype)
        rounded = (mean.abs() + largest / 254) * info.eps + info.tiny + 1e-6 * largest  # and sums in fp32
        whole, scattered = values[rank].clone(), values[rank].clone()
        with telling_messages(type(collectives)) as messages:
            run(collectives.reduce(whole, wire.packed(whole), torch.int8))
        run(collectives.reduce_scatter(scattered, wire.packed(scattered), torch.int8))
        part = slice(rank * len(mean) // world, (rank + 1) * len(mean) // world)
        with case(dtype, scale):
            errors = (wire.real(whole).double() - mean).abs()
            once = largest / 254 + rounded
            assert torch.all(errors <= (once if world == 2 else 2 * once + largest / 127 / 508))
            assert world == 2 or torch.any(errors > largest / 254), "more than one rounding"
            errors = (wire.real(collectives.shard(scattered)).double() - mean[part]).abs()
            assert torch.all(errors <= largest[part] / 254 + rounded[part])
            assert all(torch.equal(whole, other) for other in everyones(whole))
            sent = len(mean) // 512 * (512 + 16)  # steps travel with their values
            assert messages == ([2 * sent] if world == 2 else [sent, sent])


@contextmanager
def telling_messages(kind: type[Collectives]) -> Iterator[list[int]]:
    """The lengths of all messages in 8 bits, in bytes."""
    with ExitStack() as stack:
        names = ("_exchange", "_gather")
        calls = [
            stack.enter_context(patch.object(kind, name, autospec=True, side_effect=getattr(kind, name)))
            for name in names
        ]
        found: list[int] = []
        yield found
        found += [
            each.args[1].nbytes for call in calls for each in call.call_args_list if each.args[1].dtype is torch.uint8
        ]


@on_ranks(2, 3)
def test_what_is_not_finite_arrives_so_in_8_bits() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for collectives, bad in itertools.product([collectives_of(None, CPU), Collectives(None)], [math.nan, math.inf]):
        flat = torch.ones(wire.RECORD_NUMEL * world)
        flat[200] = bad if rank == 0 else 1.0
        flat[-1] = -bad if rank == world - 1 else 1.0
        scattered = flat.clone()
        run(collectives.reduce(flat, wire.packed(flat), torch.int8))
        run(collectives.reduce_scatter(scattered, wire.packed(scattered), torch.int8))
        finite = torch.ones(len(flat), dtype=torch.bool)
        finite[128:256] = finite[-128:] = False
        assert torch.equal(flat.isfinite(), finite)
        assert torch.equal(collectives.shard(scattered).isfinite(), collectives.shard(finite))
        torch.testing.assert_close(flat[finite], torch.ones(int(finite.sum())))


@on_ranks(2)
def test_a_grad_scaler_sees_what_is_not_finite_in_8_bits() -> None:
    ours, scaler = BucketDDP(Mlp(), wire_dtype="int8"), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    before = [param.detach().clone() for param in ours.parameters()]
    for step, bad in enumerate((math.nan, math.inf), 1):
        optimizer.zero_grad()
        factor = torch.ones(4, 16)
        factor[2, 3] = bad if dist.get_rank() == 1 else 1.0
        handle = ours.module.head.weight.register_hook(factor.mul)
        scaler.scale(loss_at(ours)).backward()
        handle.remove()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(list(ours.parameters()), before, rtol=0, atol=0)
        assert scaler.get_scale() == 4.0 / 2**step


EIGHT_BITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "coalesced": {"use_contiguous_buffers": False},
    "one bucket": {"overlap": False},
    "sharded": {"shard_optimizer": True},
    "sharded, every pass": {"shard_optimizer": True, "scatter_every_pass": True},
}


@on_ranks(2, 3, cases=EIGHT_BITS, quick=["plain", "coalesced", "sharded"])
def test_8_bits_leave_out_parameters_of_one_dimension(options: dict[str, Any]) -> None:
    """Parameters that come later, too."""
    world = dist.get_world_size()
    plain, ours = pair(partial(Mlp, width=61, depth=3), TINY, wire_dtype="int8", **options)
    ours.prepare_optimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    for step in range(4):
        for model in (plain, ours):
            model.zero_grad()
            inner(model).layers[1].requires_grad_(step > 1)
        for micro in range(2):
            backward(plain, 2 * step + micro)
            with local_if(ours, micro == 0):
                backward(ours, 2 * step + micro)
        for (name, param), other in zip(ours.module.named_parameters(), plain.parameters(), strict=True):
            if not param.requires_grad:
                continue
            grad, mean = ours.full_grad(param), other.grad.clone()
            dist.all_reduce(mean)
            mean /= world
            largest = other.grad.abs().max()
            dist.all_reduce(largest)
            with case(name, step):
                tolerance = 1e-6 if grad.dim() < 2 else 0.02 * largest.item() / world
                torch.testing.assert_close(grad, mean, rtol=1e-6, atol=tolerance)
                assert (grad.dim() < 2) == torch.allclose(grad, mean, rtol=1e-5, atol=1e-7)
                assert all(torch.equal(grad, of_rank) for of_rank in everyones(grad))
    assert all(bucket.numel % (wire.RECORD_NUMEL * world) == 0 for bucket in ours.layout.buckets)


def bytes_of_a_pass(options: dict[str, Any]) -> int:
    """The bytes that this process wrote anywhere in one pass, the store's included (Linux)."""
    ours = BucketDDP(Mlp(width=512, depth=3), **options)
    for step in range(5):
        ours.zero_grad()
        loss = loss_at(ours, step)
        dist.barrier()
        before = written()
        loss.backward()
        found = written() - before
    ours.close()
    return found


def written() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count")
@on_ranks(2, 3)
def test_bytes_on_the_wire() -> None:
    halved = [*({"comm_hook": name} for name in ("bf16", "fp16")), *({"wire_dtype": dtype} for dtype in HALVES)]
    powersgd = {"comm_hook": "powersgd", "comm_hook_state": PowerSGDState(None, 1, start_powerSGD_iter=3)}
    plain, *halves, quarter, least = map(bytes_of_a_pass, [{}, *halved, {"wire_dtype": "int8"}, powersgd])
    elements, world = 8 * 512 + 2 * 512 * 512 + 512 * 4 + 3 * 512 + 4, dist.get_world_size()
    assert plain == pytest.approx(elements * 4 * 2 * (world - 1) / world, rel=0.02)
    assert halves == pytest.approx([plain / 2] * 4, rel=0.05)
    assert quarter == pytest.approx(plain * (1 + 4 / wire.BLOCK_NUMEL) / 4, rel=0.05)
    assert least < plain / 10


def tensors_of(rank: int) -> list[torch.Tensor]:
    values = torch.randn(6, generator=torch.Generator().manual_seed(rank))
    small = [values > 0, values.to(torch.bfloat16), torch.tensor(rank), torch.empty(0)]
    strided = [values.double().view(2, 3).t(), values[::2], torch.complex(values, -values)]
    channels_last = values.view(1, 2, 3, 1).contiguous(memory_format=torch.channels_last)
    return [*small, *strided, channels_last, (values * 100).to(torch.int8)[:5]]


@on_ranks(2, cases=[(1 << 20, 1), (40, 5)])
def test_tensors_of_all_dtypes_travel_together(chunk_bytes: int, broadcasts: int) -> None:
    tensors, expected = tensors_of(dist.get_rank()), tensors_of(1)
    chunks = patch.object(broadcast, "_CHUNK_BYTES", chunk_bytes)
    with chunks, patch.object(Collectives, "broadcast", autospec=True, side_effect=Collectives.broadcast) as sent:
        broadcast_tensors(tensors, Collectives(None), source=1)
    assert sent.call_count == broadcasts
    for mine, theirs in zip(tensors, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


@on_ranks(2)
def test_a_mean_that_is_rounded_is_one_and_a_sum_is_none() -> None:
    collectives = Collectives(None)
    for answer, is_mean in [(0.5, True), (0.5000001, True), (1.0, False)]:

        def all_reduce(value: Tensor, answer: float = answer, **_: Any) -> Mock:
            value.fill_(answer)
            return Mock(is_completed=lambda: True)

        with patch.object(dist, "all_reduce", all_reduce):
            collectives.probe(CPU)
        assert collectives._backend_averages == is_mean
