"""Runs of a tensor's elements as chunks, against the elements themselves."""

import random

import torch
from torch import Tensor

from lightning_bucketddp.layout.chunks import chunks_of


def numbered(shape: list[int], order: list[int]) -> Tensor:
    """A tensor whose values say where they lie in memory."""
    flat = torch.arange(torch.Size(shape).numel())
    return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def chunk_of(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def test_chunks_hold_the_run_in_order_and_are_few() -> None:
    rng = random.Random(0)
    most = 0
    for _ in range(1000):
        dims = rng.randint(0, 4)
        shape = [rng.randint(1, 4) for _ in range(dims)]
        tensor = numbered(shape, rng.sample(range(dims), dims))
        stop = rng.randint(0, tensor.numel())
        start = rng.randint(0, stop)
        chunks = chunks_of(shape, tensor.stride(), start, stop)
        assert len(chunks) <= max(1, 2 * dims - 1)
        most = max(most, len(chunks))
        found: list[int] = []
        for it in chunks:
            values = chunk_of(tensor, it.offsets, it.sizes).permute(it.order).flatten().tolist()
            assert values == list(range(it.at, it.at + it.numel))
            found += values
        assert found == list(range(start, stop))
    assert most == 7
