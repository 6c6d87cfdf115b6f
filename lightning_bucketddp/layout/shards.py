"""Which rank's optimizer updates which part of each parameter.

Parameters lie in the order, and with the padding, of the gradients' layout, in one flat tensor for each bucket. A
bucket is cut into shards of equal length, one per rank of the group. The part of a parameter that is in a rank's shard
is a run of its elements in the order of memory, which element-wise optimizers do not care about::

    bucket      |a           |b       ~~|c              ~~|
    shards      |------ 0 ------|------ 1 ------|---- 2 --|
    parts       |a           |b |b    ~~|c      |c      ~~|
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bucketddp.layout.plan import Layout


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one slot that is in one rank's shard.

    Attributes:
        bucket: Index of the bucket in ``Layout.buckets``.
        start: First element of the slot, in the order of memory.
        stop: One past the last; the same as ``start`` if nothing of the slot is in the shard.
        at: Where the first element lies in the bucket.
    """

    bucket: int
    start: int
    stop: int
    at: int


def parts_of(layout: Layout, shards: int, index: int) -> list[Part]:
    """The part of each slot that is in one shard.

    Args:
        layout: The layout; the length of each bucket is a multiple of ``shards``.
        shards: Into how many each bucket is cut.
        index: Which one.
    """
    found: dict[int, Part] = {}
    for number, bucket in enumerate(layout.buckets):
        length = bucket.numel // shards
        first, stop = index * length, (index + 1) * length
        for slot in bucket.slots:
            begin = layout.slots[slot].offset - bucket.start
            numel = layout.slots[slot].spec.numel
            low = min(max(first - begin, 0), numel)
            high = max(min(stop - begin, numel), low)
            found[slot] = Part(number, low, high, begin + low)
    return [found[slot] for slot in range(len(layout.slots))]
