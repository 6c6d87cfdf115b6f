"""The part of each parameter that each rank's optimizer updates.

Each bucket is cut into shards of equal length, one per rank of the group. A part is the run of a parameter's elements,
in the order of memory, that lies in one shard. Element-wise optimizers can update any run::

    bucket      |a           |b       ~~|c              ~~|
    shards      |------ 0 ------|------ 1 ------|---- 2 --|
    parts       |a           |b |b    ~~|c      |c      ~~|

Optimizers that need whole matrices get shards that are cut between parameters instead. They are as long as the fullest
one::

    bucket      |a           |b       ~~~~|c              |
    shards      |----- 0 ----|----- 1 ----|------ 2 ------|
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bucketddp.layout.plan import Layout


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one slot in one shard.

    Attributes:
        bucket: Index of the bucket in ``Layout.buckets``.
        start: First element of the slot, in the order of memory.
        stop: One past the last; the same as ``start`` if the shard has no element of the slot.
        at: Place of the first element in the bucket.
        whole: Whether the slot lies in one shard: the part is all of it, or nothing.
    """

    bucket: int
    start: int
    stop: int
    at: int
    whole: bool = False


def parts_of(layout: Layout, shards: int, index: int) -> list[Part]:
    """The part of each slot in one shard.

    Args:
        layout: The layout; each bucket's number of elements is a multiple of ``shards``.
        shards: Number of shards of each bucket.
        index: Index of the shard.
    """
    found: dict[int, Part] = {}
    for number, bucket in enumerate(layout.buckets):
        length = bucket.numel // shards
        for slot in bucket.slots:
            begin = layout.slots[slot].offset - bucket.start
            numel = layout.slots[slot].spec.numel
            start = min(max(index * length - begin, 0), numel)
            stop = max(min((index + 1) * length - begin, numel), start)
            found[slot] = Part(number, start, stop, begin + start, bucket.whole)
    return [found[slot] for slot in range(len(layout.slots))]
