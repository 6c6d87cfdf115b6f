"""What an all-reduce costs on the real group, measured in a fraction of a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.schedule import CollectiveCost

SIZES = (4 * 1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
"""Bytes of the tensors that are reduced, as far as there is time. The first tells the latency, the last the rate."""

REPETITIONS = 3
"""How often each is, besides once without being timed: the first finds a link that has rested."""

LONG_ENOUGH = 0.03
"""Seconds for one all-reduce from which on no larger tensors are tried."""


def measure_cost(
    collectives: Collectives, device: torch.device, wire_dtype: torch.dtype | None = None, scattered: bool = False
) -> CollectiveCost:
    """Times all-reduces of fp32 tensors of a few sizes. All ranks must call this, with the same arguments.

    Args:
        collectives: The group, of at least two ranks.
        device: The device whose tensors travel; the host waits for it.
        wire_dtype: As for :meth:`Collectives.all_reduce_mean`.
        scattered: Whether to time reduce-scatters instead.

    Returns:
        The cost by bytes of the tensor (not of what travels), the same on every rank: that of the slowest.
    """
    reduce = collectives.reduce_scatter_mean if scattered else collectives.all_reduce_mean
    seconds: list[float] = []
    for size in SIZES:  # growing, until one takes long: how fast the link is can only be found out by using it
        flat = torch.zeros(size // 4, device=device)
        times: list[float] = []
        for _ in range(1 + REPETITIONS):
            begin = time.perf_counter()
            reduce(flat, wire_dtype).wait()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begin)
        seconds.append(slowest(collectives, [statistics.median(times[1:])], device)[0])
        if seconds[-1] > LONG_ENOUGH and len(seconds) > 1:
            break
    # Not fitted to what is between: many links let some hundred kilobytes pass at a higher rate when they have rested.
    return CollectiveCost.through((SIZES[0], seconds[0]), (SIZES[len(seconds) - 1], seconds[-1]))


def slowest(
    collectives: Collectives,
    seconds: list[float],
    device: torch.device,
    on_idle: Callable[[], None] | None = None,
) -> list[float]:
    """The largest of the ranks' values, place by place. All ranks must call this; all get the same.

    Args:
        collectives: The group.
        seconds: One value per place, as many as on every other rank.
        device: The device whose tensors travel.
        on_idle: Called now and then while the host waits; an exception it raises ends the wait.
    """
    gathered, pending = collectives.all_gather(torch.tensor(seconds, dtype=torch.float32, device=device))
    pending.wait(on_idle)
    largest: list[float] = gathered.amax(0).tolist()
    return largest
