"""Parts of parameters in shards, against the elements of a buffer."""

import random

import torch

from lightning_bucketddp.layout.plan import ParamSpec, plan
from lightning_bucketddp.layout.shards import parts_of


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
