"""The cases of the link benchmark, and the bounds of their links. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paced import BACKWARD_MS, EVEN, FORWARD_MS
from schedule import CollectiveCost, Link, lower_bound, ring_all_reduce

NBYTES = sum(EVEN) * 4
"""Bytes of all gradients, in every case."""
REFERENCE_RATE = 2.0
SHAPES = {
    "growing": [number + 1 for number in range(24)],
    "shrinking": [24 - number for number in range(24)],
    "half in the first layer": [23, *[1] * 23],
    "half in the last layer": [*[1] * 23, 23],
    "half in the middle": [*[1] * 12, 23, *[1] * 11],
    "large and small in turn": [19, 1] * 12,
    "240 layers": [1] * 240,
}
"""Relative sizes of layers, in the order of forward."""


@dataclass(frozen=True)
class Case:
    """The rate of a link, and the speed of the model.

    Attributes:
        name: Its name in tables.
        rate: The link's rate in each direction, in Gbit/s.
        forward_ms: Milliseconds of a layer's forward.
        backward_ms: Milliseconds of a layer's backward.
        sizes: Parameters of each layer, counted in elements.
    """

    name: str
    rate: float
    forward_ms: float = FORWARD_MS
    backward_ms: float = BACKWARD_MS
    sizes: Sequence[int] = EVEN

    @property
    def ratio(self) -> float:
        """The time of backward divided by that of an all-reduce of all gradients at the link's rate."""
        return len(self.sizes) * self.backward_ms / 1e3 / wire_seconds(self.rate)


def wire_seconds(rate: float) -> float:
    """Seconds that an all-reduce of all gradients between two ranks takes at ``rate`` Gbit/s, headers not counted."""
    return ring_all_reduce(Link(0.0, rate * 1e9 / 8), 2).seconds(NBYTES)


def reference(rate: float = REFERENCE_RATE, slower: float = 1.0) -> Case:
    """24 layers, 58 MB of gradients, 4 ms forward and 8 ms backward a layer.

    Args:
        rate: The link's rate, in Gbit/s.
        slower: By how much both layers and link are slower than that.
    """
    name = "reference" if slower == 1 else f"reference, {slower:g} times slower"
    return Case(name, rate / slower, FORWARD_MS * slower, BACKWARD_MS * slower)


def case_of(rate: float, ratio: float) -> Case:
    """Make the case with a backward ``ratio`` times as long as an all-reduce, and a forward half as long."""
    backward_ms = ratio * wire_seconds(rate) * 1e3 / len(EVEN)
    return Case(f"{rate:g} Gbit/s, ratio {ratio:g}", rate, backward_ms / 2, backward_ms)


def swept(rates: Sequence[float], ratios: Sequence[float]) -> list[Case]:
    """Return each rate at ratio 1, and each ratio at the reference's rate."""
    return list(
        dict.fromkeys([*(case_of(rate, 1.0) for rate in rates), *(case_of(REFERENCE_RATE, ratio) for ratio in ratios)])
    )


def shaped(name: str) -> Case:
    """Make a case with layers of other sizes: as many bytes, and as much time, as the reference case."""
    parts = SHAPES[name]
    slower = len(EVEN) / len(parts)
    sizes = tuple(sum(EVEN) * part // sum(parts) for part in parts)
    return Case(name, REFERENCE_RATE, FORWARD_MS * slower, BACKWARD_MS * slower, sizes)


def least_exposed(all_reduce: float, backward: float, sizes: Sequence[int] = EVEN) -> float:
    """Seconds of an all-reduce of all gradients that backward cannot hide, whatever the order and the buckets.

    The first gradient is ready after one layer's backward. Then all bytes go through one wire. The last layer's bytes
    do not start before backward has ended.

    Args:
        all_reduce: Seconds that an all-reduce of all gradients in one piece takes.
        backward: Seconds that backward takes.
        sizes: Parameters of each layer, in the order of forward.
    """
    ready = [backward * (layer + 1) / len(sizes) for layer in range(len(sizes))]
    nbytes = [4.0 * size for size in reversed(sizes)]
    return lower_bound(ready, nbytes, CollectiveCost(0.0, all_reduce / NBYTES)) - backward


def least_exposed_sharded(all_reduce: float, backward: float, forward: float, sizes: Sequence[int] = EVEN) -> float:
    """Seconds of a reduce-scatter and an all-gather that backward and the next forward cannot hide.

    Each sends half of an all-reduce's bytes. The all-gather mirrors the reduce-scatter. From the step's end on, all
    bytes go through one wire. The first layer waits for its own bytes, and the last layer's forward begins when all
    bytes have arrived.

    Args:
        all_reduce: Seconds that an all-reduce of all gradients in one piece takes.
        backward: Seconds that backward takes.
        forward: Seconds that forward takes.
        sizes: Parameters of each layer, in the order of forward.
    """
    return least_exposed(all_reduce / 2, backward, sizes) + least_exposed(all_reduce / 2, forward, sizes)
