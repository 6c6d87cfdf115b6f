"""Simulate when buckets are ready and sent, and find the bucket boundaries that finish first.

Pure arithmetic; training plans its buckets without it. The model, for which
:func:`plan_boundaries` is exact:

- One wire: a bucket starts when it is complete and the bucket before it has been sent.
- A collective of ``n`` bytes takes ``latency + n * seconds_per_byte``, independent of all else.
- Gradients count as ready in launch order: each when it and all before it are ready.

A backward with real numbers: four gradients of 1 MB, and collectives of 4 ms plus 8 ms per MB::

    ready (ms)           10     14     18           40
    one bucket                                      [40 -- 4 MB -- 76]
    a bucket each        [10 - 22][22 - 34][34 - 46][46 - 58]
    planned              [10 - 22][22 - 2 MB - 42][42 - 54]
    lower bound                                      52   the last gradient starts at 40 and takes 12

Sources: MG-WFBP (Shi et al., INFOCOM 2019 and TPDS 2021) merges by a dynamic programme; costs of rings and trees are
the usual ones (Thakur, Rabenseifner and Gropp 2005; Sanders, Speck and Träff 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_bucketddp.layout.ledger import Algorithm, Kind, sent


@dataclass(frozen=True)
class Link:
    """One direction of the connection between two ranks.

    Attributes:
        latency: Seconds until an empty message has arrived.
        bandwidth: Bytes per second.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(f"expected a latency from 0 s and a positive bandwidth in bytes/s, found {self}")


@dataclass(frozen=True)
class CollectiveCost:
    """How long a collective takes, by the size of each rank's tensor.

    Attributes:
        latency: Seconds for no bytes.
        seconds_per_byte: Additional seconds for each byte.
    """

    latency: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.seconds_per_byte >= 0):
            raise ValueError(f"expected costs from 0 s, found {self}")

    def seconds(self, nbytes: float) -> float:
        """Seconds of a collective of ``nbytes``."""
        return self.latency + nbytes * self.seconds_per_byte

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        """The cost of two collectives, one after the other."""
        return CollectiveCost(self.latency + other.latency, self.seconds_per_byte + other.seconds_per_byte)


def ring_reduce_scatter(link: Link, world_size: int) -> CollectiveCost:
    """A reduce-scatter or an all-gather around a ring, in ``n - 1`` messages one after the other."""
    return CollectiveCost((world_size - 1) * link.latency, _sent("reduce_scatter", world_size) / link.bandwidth)


def ring_all_reduce(link: Link, world_size: int) -> CollectiveCost:
    """A reduce-scatter and an all-gather around a ring."""
    half = ring_reduce_scatter(link, world_size)
    return half + half


def tree_all_reduce(link: Link, world_size: int) -> CollectiveCost:
    """An all-reduce up and down two binary trees, each with half of the tensor: as many bytes as a ring, fewer hops."""
    hops = math.ceil(math.log2(world_size))
    return CollectiveCost(2 * hops * link.latency, _sent("all_reduce", world_size, "tree") / link.bandwidth)


def _sent(kind: Kind, world_size: int, algorithm: Algorithm = "ring") -> float:
    """What a rank sends for each byte of a tensor: the ledger's figure, for nodes of one rank."""
    return sent(kind, 1, range(world_size), algorithm).between


@dataclass(frozen=True)
class Cluster:
    """Nodes with a fast link inside and a slow one between them.

    Attributes:
        nodes: How many.
        ranks_per_node: Ranks in each.
        inner: The link between two ranks of a node.
        outer: The link of a whole node to the others; its ranks share it.
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
        """A reduce-scatter inside each node, an all-reduce of the shards between nodes, an all-gather inside.

        Args:
            nbytes: The size for which to choose the faster of ring and tree.
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
        ready: Second at which it is complete.
        start: Second at which its collective starts.
        end: Second at which its collective ends.
    """

    first: int
    stop: int
    nbytes: float
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated pass; all times in seconds since its beginning.

    Attributes:
        buckets: The buckets, in launch order.
        backward_end: When backward has computed the last gradient.
        finish: When the last collective ends.
        lower_bound: Earliest end of the last collective for any bucket boundaries.
    """

    buckets: tuple[BucketTimes, ...]
    backward_end: float
    finish: float
    lower_bound: float

    @property
    def exposed(self) -> float:
        """Seconds of communication after backward."""
        return max(0.0, self.finish - self.backward_end)


def simulate(
    ready: Sequence[float],
    nbytes: Sequence[float],
    boundaries: Sequence[int],
    cost: CollectiveCost,
) -> Timeline:
    """Simulate a pass with given bucket boundaries.

    Args:
        ready: When each gradient is ready, in launch order, in seconds.
        nbytes: The size of each gradient, in bytes.
        boundaries: The end of each bucket, ascending; the last is ``len(ready)``.
        cost: The cost of a bucket's collective.

    Raises:
        ValueError: If lengths differ, or the boundaries are not ascending or do not end with the last parameter.
    """
    _require_boundaries(boundaries, ready, nbytes)
    complete = list(accumulate(ready, max))
    buckets: list[BucketTimes] = []
    free = 0.0
    for first, stop in pairwise([0, *boundaries]):
        size = sum(nbytes[first:stop])
        start = max(complete[stop - 1], free)
        free = start + cost.seconds(size)
        buckets.append(BucketTimes(first, stop, size, complete[stop - 1], start, free))
    return Timeline(tuple(buckets), complete[-1], free, lower_bound(ready, nbytes, cost))


def lower_bound(ready: Sequence[float], nbytes: Sequence[float], cost: CollectiveCost) -> float:
    """Earliest end of the last collective for any bucket boundaries, in seconds.

    A gradient that is ready at ``t`` is sent after ``t``, and so are all gradients behind it, on one wire.
    """
    behind = list(accumulate(reversed(nbytes)))[::-1]
    return max(at + cost.seconds(size) for at, size in zip(accumulate(ready, max), behind, strict=True))


def plan_boundaries(
    ready: Sequence[float], nbytes: Sequence[float], cost: CollectiveCost, cap: float | None = None
) -> tuple[int, ...]:
    """Find the bucket boundaries with which the last collective ends first.

    This is a dynamic programme over the number of parameters. For the first ``stop`` parameters it chooses the
    beginning of the last bucket so that this bucket ends earliest, given the best plan for the parameters before it. It
    tries beginnings from ``stop - 1`` downwards, until the bytes alone take too long. Of two equally good beginnings it
    takes the larger bucket, so the same input gives the same plan on every rank.

    Args:
        ready: When each gradient is ready, in launch order, in seconds.
        nbytes: The size of each gradient, in bytes.
        cost: The cost of a bucket's collective.
        cap: Largest bucket in bytes; a larger parameter has a bucket of its own. None for no limit.

    Returns:
        The end of each bucket, as for :func:`simulate`.

    Raises:
        ValueError: If lengths differ or there is no parameter.
    """
    _require_boundaries([len(ready)], ready, nbytes)
    complete = list(accumulate(ready, max))
    before = [0.0, *accumulate(nbytes)]
    ends = [0.0]  # per number of parameters, when the last of them has been sent at the earliest
    begins = [0]  # per number of parameters, where the last bucket of this plan begins
    for stop in range(1, len(ready) + 1):
        at = complete[stop - 1]
        earliest, first = math.inf, stop - 1
        for begin in reversed(range(stop)):
            size = before[stop] - before[begin]
            too_large = cap is not None and size > cap and begin < stop - 1
            if too_large or at + cost.seconds(size) > earliest:
                break
            finish = max(at, ends[begin]) + cost.seconds(size)
            if finish <= earliest:
                earliest, first = finish, begin
        ends.append(earliest)
        begins.append(first)
    boundaries: list[int] = []
    stop = len(ready)
    while stop:
        boundaries.append(stop)
        stop = begins[stop]
    return tuple(reversed(boundaries))


def _require_boundaries(boundaries: Sequence[int], ready: Sequence[float], nbytes: Sequence[float]) -> None:
    if len(ready) != len(nbytes) or not ready:
        raise ValueError(
            f"expected one ready time and one size per parameter, of at least one, found {len(ready)} and {len(nbytes)}"
        )
    ascending = all(start < stop for start, stop in pairwise([0, *boundaries]))
    if not ascending or not boundaries or boundaries[-1] != len(ready):
        raise ValueError(
            f"expected ascending boundaries from 1 to the number of parameters, {len(ready)}, found {list(boundaries)}"
        )
