"""Where this rank's shards of the reduced gradients lie: in their buckets, or apart while a bucket is used anew."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.layout.shards import Part, parts_of


class ShardMemory:
    """This rank's shard of each bucket of a layout.

    Args:
        layout: The layout.
        buckets: Its buckets.
        groups: Among whom shards are divided.
        always_apart: Whether shards have memory of their own at all times.

    Attributes:
        parts: This rank's part of each slot.
    """

    def __init__(self, layout: Layout, buckets: Buckets, groups: ShardGroups, always_apart: bool) -> None:
        self.parts: list[Part] = parts_of(layout, groups.shards, groups.index)
        self._buckets, self._groups, self._always_apart = buckets, groups, always_apart
        self._apart: dict[int, Tensor] = {}  # by bucket
        if always_apart:
            self._apart = {it.index: torch.zeros_like(groups.shard(it.flat)) for it in buckets.all}

    @property
    def numel(self) -> int:
        """Elements of the shards that lie apart."""
        return sum(shard.numel() for shard in self._apart.values())

    def is_apart(self, slot: int) -> bool:
        """Whether a slot's part does not lie in its bucket."""
        return self.parts[slot].bucket in self._apart

    def part(self, slot: int) -> Tensor:
        """This rank's part of a slot's published gradient, 1-D."""
        part = self.parts[slot]
        shard = self._apart.get(part.bucket)
        if shard is None:
            return self.in_bucket(slot)
        offset = part.at - self._groups.index * shard.numel()
        return shard[offset : offset + part.stop - part.start]

    def in_bucket(self, slot: int) -> Tensor:
        """This rank's part of a slot in its bucket, 1-D."""
        part = self.parts[slot]
        return self._buckets.all[part.bucket].flat[part.at : part.at + part.stop - part.start]

    def set_apart(self, slots: AbstractSet[int]) -> None:
        """Move the shards with these slots out of their buckets, and forget others."""
        if self._always_apart:
            return
        indices = {self.parts[slot].bucket for slot in slots}
        self._apart = {
            index: self._apart[index]
            if index in self._apart
            else self._groups.shard(self._buckets.all[index].flat).clone()
            for index in indices
        }

    def put_back(self) -> None:
        """Move shards into their buckets."""
        if self._always_apart:
            return
        for index, shard in self._apart.items():
            self._groups.shard(self._buckets.all[index].flat).copy_(shard)
        self._apart.clear()
