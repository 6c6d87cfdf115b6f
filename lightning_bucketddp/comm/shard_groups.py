"""Among which ranks the shards are divided, and which ranks hold copies of the same shard.

Six ranks with ``group_size=3``, as on two nodes. Gradients are reduce-scattered inside, and their shards then averaged
across; parameters are gathered inside alone::

    inside      ranks 0 1 2   ranks 3 4 5
    shard             0 1 2         0 1 2
    across      ranks 0 3     ranks 1 4     ranks 2 5
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Work


def require_divides(group_size: int | None, world_size: int) -> None:
    """Requires that the ranks can be divided into groups of one size.

    Raises:
        ValueError: If not.
    """
    if group_size is not None and world_size % group_size:
        raise ValueError(
            f"expected shard_group_size to divide the number of ranks, found shard_group_size={group_size} and "
            f"{world_size} ranks; use the number of ranks on each node"
        )


class ShardGroups:
    """The groups in which shards travel. All ranks must construct it.

    Args:
        collectives: The group of all ranks that train together.
        group_size: Among how many consecutive ranks shards are divided; all of them if None.

    Attributes:
        inside: The ranks among which shards are divided.
        across: The ranks with this rank's shard; None if there is no other.
        gathering: The same ranks as inside, for collectives whose place among the others varies.
    """

    def __init__(self, collectives: Collectives, group_size: int | None = None) -> None:
        ranks = collectives.world_size
        require_divides(group_size, ranks)
        size = ranks if group_size is None else group_size
        self.inside = collectives
        self.across: Collectives | None = None
        if size == ranks:
            self.gathering = collectives.apart()
            return
        groups = [range(first, first + size) for first in range(0, ranks, size)]
        self.inside = collectives.divided(groups)
        self.gathering = collectives.divided(groups)
        self.across = collectives.divided([range(place, ranks, size) for place in range(size)])

    @property
    def shards(self) -> int:
        """Into how many shards each bucket is cut."""
        return self.inside.world_size

    @property
    def index(self) -> int:
        """Which of them is this rank's."""
        return self.inside.rank

    def shard(self, flat: Tensor) -> Tensor:
        """This rank's part of ``flat`` (1-D)."""
        return self.inside.shard(flat)

    def reduce_scatter_mean(self, flat: Tensor, wire_dtype: torch.dtype | None = None) -> Work:
        """As :meth:`Collectives.reduce_scatter_mean`, the mean being over all ranks."""
        pending = self.inside.reduce_scatter_mean(flat, wire_dtype)
        across = self.across
        if across is None:
            return pending
        return WorkInTwoGroups(pending, lambda: across.all_reduce_mean(self.shard(flat), wire_dtype))

    def leave_behind(self, why: str) -> None:
        """Remembers that collectives are under way in the groups which not all ranks will join."""
        for collectives in (self.gathering, self.across, self.inside):
            if collectives is not None:
                collectives.leave_behind(why)

    def end(self) -> None:
        """Destroys the groups that were made. Nothing may be under way in them."""
        for collectives in (self.gathering, self.across, self.inside):
            if collectives is not None:
                collectives.end()


class WorkInTwoGroups(Work):
    """A collective in one group, and one in another group that completes it.

    Args:
        first: The first.
        start: Starts the other; called when the first has completed.
    """

    def __init__(self, first: Work, start: Callable[[], Work]) -> None:
        super().__init__()
        self._first = first
        self._start: Callable[[], Work] | None = start
        self._other = Work()

    def done(self) -> bool:
        """Whether both were waited for, or have completed."""
        return self._start is None and self._other.done()

    def may_start_other(self) -> bool:
        """Whether :meth:`start_other` would not wait."""
        return self._start is None or self._first.done()

    def start_other(self, on_idle: Callable[[], None] | None = None) -> None:
        """Starts the second when the first has completed; does nothing if it has been started.

        All ranks must do so in the same order, and behind nothing else in the second group.

        Args:
            on_idle: As for :meth:`wait`.

        Raises:
            RuntimeError: As :meth:`wait`.
        """
        if self._start is not None:
            self._first.wait(on_idle)
            self._other = self._start()
            self._start = None

    def proceed(self, on_idle: Callable[[], None] | None = None) -> None:
        """Gets both to where the collectives that follow may be started."""
        self.start_other(on_idle)
        self._other.proceed(on_idle)

    def wait(self, on_idle: Callable[[], None] | None = None) -> None:
        """Waits for both, in the sense of the device."""
        self.start_other(on_idle)
        self._other.wait(on_idle)
