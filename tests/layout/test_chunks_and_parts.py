"""Runs of a tensor's elements as chunks, and parts of parameters in shards, against the elements themselves."""

import random

import torch

from lightning_bucketddp.layout.chunks import chunks_of
from lightning_bucketddp.layout.plan import ParamSpec, plan
from lightning_bucketddp.layout.shards import parts_of


def test_chunks_hold_the_run_in_order_and_are_few() -> None:
    rng = random.Random(0)
    most = 0
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
        layout = plan(specs, range(len(specs)), rng.choice([None, 0, 500]), multiple=shards)
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
