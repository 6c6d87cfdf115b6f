"""What travels in an all-to-all, and the means of what has arrived. Tensors only; nothing is sent here.

Three ranks and a bucket of 7 elements: shards have 3 elements, 2 are padding::

    rank 0 sends      | 0 1 2 | 3 4 5 | 6 - - |     a part to each rank
    rank 1 receives   | 3 4 5 | 3 4 5 | 3 4 5 |     each rank's part for it; their mean is its shard
"""

from __future__ import annotations

import torch
from torch import Tensor

_CACHED_NUMEL = 65536
"""Elements that are worked on at a time where several operations follow each other: 256 KiB of fp32."""


def real(flat: Tensor) -> Tensor:
    """The 1-D real tensor of the same memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def may_travel_in(dtype: torch.dtype, flat: Tensor) -> bool:
    """Whether the tensor has this dtype, or a floating one of more precision."""
    return flat.dtype is dtype or (flat.is_floating_point() and flat.dtype.itemsize > dtype.itemsize)


def padded(flat: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """A copy of ``flat`` in ``dtype``, with zeros behind it, ``numel`` elements together."""
    copy = flat.new_empty(numel, dtype=dtype)
    copy[: flat.numel()].copy_(flat)
    copy[flat.numel() :].zero_()
    return copy


def mean_of_parts(received: Tensor, world_size: int, out: Tensor) -> None:
    """Write the mean of the ranks' parts, summed in fp32 at least.

    Args:
        received: As many parts as there are ranks, one after the other.
        world_size: The number of ranks.
        out: Where to: 1-D, of a part's length or, without the padding, less.
    """
    dtype = torch.promote_types(received.dtype, torch.float32)
    out.copy_(received.view(world_size, -1)[:, : out.numel()].sum(0, dtype=dtype).mul_(1.0 / world_size))


def parts_for_others(flat: Tensor, rank: int, world_size: int) -> tuple[Tensor, list[int]]:
    """What a rank sends when its own part need not travel, and how much of it each rank gets.

    What is sent is one piece of memory, so only the first and the last rank can leave their own part out.
    """
    length = flat.numel() // world_size
    counts = [length] * world_size
    if rank in (0, world_size - 1):
        counts[rank] = 0
        flat = flat[length:] if rank == 0 else flat[:-length]
    return flat, counts


def average_with_others(shard: Tensor, received: Tensor, rank: int, world_size: int) -> None:
    """Replace a rank's shard by the mean of it and the others' parts.

    Args:
        shard: 1-D.
        received: What came of :func:`parts_for_others`; the rank's own part may be among it.
        rank: The rank.
        world_size: The number of ranks.
    """
    parts = received.view(-1, len(shard))
    others = [part for at, part in enumerate(parts) if len(parts) < world_size or at != rank]
    for start in range(0, len(shard), _CACHED_NUMEL):  # in stretches short enough for caches
        stretch = shard[start : start + _CACHED_NUMEL]
        for other in others:
            stretch.add_(other[start : start + _CACHED_NUMEL])
        stretch.mul_(1.0 / world_size)
