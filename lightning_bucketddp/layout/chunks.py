"""Runs of a tensor's elements, in the order of memory, as the fewest chunks: what checkpoints of parts are made of.

A chunk has an offset and a size in each dimension, which is how ``torch.distributed.checkpoint`` describes what it
writes, so that any reader of that format can put tensors together. A run is not a chunk but at most ``2 * dim - 1`` of
them (ByteCheckpoint, NSDI 2025, decomposes irregular shards in the same way)::

    rows of 4, run from 2 to 13     . . a a     a   offsets (0, 2)   sizes (1, 2)
                                    b b b b     b   offsets (1, 0)   sizes (2, 4)
                                    b b b b
                                    c . . .     c   offsets (3, 0)   sizes (1, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some elements of a tensor that lie one behind the other in memory.

    Attributes:
        offsets: First index in each dimension.
        sizes: How many in each dimension.
        at: Where the first one comes in the order of memory.
        order: The dimensions from the one with the largest stride to the one with the smallest.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    order: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def chunks_of(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """The elements from ``start`` to ``stop``, in the order of memory, of a dense tensor.

    Args:
        shape: The tensor's shape.
        strides: Its strides; dense and without overlap, in whatever order.
        start: First element.
        stop: One past the last.

    Returns:
        Disjoint chunks in the order of memory; none if the run is empty.
    """
    # Of two equal strides one belongs to a dimension of one element, whose place does not matter.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    found: list[Chunk] = []
    for offsets, sizes, at in _in_rows([shape[dim] for dim in order], start, stop):
        back = sorted(range(len(order)), key=lambda place: order[place])
        found.append(Chunk(tuple(offsets[i] for i in back), tuple(sizes[i] for i in back), at, order))
    return found


def _in_rows(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int], int]]:
    """The same for a row-major tensor; offsets, sizes and place of each chunk."""
    if start >= stop:
        return
    if not shape:
        yield [], [], start
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _in_row(first, shape, start, stop)
        return
    whole, after = -(-start // row), stop // row
    if start < whole * row:
        yield from _in_row(first, shape, start, whole * row)
    if whole < after:
        yield [whole] + [0] * (len(shape) - 1), [after - whole, *shape[1:]], whole * row
    if after * row < stop:
        yield from _in_row(last, shape, after * row, stop)


def _in_row(index: int, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int], int]]:
    begin = index * math.prod(shape[1:])
    for offsets, sizes, at in _in_rows(shape[1:], start - begin, stop - begin):
        yield [index, *offsets], [1, *sizes], begin + at
