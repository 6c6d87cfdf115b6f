"""The memory of this rank's shards: in their buckets, or stashed while the next pass uses the buckets."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from lightning_bucketddp.comm.lane import used_here
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.layout.shards import Part, parts_of


class ShardMemory:
    """This rank's shard of each bucket of a layout.

    Args:
        layout: The layout.
        buckets: Its buckets.
        groups: The ranks that divide the shards.
        always_stashed: Whether shards always have memory of their own.
        stashed: Shards that are stashed already, by the index of their bucket.

    Attributes:
        stashed: The shards outside of their buckets, by the index of their bucket.
        parts: This rank's part of each slot.
        in_bucket: The same in the slot's bucket, 1-D.
    """

    def __init__(
        self, layout: Layout, buckets: Buckets, groups: ShardGroups, always_stashed: bool, stashed: Mapping[int, Tensor]
    ) -> None:
        self.parts: list[Part] = parts_of(layout, groups.shards, groups.index)
        self._buckets, self._groups, self._always_stashed = buckets, groups, always_stashed
        self.in_bucket = [
            buckets.all[part.bucket].flat[part.at : part.at + part.stop - part.start] for part in self.parts
        ]
        new = [bucket for bucket in buckets.all if always_stashed and bucket.index not in stashed]
        self.stashed = {**stashed, **{bucket.index: torch.zeros_like(groups.shard(bucket.flat)) for bucket in new}}

    @property
    def numel(self) -> int:
        """Number of elements of the stashed shards."""
        return sum(shard.numel() for shard in self.stashed.values())

    def is_stashed(self, slot: int) -> bool:
        """Whether a slot's part lies outside of its bucket."""
        return self.parts[slot].bucket in self.stashed

    def part(self, slot: int) -> Tensor:
        """This rank's part of a slot's published gradient, 1-D."""
        part = self.parts[slot]
        if part.bucket not in self.stashed:
            return self.in_bucket[slot]
        shard = self.stashed[part.bucket]
        offset = part.at - self._groups.index * shard.numel()
        return shard[offset : offset + part.stop - part.start]

    def stash(self, slots: AbstractSet[int]) -> None:
        """Copy the shards with these slots out of their buckets. Forget other stashed shards."""
        if self._always_stashed:
            return
        before, self.stashed = self.stashed, {}
        for index in {self.parts[slot].bucket for slot in slots}:
            in_bucket = self._groups.shard(self._buckets.all[index].flat)
            self.stashed[index] = before[index] if index in before else in_bucket.clone()

    def put_back(self) -> None:
        """Copy shards back into their buckets, unless they are always stashed."""
        if not self._always_stashed:
            for index, shard in self.stashed.items():
                self._groups.shard(self._buckets.all[index].flat).copy_(shard)
            used_here(*self.stashed.values())  # they were made on the stream of the root
            self.stashed.clear()
