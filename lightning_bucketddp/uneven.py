"""Ranks that run out of data before others: torch's join protocol for :class:`BucketDDP`.

In each iteration the ranks first tell each other who has data, and what its forward is about to do; a rank that has
none then takes part in the same collectives without contributing anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.algorithms.join import JoinHook

from lightning_bucketddp.collectives import Collectives


@dataclass(frozen=True)
class Iteration:
    """What the ranks that have data are about to do.

    Attributes:
        active: The ranks that have data, in ascending order.
        synchronises: Whether their backward will be a synchronised pass.
        trains: Whether their forward is a training forward, so that module buffers may be due.
    """

    active: tuple[int, ...]
    synchronises: bool
    trains: bool


class UnevenInputs:
    """The exchanges between ranks with and without data.

    Args:
        collectives: The group.
        device: The device whose tensors travel.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device

    def _sum(self, values: list[int]) -> list[int]:
        vector = torch.tensor(values, dtype=torch.int64).to(self._device)
        self._collectives.all_reduce_sum(vector).wait()
        return vector.tolist()

    def exchange(self, active: bool, synchronises: bool, trains: bool) -> Iteration:
        """Tells the other ranks what this one is about to do, and hears it from them. The host waits.

        Args:
            active: Whether this rank has data.
            synchronises: Whether its backward will be a synchronised pass.
            trains: Whether its forward is a training forward.
        """
        mine = [int(active and rank == self._collectives.rank) for rank in range(self._collectives.world_size)]
        *ranks, synchronising, training = self._sum([*mine, int(synchronises), int(trains)])
        return Iteration(tuple(rank for rank, has in enumerate(ranks) if has), synchronising > 0, training > 0)

    def common_rank(self, candidate: bool) -> int:
        """The highest rank of those that are candidates; every rank gets the same answer."""
        mine = [int(candidate and rank == self._collectives.rank) for rank in range(self._collectives.world_size)]
        return max(rank for rank, stands in enumerate(self._sum(mine)) if stands)


class JoinedRank(JoinHook):
    """What a rank without data does in the others' iterations, and at the end.

    Args:
        iterate: Takes part in one iteration.
        end: Ends; told whether this rank was among the last to run out of data.
    """

    def __init__(self, iterate: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._iterate = iterate
        self._end = end

    def main_hook(self) -> None:
        """One iteration of the others."""
        self._iterate()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of data."""
        self._end(is_last_joiner)
