"""Groups of ranks for shards: the ranks that divide the shards, and the ranks that hold the same shard.

Six ranks with ``group_size=3``, as on two nodes. Gradients are reduce-scattered inside a group, then their shards are
averaged across groups. Parameters are gathered inside a group::

    inside      ranks 0 1 2   ranks 3 4 5
    shard             0 1 2         0 1 2
    across      ranks 0 3     ranks 1 4     ranks 2 5
"""

from __future__ import annotations

from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives


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

    Attributes:
        inside: The ranks among which shards are divided.
        across: The ranks with the same shard as this one; None if there is no other.
        gathering: The ranks of ``inside`` again, so that parameters are gathered while other things travel; ``inside``
            itself if the group has not all processes.
        shards: Number of shards of each bucket.
        index: This rank's shard.
    """

    def __init__(self, collectives: Collectives, group_size: int | None = None) -> None:
        ranks = collectives.world_size
        require_divides(group_size, collectives)
        size = group_size or ranks
        groups = [range(first, first + size) for first in range(0, ranks, size)]
        self.inside = collectives if size == ranks else collectives.split(groups)
        self.gathering = self.inside
        if ranks > 1 and collectives.has_all_processes():
            self.gathering = collectives.split(self.inside.made_of)
        self.across: Collectives | None = None
        if size < ranks:
            self.across = collectives.split([range(place, ranks, size) for place in range(size)])
        self.shards, self.index = self.inside.world_size, self.inside.rank

    def shard(self, flat: Tensor) -> Tensor:
        """This rank's part of ``flat`` (1-D)."""
        return self.inside.shard(flat)
