"""Groups of ranks for shards: the ranks that divide the shards, and the ranks that hold the same shard.

Six ranks with ``group_size=3``, as on two nodes. Gradients are reduce-scattered inside a group, then their shards are
averaged across groups. Parameters are gathered inside a group::

    inside      ranks 0 1 2   ranks 3 4 5
    shard             0 1 2         0 1 2
    across      ranks 0 3     ranks 1 4     ranks 2 5

A group of the ranks of several nodes may have two levels (:mod:`.levels`).
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.lane import Lane, lane_for
from lightning_bucketddp.comm.levels import Levels, near_first
from lightning_bucketddp.comm.wire import Pack
from lightning_bucketddp.comm.work import Stages, Work


def require_divides(group_size: int | None, collectives: Collectives) -> None:
    """Require that ``group_size`` divides the number of ranks, and that these are all processes.

    Raises:
        ValueError: If it does not, or if they are not.
    """
    world_size = collectives.world_size
    if group_size not in (None, world_size) and not collectives.has_all_processes():
        raise ValueError(
            f"expected shard_group_size with a process group of all processes, found shard_group_size={group_size} and "
            f"a group of {world_size} ranks, of which torch makes no further groups; leave it out"
        )
    if group_size is not None and world_size % group_size:
        raise ValueError(
            f"expected shard_group_size to divide the number of ranks, found shard_group_size={group_size} and "
            f"{world_size} ranks; use the number of ranks on each node"
        )


class ShardGroups:
    """The groups in which shards travel. All ranks must make it.

    Args:
        collectives: The group of all ranks that train together.
        group_size: Among how many consecutive ranks shards are divided; all of them if None.
        ranks_each: How many consecutive ranks each node has, if shards travel in two levels; else None.
        with_wire_dtype: Whether gradients travel in another dtype.

    Attributes:
        inside: The ranks among which shards are divided.
        gathering: The ranks of ``inside``, where parameters are gathered in one level.
        across: The ranks with the same shard as this one; None if there is no other.
        levels: The two levels of ``inside``; None if these are ranks of one node, or travel in one level.
        shards: Number of shards of each bucket.
        index: This rank's shard.
        collectives_each: How many collectives reduce a bucket, one after the other.
    """

    def __init__(
        self,
        collectives: Collectives,
        group_size: int | None = None,
        ranks_each: int | None = None,
        with_wire_dtype: bool = False,
    ) -> None:
        ranks = collectives.world_size
        require_divides(group_size, collectives)
        size = group_size or ranks
        groups = [range(first, first + size) for first in range(0, ranks, size)]
        self.inside = collectives if size == ranks else collectives.split(groups)
        self.levels: Levels | None = None
        self._inside_node = ranks_each is not None and ranks_each % size == 0
        self.gathering = self.inside
        if ranks_each is not None and size > ranks_each and size % ranks_each == 0:
            self.levels = Levels(collectives, ranks_each, size, far_twice=True)
            assert collectives.device is not None
            new_lane = partial(lane_for, collectives, collectives.device, collectives_each=2, starts_here=True)
            self._lanes: defaultdict[int, Lane] = defaultdict(new_lane)
        elif ranks > 1 and collectives.has_all_processes():  # parameters are gathered while other things travel
            self.gathering = collectives.split(self.inside.made_of)
        self.across: Collectives | None = None
        if size < ranks:
            self.across = collectives.split([range(place, ranks, size) for place in range(size)])
        self.shards = size
        self.index = self.inside.rank if self.levels is None else self.levels.index
        self.collectives_each = 1 if self.levels is None else 2
        if self.across is not None:
            self.collectives_each += 2 if with_wire_dtype else 1

    def shard(self, flat: Tensor) -> Tensor:
        """This rank's part of ``flat`` (1-D)."""
        return self.inside.shard(flat) if self.levels is None else self.levels.shard(flat)

    def reduce_scatter(self, flat: Tensor, pack: Pack, wire_dtype: torch.dtype | None) -> Stages:
        """Replace this rank's :meth:`shard` of ``flat`` by its mean over all ranks, those of ``across`` too.

        Args:
            flat: The tensor.
            pack: Brings its values there.
            wire_dtype: The dtype in which they travel, with two levels across nodes only. None for their own.
        """
        first, across = self.levels or self.inside.stage(0), self.across
        if across is None:
            return first.reduce_scatter(flat, pack, wire_dtype)
        return self._then_across(flat, pack, across, wire_dtype)

    def _then_across(self, flat: Tensor, pack: Pack, across: Collectives, wire_dtype: torch.dtype | None) -> Stages:
        def mean(shard: Tensor, pack: Pack) -> Stages:
            return across.reduce(shard, pack, wire_dtype, across.stage(1))

        first = self.inside.stage(0)
        if self._inside_node:
            yield from near_first(first, flat, pack, mean, wire_dtype)
        else:
            yield from (self.levels or first).reduce_scatter(flat, pack, wire_dtype)
            shard = self.shard(flat)
            yield from mean(shard, wire.packed(shard))

    def start_gather(self, flat: Tensor, bucket: int) -> Work:
        """Start filling ``flat`` with every rank's :meth:`shard` of it, in place.

        Args:
            flat: The tensor.
            bucket: The index of its bucket.
        """
        if self.levels is None:
            return self.gathering.all_gather_shards(flat)
        # On accelerators any stream may wait for a bucket, and for this one only: a side stream for each. Threads start
        # collectives of one group in one order, so there is one lane.
        lane = self._lanes[bucket if is_accelerator(flat.device) else 0]
        return lane.run(self.levels.gather(flat))

    def gather(self, flat: Tensor) -> None:
        """As :meth:`start_gather`, in the group ``inside``, which stays after the others have ended; waits."""
        if self.levels is None:
            self.inside.all_gather_shards(flat).wait()
            return
        by_rank, work = self.inside.all_gather(self.shard(flat).view(torch.uint8))
        work.wait()
        flat.view(torch.uint8).copy_(self.levels.by_index(by_rank.view(-1)))
