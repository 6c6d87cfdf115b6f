"""Layouts, shards and chunks: random ones by their properties, chosen ones by hand."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bucketddp.layout import plan as plan_file
from lightning_bucketddp.layout.chunks import chunks_of
from lightning_bucketddp.layout.plan import MIB, Layout, ParamSpec, default_bucket_cap, plan
from lightning_bucketddp.layout.shards import parts_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def spec(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> ParamSpec:
    return ParamSpec(name, shape, torch.empty(shape, device="meta").stride(), dtype, device)


TRANSFORMERS = {
    "GPT-2": 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
    "GPT-2 XL": 48 * [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)],
    "Llama 3 8B": 32 * [(4096, 4096), *2 * [(1024, 4096)], (4096, 4096), *2 * [(14336, 4096)], (4096, 14336)],
}
"""The shapes of their layers' matrices."""

Problem = tuple[list[ParamSpec], list[int], list[int], list[int], int]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    shapes = draw(st.lists(st.lists(st.integers(0, 60), max_size=3), min_size=1, max_size=25))
    dtypes, devices = st.sampled_from(DTYPES), st.sampled_from(["cuda:0", "cuda:1"])
    specs = [spec(f"p{at}", tuple(shape), draw(dtypes), draw(devices)) for at, shape in enumerate(shapes)]
    groups = draw(st.lists(st.integers(0, 2), min_size=len(specs), max_size=len(specs)))
    caps = draw(st.lists(st.integers(0, 4000), max_size=3))
    return specs, draw(st.permutations(range(len(specs)))), caps, groups, draw(st.sampled_from([1, 48]))


@settings(deadline=None)
@given(problems())
def test_slots_and_buckets_have_the_properties_of_a_layout(problem: Problem) -> None:
    specs, order, caps, groups, multiple = problem
    layout = plan(*problem)
    position = {slot: at for at, slot in enumerate(order)}
    assert [slot.spec for slot in layout.slots] == specs
    assert sorted(slot for bucket in layout.buckets for slot in bucket.slots) == list(range(len(specs)))
    ends = [0] * len(layout.buffers)
    for bucket in layout.buckets:
        assert bucket.start == ends[bucket.buffer], "buckets tile their buffer in launch order"
        ends[bucket.buffer] = bucket.stop
        assert bucket.numel % multiple == 0
        end = bucket.start
        for slot in (layout.slots[index] for index in bucket.slots):
            buffer = layout.buffers[slot.buffer]
            assert slot.buffer == bucket.buffer
            assert (buffer.dtype, buffer.device) == (slot.spec.dtype, slot.spec.device)
            assert slot.offset >= end, "slots do not overlap"
            assert (slot.offset - bucket.start) * slot.spec.dtype.itemsize % plan_file.ALIGNMENT_BYTES == 0
            end = slot.offset + slot.spec.numel
        assert end <= bucket.stop
        if multiple == 1:
            assert layout.bucket_nbytes(bucket) <= max(caps, default=plan_file.MAX_DEFAULT_BUCKET_BYTES) or (
                len([slot for slot in bucket.slots if specs[slot].numel]) == 1
            )
        assert len({groups[slot] for slot in bucket.slots}) == 1
        inside = [position[slot] for slot in bucket.slots]
        assert inside == sorted(inside)
    assert ends == [buffer.numel for buffer in layout.buffers]
    last = [position[bucket.slots[-1]] for bucket in layout.buckets]
    assert last == sorted(last), "buckets are launched in the order of readiness"


@settings(deadline=None, max_examples=40)
@given(problems(), st.integers(1, 40), st.data())
def test_room_behind_buckets_is_nobody_elses(problem: Problem, room: int, data: st.DataObject) -> None:
    specs, order, caps, groups, multiple = problem
    before = plan(specs, order, caps, groups, multiple)
    behind = data.draw(st.sets(st.integers(0, len(before.buckets) - 1)))
    layout = before.with_room(room, behind)
    assert layout.nbytes == before.nbytes
    ends = [0] * len(layout.buffers)
    for index, (bucket, old) in enumerate(zip(layout.buckets, before.buckets, strict=True)):
        assert bucket.start >= ends[bucket.buffer]
        assert (bucket.room, bucket.numel) == (room if index in behind else 0, old.numel)
        ends[bucket.buffer] = bucket.stop + bucket.room
        itemsize = layout.buffers[bucket.buffer].dtype.itemsize
        assert (bucket.start - old.start) * itemsize % plan_file.ALIGNMENT_BYTES == 0
        for slot in bucket.slots:
            assert layout.slots[slot].offset - bucket.start == before.slots[slot].offset - old.start
    for end, buffer in zip(ends, layout.buffers, strict=True):
        assert end <= buffer.numel


def test_the_drawing_in_the_module_is_true() -> None:
    specs = [spec("a", (8, 4)), spec("b", (16, 4)), spec("c", (10,)), spec("d", (3,))]
    layout = plan(specs, order=[2, 1, 0, 3], bucket_cap_bytes=[320], groups=[0, 0, 0, 1])
    assert [slot.offset for slot in layout.slots] == [80, 16, 0, 112]
    assert [(b.start, b.stop, b.slots) for b in layout.buckets] == [(0, 80, (2, 1)), (80, 112, (0,)), (112, 128, (3,))]
    assert layout.nbytes == 512


def test_each_bucket_may_have_a_cap_of_its_own() -> None:
    specs = [spec(f"p{at}", (16,)) for at in range(9)]  # 64 bytes each
    cut = [bucket.slots for bucket in plan(specs, range(9), bucket_cap_bytes=[64, 192, 128]).buckets]
    assert cut == [(0,), (1, 2, 3), (4, 5), (6, 7), (8,)]


def mib(layout: Layout) -> list[float]:
    return [layout.bucket_nbytes(bucket) / MIB for bucket in layout.buckets]


def test_a_parameter_of_more_than_half_of_the_cap_ends_its_bucket() -> None:
    specs = [spec(f"p{at}", (size, 16)) for at, size in enumerate([1, 51, 1, 51, 50, 50, 1, 101, 1])]  # in 64 bytes
    cut = [bucket.slots for bucket in plan(specs, range(9), bucket_cap_bytes=[6400]).buckets]
    assert cut == [(0, 1), (2, 3), (4, 5), (6,), (7,), (8,)]


def test_default_buckets_are_small_at_both_ends_and_fewer_on_more_ranks() -> None:
    specs = [spec(f"p{at}", (MIB // 16,)) for at in range(800)]  # 0.25 MiB each
    assert mib(plan(specs, range(800), world_size=2)) == [1.5, *[6.25] * 31, 3.25, 1.5]
    large = [spec(index, (MIB, 4)) for index in range(7)]  # 16 MiB each
    assert mib(plan(large, range(7), world_size=64)) == [16.0] * 7
    assert mib(plan(large, range(7), world_size=128)) == [16.0, 32.0, 32.0, 16.0, 16.0], "one more than fits"
    specs = [spec(f"p{at}", (MIB,)) for at in range(40)]  # 4 MiB each
    for device, expected in [("cuda:0", [4, *[24] * 6, 8, 4]), ("cpu", [*[24] * 6, 16])]:
        on_device = [replace(param_spec, device=device) for param_spec in specs]
        assert all(mib(plan(on_device, range(40), world_size=world, one_machine=True)) == expected for world in (2, 8))
    for total, expected in [(320, [10, 10, 20, 25, 25, 25, 25]), (32, [4, 4, 4, 4, 6, 8, 8])]:
        assert [default_bucket_cap(total * MIB, n, False) // MIB for n in (1, 2, 4, 8, 64, 256, 4096)] == expected
    assert [default_bucket_cap(160 * MIB, n, False, levels=2) // MIB for n in (4, 8, 64, 256)] == [20, 25, 25, 25]
    assert [default_bucket_cap(64 * MIB, n, False, levels=2) // MIB for n in (4, 8, 64, 256)] == [8, 12, 16, 16]


def test_views_keep_dense_strides() -> None:
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert ParamSpec.of("channels last", weight).strides == weight.stride() == (12, 1, 6, 3)
    assert ParamSpec.of("transposed", torch.zeros(3, 5).t()).strides == (1, 5)
    assert ParamSpec.of("expanded", torch.zeros(1, 3).expand(4, 3)).strides == (3, 1)
    assert ParamSpec.of("sliced", torch.zeros(4, 6)[:, :3]).strides == (3, 1)
    assert ParamSpec.of("scalar", torch.zeros(())).strides == ()


def test_chunks_hold_the_run_in_order_and_are_few() -> None:
    rng, most = random.Random(0), 0
    for _ in range(1000):
        dims = rng.randint(0, 4)
        shape, order = [rng.randint(1, 4) for _ in range(dims)], rng.sample(range(dims), dims)
        numbers = torch.arange(torch.Size(shape).numel())  # each says where it lies in memory
        tensor = numbers.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(dims)])
        stop = rng.randint(0, tensor.numel())
        start = rng.randint(0, stop)
        chunks = chunks_of(shape, tensor.stride(), start, stop)
        found: list[int] = []
        for chunk in chunks:
            box = tensor
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, offset, size)
            values = box.permute(chunk.order).flatten().tolist()
            assert values == list(range(chunk.at, chunk.at + chunk.numel))
            found += values
        assert found == list(range(start, stop))
        assert len(chunks) <= max(1, 2 * dims - 1)
        most = max(most, len(chunks))
    assert most == 7
    assert chunks_of([3, 0, 2], [0, 2, 1], 0, 0) == []


def test_the_parts_of_all_shards_are_the_slots() -> None:
    rng = random.Random(0)
    for _ in range(100):
        shapes = [(rng.randint(0, 90),) for _ in range(rng.randint(1, 8))]
        specs = [ParamSpec(f"p{at}", shape, (1,), torch.float32, "cpu") for at, shape in enumerate(shapes)]
        shards = rng.randint(1, 4)
        layout = plan(specs, range(len(specs)), rng.choice([(), (0,), (500,), (100, 500)]), multiple=shards)
        stop_before = [0] * len(specs)
        for index in range(shards):
            for slot, part in enumerate(parts_of(layout, shards, index)):
                bucket = layout.buckets[part.bucket]
                length = bucket.numel // shards
                assert slot in bucket.slots
                assert part.start == stop_before[slot], "parts follow one another"
                assert part.at == layout.slots[slot].offset - bucket.start + part.start
                if part.start < part.stop:
                    assert index * length <= part.at < part.at + part.stop - part.start <= (index + 1) * length
                stop_before[slot] = part.stop
        assert stop_before == [spec.numel for spec in specs]


@settings(deadline=None, max_examples=40)
@given(problems(), st.sampled_from([1, 2, 3, 4]), st.data())
def test_no_shard_divides_what_must_stay_whole(problem: Problem, shards: int, data: st.DataObject) -> None:
    specs, order, caps, groups, _ = problem
    whole = data.draw(st.sets(st.sampled_from(range(len(specs)))))
    layout = plan(specs, order, caps, groups, 16 * shards, whole=whole, shards=shards)
    taken: dict[tuple[int, int], int] = {}
    for bucket in layout.buckets:
        assert {slot in whole for slot in bucket.slots} == {bucket.whole}
        for slot in bucket.slots:
            for element in range(layout.slots[slot].offset, layout.slots[slot].offset + specs[slot].numel):
                assert taken.setdefault((bucket.buffer, element), slot) == slot, "no two slots overlap"
                assert bucket.start <= element < bucket.stop
    owned = [parts_of(layout, shards, index) for index in range(shards)]
    for slot, spec in enumerate(specs):
        parts = [parts[slot].stop - parts[slot].start for parts in owned]
        assert sum(parts) == spec.numel
        assert slot not in whole or max(parts) == spec.numel


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shapes", TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_padding_of_whole_matrices_is_a_ninth_in_transformers(shapes: list[tuple[int, int]], ranks: int) -> None:
    specs = [spec(str(number), shape) for number, shape in enumerate(shapes)]
    order = range(len(specs))
    layout = plan(specs, order, multiple=16 * ranks, world_size=ranks, one_machine=True, whole=order, shards=ranks)
    assert 1 <= sum(bucket.numel for bucket in layout.buckets) / sum(spec.numel for spec in specs) < 1.12


def test_whole_matrices_are_divided_by_the_work_that_they_are() -> None:
    specs = [spec("wide", (64, 256)), *(spec(f"square {at}", (64, 64)) for at in range(4)), spec("tall", (256, 64))]
    layout = plan(specs, range(6), [MIB], multiple=48, whole=range(6), shards=3)
    elements = [sum(part.stop - part.start for part in parts_of(layout, 3, index)) for index in range(3)]
    assert (len(layout.buckets), layout.buckets[0].numel) == (1, 3 * 64 * 256), "nothing is padding"
    assert elements == [64 * 256] * 3
