"""Runs of a tensor's elements as chunks, against the elements themselves."""

import random

import torch

from lightning_bucketddp.layout.chunks import chunks_of


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


def test_a_tensor_without_elements_has_no_chunks() -> None:
    assert chunks_of([3, 0, 2], [0, 2, 1], 0, 0) == []
