"""Runs of a tensor's elements as boxes, against the elements themselves."""

import itertools
import random

import torch
from torch import Tensor

from lightning_bucketddp.layout.chunks import boxes_of, overlap


def numbered(shape: list[int], order: list[int]) -> Tensor:
    """A tensor whose values say where they lie in memory."""
    flat = torch.arange(torch.Size(shape).numel())
    return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def box(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def test_boxes_hold_the_run_in_order_and_are_few() -> None:
    rng = random.Random(0)
    most = 0
    for _ in range(1000):
        dims = rng.randint(0, 4)
        shape = [rng.randint(1, 4) for _ in range(dims)]
        tensor = numbered(shape, rng.sample(range(dims), dims))
        stop = rng.randint(0, tensor.numel())
        start = rng.randint(0, stop)
        boxes = boxes_of(shape, tensor.stride(), start, stop)
        assert len(boxes) <= max(1, 2 * dims - 1)
        most = max(most, len(boxes))
        found: list[int] = []
        for it in boxes:
            values = box(tensor, it.offsets, it.sizes).permute(it.order).flatten().tolist()
            assert values == list(range(it.at, it.at + it.numel))
            found += values
        assert found == list(range(start, stop))
    assert most == 7


def test_overlaps_are_what_boxes_share() -> None:
    tensor = torch.arange(16).view(4, 4)
    sides = [(low, high - low) for low, high in itertools.combinations(range(5), 2)]
    boxes = [((a, b), (m, n)) for (a, m), (b, n) in itertools.product(sides, sides)]
    shared_some = 0
    for first, second in itertools.product(boxes, boxes):
        common = overlap(first, second)
        expected = set(box(tensor, *first).flatten().tolist()) & set(box(tensor, *second).flatten().tolist())
        if common is None:
            assert not expected
            continue
        shared_some += 1
        in_first = box(box(tensor, *first), common.in_first, common.sizes)
        assert torch.equal(in_first, box(box(tensor, *second), common.in_second, common.sizes))
        assert set(in_first.flatten().tolist()) == expected
    assert 0 < shared_some < len(boxes) ** 2
