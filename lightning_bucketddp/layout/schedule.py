"""When gradients are ready and what the wire costs in; the bucket boundaries that finish first out.

Pure arithmetic. The model, which :func:`plan_boundaries` is exact for:

- One wire: a bucket starts when it is complete and the one before it is through.
- A collective of ``n`` bytes takes ``latency + n * seconds_per_byte``, whatever else goes on.
- Gradients are ready in launch order; where they are not, each counts as ready when all before it are.

A backward with real numbers: four gradients of 1 MB on a wire that takes 4 ms and 8 ms per MB::

    ready (ms)           10     14     18           40
    one bucket                                      [40 -- 4 MB -- 76]
    a bucket each        [10 - 22][22 - 34][34 - 46][46 - 58]
    planned              [10 - 22][22 - 2 MB - 42][42 - 54]
    lower bound                                      52   nothing before 40, and what is ready then takes 12

Sources: merging by a dynamic programme is MG-WFBP's idea (Shi et al., INFOCOM 2019 and TPDS 2021); costs of rings and
trees are the usual ones (Thakur, Rabenseifner and Gropp 2005; Sanders, Speck and Träff 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Link:
    """One direction of the way between two ranks.

    Attributes:
        latency: Seconds until a message of no bytes has arrived.
        bandwidth: Bytes per second.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(f"expected a latency from 0 s and a positive bandwidth in bytes/s, found {self}")


@dataclass(frozen=True)
class CollectiveCost:
    """What a collective costs, by the size of the tensor that each rank has.

    Attributes:
        latency: Seconds for no bytes.
        seconds_per_byte: Seconds for each byte more.
    """

    latency: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.seconds_per_byte >= 0):
            raise ValueError(f"expected costs from 0 s, found {self}")

    def seconds(self, nbytes: float) -> float:
        """How long a collective of ``nbytes`` takes, in seconds."""
        return self.latency + nbytes * self.seconds_per_byte

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        """The cost of one after the other."""
        return CollectiveCost(self.latency + other.latency, self.seconds_per_byte + other.seconds_per_byte)


def ring_reduce_scatter(link: Link, world_size: int) -> CollectiveCost:
    """A reduce-scatter or an all-gather around a ring: ``n - 1`` messages of an ``n``-th of the tensor."""
    others = world_size - 1
    return CollectiveCost(others * link.latency, others / world_size / link.bandwidth)


def ring_all_reduce(link: Link, world_size: int) -> CollectiveCost:
    """A reduce-scatter and an all-gather around a ring."""
    half = ring_reduce_scatter(link, world_size)
    return half + half


def tree_all_reduce(link: Link, world_size: int) -> CollectiveCost:
    """Up and down two binary trees that halve the tensor between them: few hops, the ring's bytes for many ranks."""
    hops = math.ceil(math.log2(world_size)) if world_size > 1 else 0
    return CollectiveCost(2 * hops * link.latency, 2 / link.bandwidth if world_size > 1 else 0.0)


@dataclass(frozen=True)
class Cluster:
    """Nodes with a fast link inside and a slow one between them.

    Attributes:
        nodes: How many.
        ranks_per_node: Ranks in each.
        inner: The link between two ranks of a node.
        outer: The link of a whole node to the others, shared by its ranks.
    """

    nodes: int
    ranks_per_node: int
    inner: Link
    outer: Link

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    def all_reduce(self, nbytes: float) -> CollectiveCost:
        """A reduce-scatter inside the nodes, an all-reduce of the shards between them, an all-gather inside.

        Args:
            nbytes: The size that ring or tree is chosen for, whichever is the faster.
        """
        inside = ring_reduce_scatter(self.inner, self.ranks_per_node)
        between = min(
            ring_all_reduce(self.outer, self.nodes),
            tree_all_reduce(self.outer, self.nodes),
            key=lambda cost: cost.seconds(nbytes),
        )
        return inside + between + inside


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in a simulated pass.

    Attributes:
        first: Its first parameter, as an index into the ready times.
        stop: One past its last parameter.
        nbytes: Its size in bytes.
        ready: When it is complete, in seconds.
        start: When its collective starts.
        end: When that is through.
    """

    first: int
    stop: int
    nbytes: float
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated pass; times in seconds since its beginning.

    Attributes:
        buckets: In launch order.
        backward_end: When backward has computed the last gradient.
        finish: When the last collective is through.
        lower_bound: Before which no bucket boundaries finish.
    """

    buckets: tuple[BucketTimes, ...]
    backward_end: float
    finish: float
    lower_bound: float

    @property
    def exposed(self) -> float:
        """Seconds of communication that no computation hides."""
        return max(0.0, self.finish - self.backward_end)


def simulate(
    ready: Sequence[float],
    nbytes: Sequence[float],
    boundaries: Sequence[int],
    cost: CollectiveCost,
) -> Timeline:
    """What a pass looks like with given bucket boundaries.

    Args:
        ready: When each gradient is ready, in launch order, in seconds.
        nbytes: The size of each, in bytes.
        boundaries: Where each bucket ends, ascending; the last is ``len(ready)``.
        cost: What the collective of a bucket costs.

    Raises:
        ValueError: If lengths differ, or the boundaries are not ascending or do not end with the last parameter.
    """
    _require_boundaries(boundaries, ready, nbytes)
    complete = list(accumulate(ready, max))
    starts = [0, *boundaries]
    buckets: list[BucketTimes] = []
    free = 0.0
    for first, stop in pairwise(starts):
        size = sum(nbytes[first:stop])
        start = max(complete[stop - 1], free)
        free = start + cost.seconds(size)
        buckets.append(BucketTimes(first, stop, size, complete[stop - 1], start, free))
    return Timeline(tuple(buckets), complete[-1], free, lower_bound(ready, nbytes, cost))


def lower_bound(ready: Sequence[float], nbytes: Sequence[float], cost: CollectiveCost) -> float:
    """Seconds before which no bucket boundaries finish.

    Whatever is ready at ``t`` or later cannot start before ``t``, and all of it has to get through one wire.
    """
    behind = list(accumulate(reversed(nbytes)))[::-1]
    complete = accumulate(ready, max)
    return max(at + cost.seconds(size) for at, size in zip(complete, behind, strict=True))


def plan_boundaries(
    ready: Sequence[float], nbytes: Sequence[float], cost: CollectiveCost, cap: float | None = None
) -> tuple[int, ...]:
    """The bucket boundaries with which the last collective is through first.

    A dynamic programme over the number of parameters: the last bucket of the first ``stop`` parameters begins where it
    ends earliest. Those before it may as well end as early as they can: ends never fall with ``stop``, as a plan
    without its last parameter is a plan for the others. Beginnings are tried from the last one on, until the bytes
    alone take too long. Where two end the bucket at the same time, the larger bucket is taken; the same input gives
    the same plan on every rank.

    Args:
        ready: When each gradient is ready, in launch order, in seconds.
        nbytes: The size of each, in bytes.
        cost: What the collective of a bucket costs.
        cap: Largest bucket in bytes; a larger parameter has one of its own. None for no limit.

    Returns:
        Where each bucket ends, as for :func:`simulate`.

    Raises:
        ValueError: If lengths differ or there is no parameter.
    """
    _require_boundaries([len(ready)], ready, nbytes)
    count = len(ready)
    complete = list(accumulate(ready, max))
    before = [0.0, *accumulate(nbytes)]
    end = [0.0]  # per number of parameters, the earliest end of all of them
    best = [0]  # where the bucket that ends there begins
    for stop in range(1, count + 1):
        at = complete[stop - 1]
        earliest, first = math.inf, stop - 1
        for begin in reversed(range(stop)):
            size = before[stop] - before[begin]
            too_large = cap is not None and size > cap and begin < stop - 1
            if too_large or at + cost.seconds(size) > earliest:
                break
            finish = max(at, end[begin]) + cost.seconds(size)
            if finish <= earliest:
                earliest, first = finish, begin
        end.append(earliest)
        best.append(first)
    boundaries: list[int] = []
    stop = count
    while stop:
        boundaries.append(stop)
        stop = best[stop]
    return tuple(reversed(boundaries))


def _require_boundaries(boundaries: Sequence[int], ready: Sequence[float], nbytes: Sequence[float]) -> None:
    if len(ready) != len(nbytes) or not ready:
        raise ValueError(
            f"expected one ready time and one size per parameter, of at least one, found {len(ready)} and {len(nbytes)}"
        )
    steps = list(pairwise([0, *boundaries]))
    if not boundaries or boundaries[-1] != len(ready) or any(stop <= start for start, stop in steps):
        raise ValueError(
            f"expected ascending boundaries from 1 to the number of parameters, {len(ready)}, found {list(boundaries)}"
        )
