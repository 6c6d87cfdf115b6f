"""Cut a run of a tensor's elements, in the order of memory, into as few chunks as possible.

A chunk is a box: it has an offset and a size in each dimension. Checkpoints of sharded optimizers hold chunks, because
``torch.distributed.checkpoint`` describes its files with them. Any reader of that format can put the tensors together.
A run needs at most ``2 * dim - 1`` chunks (ByteCheckpoint, NSDI 2025, cuts irregular shards in the same way)::

    rows of 4, run from 2 to 13     . . a a     a   offsets (0, 2)   sizes (1, 2)
                                    b b b b     b   offsets (1, 0)   sizes (2, 4)
                                    b b b b
                                    c . . .     c   offsets (3, 0)   sizes (1, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor whose elements are neighbours in memory.

    Attributes:
        offsets: First index in each dimension.
        sizes: Number of indices in each dimension.
        at: Place of the first element, in the order of memory.
        order: The dimensions, from the largest stride to the smallest.
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
    """The elements from ``start`` to ``stop`` of a dense tensor, in the order of memory.

    Args:
        shape: The tensor's shape.
        strides: Its strides; dense and without overlap, in any order.
        start: First element.
        stop: One past the last.

    Returns:
        Disjoint chunks in the order of memory; none if the run is empty.
    """
    # If two strides are equal, one of the dimensions has one element, and its place does not matter.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    place_of_dim = sorted(range(len(order)), key=lambda place: order[place])
    return [
        Chunk(tuple(offsets[place] for place in place_of_dim), tuple(sizes[place] for place in place_of_dim), at, order)
        for offsets, sizes, at in _row_major([shape[dim] for dim in order], start, stop)
    ]


def _row_major(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Offsets, sizes and place of each chunk of a row-major tensor: the end of a row, whole rows, a row's beginning."""
    if start == stop:
        return
    if not shape:
        yield [], [], start
        return
    row = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row) * row, stop // row * row
    for begin, end in pairwise(sorted({start, min(first_whole, stop), max(last_whole, start), stop})):
        index = begin // row
        if begin % row == 0 and end % row == 0:
            yield [index] + [0] * (len(shape) - 1), [(end - begin) // row, *shape[1:]], begin
            continue
        for offsets, sizes, at in _row_major(shape[1:], begin - index * row, end - index * row):
            yield [index, *offsets], [1, *sizes], index * row + at
