"""Two levels: the ranks of a node among themselves, and across nodes the ranks that have the same part.

Two nodes of three ranks, and a bucket of 12 elements. Inside each node it is reduce-scattered; each rank then exchanges
its part with the rank at the same place on the other node, in all three pairs at once; and the parts are gathered::

    place on the node       |   0   |   1   |   2   |
    bucket                  |. . . .|. . . .|. . . .|
    shard of rank           | 0 | 3 | 1 | 4 | 2 | 5 |     of a sharded optimizer

So 2 (M - 1) / M of the bucket's bytes leave each of M nodes, for any number of ranks. A ring of all ranks sends nearly
2. Stages have groups of their own: while one bucket is on its way between nodes, others are inside of theirs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.wire import Pack
from lightning_bucketddp.comm.work import Handles, Stage, Stages


class Levels:
    """The groups of both levels. All ranks must make them.

    Args:
        collectives: The group of all ranks that train together.
        ranks_each: How many consecutive ranks each node has.
        size: How many consecutive ranks reduce together: those of some nodes, or all.
        far_twice: Whether what follows the first exchange across nodes has a group of its own.

    Attributes:
        near: The ranks of this node, for the first stage.
        far: The ranks at the same place on each node.
        near_last: The ranks of this node, for the last stage.
        far_again: The ranks of ``far``, for a second stage across nodes, and where parameters are gathered.
    """

    def __init__(self, collectives: Collectives, ranks_each: int, size: int, far_twice: bool) -> None:
        ranks = range(collectives.world_size)
        nodes = [ranks[first : first + ranks_each] for first in ranks[::ranks_each]]
        places = [ranks[first + at : first + size : ranks_each] for first in ranks[::size] for at in range(ranks_each)]
        self.near, self.far = collectives.split_by_node(nodes), collectives.split(places)
        self.near_last = collectives.split_by_node(nodes)
        self.far_again = collectives.split(places) if far_twice else self.far
        self._before_last = 3 if far_twice else 2

    @property
    def index(self) -> int:
        """The index of this rank's shard."""
        return self.near.rank * self.far.world_size + self.far.rank

    def shard(self, flat: Tensor) -> Tensor:
        """This rank's shard of ``flat`` (1-D), whose length is a multiple of the number of ranks."""
        return self.far.shard(self.near.shard(flat))

    def by_index(self, by_rank: Tensor) -> Tensor:
        """Bring shards, one after the other by rank (1-D), into the order of their indices."""
        return by_rank.view(self.far.world_size, self.near.world_size, -1).transpose(0, 1).reshape(-1)

    def reduce(self, flat: Tensor, pack: Pack, wire_dtype: torch.dtype | None) -> Stages:
        """Replace ``flat`` by its mean over the ranks; see :meth:`Collectives.reduce`. All end with the same bits."""

        def across(part: Tensor, pack: Pack) -> Stages:
            return self.far.reduce(part, pack, wire_dtype, self.far_again)

        rest = self._before_last
        for stage in near_first(self.near, flat, pack, across, wire_dtype):
            rest -= 1
            yield stage
        # Where threads start stages, the one that starts the last is the same for buckets with one stage across.
        yield from [Stage(Handles(()))] * rest
        yield from self.near_last.gather(wire.real(flat))

    def reduce_scatter(self, flat: Tensor, pack: Pack, wire_dtype: torch.dtype | None) -> Stages:
        """Replace this rank's :meth:`shard` of ``flat`` by its mean; see :meth:`Collectives.reduce_scatter`."""

        def across(part: Tensor, pack: Pack) -> Stages:
            return self.far.reduce_scatter(part, pack, wire_dtype)

        return near_first(self.near, flat, pack, across, wire_dtype)

    def gather(self, flat: Tensor) -> Stages:
        """Fill ``flat``, of any dtype, with every rank's :meth:`shard` of it, in place."""
        flat = flat.view(torch.uint8)
        yield from self.far_again.gather(self.near.shard(flat))
        yield from self.near_last.gather(flat)


def near_first(
    near: Collectives,
    flat: Tensor,
    pack: Pack,
    across: Callable[[Tensor, Pack], Stages],
    wire_dtype: torch.dtype | None,
) -> Stages:
    """Reduce-scatter inside a node, and go on with this rank's part across nodes.

    Args:
        near: The ranks of the node.
        flat: 1-D; its length is a multiple of their number.
        pack: Brings its values there.
        across: What follows, for a part and the function that packs it.
        wire_dtype: The dtype in which values travel across nodes. With one, values of less precision than fp32 are
            summed in fp32 inside too.
    """
    wide = flat
    narrow = wire.real(flat).element_size() < torch.float32.itemsize
    if wire_dtype is not None and narrow and wire.may_travel_in(wire_dtype, flat):
        wide = wire.packed_in(torch.float32, flat, pack, near.world_size)
        pack = wire.packed(wide)
    for stage in near.reduce_scatter(wide, pack):
        yield Stage(stage.handle, (*stage.memory, wide))
    part = near.shard(wide)
    yield from across(part, wire.packed(part))
    if wide is not flat:
        near.shard(flat).copy_(part)
