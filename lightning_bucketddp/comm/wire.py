"""Pack what travels in an all-to-all, and average what has arrived. Pure functions of tensors.

Three ranks and a bucket of 7 elements: shards have 3 elements, 2 are padding::

    rank 0 sends      | 0 1 2 | 3 4 5 | 6 - - |     a part to each rank
    rank 1 receives   | 3 4 5 | 3 4 5 | 3 4 5 |     each rank's part for it; their mean is its shard
"""

from __future__ import annotations

import torch
from torch import Tensor

_CACHED_NUMEL = 65536
"""Elements that several operations work on before the next ones: 256 KiB of fp32, which stay in the cache."""

SHORT_BYTES = 256 * 1024
"""On gloo, ranks send each other everything at once if that is at most so many bytes on each rank.

gloo's own all-reduce and all-gather take several rounds, each as long as the latency of the network, but send less.
"""

LONG_BYTES = 2 * 1024 * 1024
"""Longer messages from one rank to another travel in pieces on gloo.

gloo's one thread per device reads a message to its end before it writes again. So of two long messages that ranks send
each other, one may wait for the other. In pieces, both directions of the link are in use. Shorter messages fit into the
sockets' buffers, and pieces would cost more than they bring.
"""
PIECE_BYTES = 512 * 1024
"""Length of a piece."""

Exchange = tuple[Tensor, Tensor, list[int], list[int]]
"""Output and input of an all-to-all, and how much of each belongs to each rank."""


def real(flat: Tensor) -> Tensor:
    """The memory of a 1-D tensor as a real 1-D tensor."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def may_travel_in(dtype: torch.dtype, flat: Tensor) -> bool:
    """Whether a tensor has this dtype, or a floating one of more precision."""
    return flat.dtype is dtype or (flat.is_floating_point() and flat.dtype.itemsize > dtype.itemsize)


def shard_length(flat: Tensor, world_size: int) -> int:
    """Elements of a shard of ``flat``. The last shards may be shorter."""
    return -(-flat.numel() // world_size)


def memory(flat: Tensor, world_size: int, dtype: torch.dtype | None) -> Tensor | None:
    """Make memory for what a mean of ``flat`` sends in ``dtype``; None if it sends ``flat`` itself, or nothing.

    The caller may fill it: with the values of ``flat`` in that dtype, and zeros up to its end.
    """
    if dtype is None or world_size == 1 or flat.is_complex() or not may_travel_in(dtype, flat):
        return None
    return flat.new_empty(shard_length(flat, world_size) * world_size, dtype=dtype)


def padded(flat: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """A copy of ``flat`` in ``dtype``, with zeros behind it up to ``numel`` elements."""
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
    first, *others = received.view(world_size, -1)[:, : out.numel()]
    total = first.to(torch.promote_types(received.dtype, torch.float32), copy=True)
    for part in others:
        total.add_(part)
    out.copy_(total.mul_(1.0 / world_size))


def parts_with_tail(flat: Tensor, tail: Tensor, world_size: int) -> Tensor:
    """Copy a part of ``flat`` (1-D) for each rank, and ``tail`` (1-D) behind each: a row per rank."""
    return torch.cat([flat.view(world_size, -1), tail.expand(world_size, -1)], dim=1)


def mean_and_sum(received: Tensor, shard: Tensor, tail: Tensor) -> None:
    """Write the mean of the parts and the sum of the tails that have arrived, a row from each rank."""
    total = received.sum(dim=0)
    torch.mul(total[: len(shard)], 1.0 / len(received), out=shard)
    tail.copy_(total[len(shard) :])


def in_one(sent: Tensor, rank: int, world_size: int, with_own: bool) -> tuple[Tensor, list[Exchange]]:
    """The all-to-all by which each rank gets its part of all ranks' tensors.

    Args:
        sent: A part for each rank, one after the other.
        rank: This rank.
        world_size: The number of ranks.
        with_own: Whether a rank needs its own part among those that it gets.

    Returns:
        Memory for the parts that arrive, by rank, and the arguments of the all-to-all.
    """
    if with_own:
        received = torch.empty_like(sent)
        return received, [(received, sent, [], [])]
    length = sent.numel() // world_size
    counts = [length] * world_size
    if rank in (0, world_size - 1):  # a rank sends one piece of memory: the others cannot leave their own part out
        counts[rank] = 0
        sent = sent[length:] if rank == 0 else sent[:-length]
    received = torch.empty_like(sent)
    return received, [(received, sent, counts, counts)]


def in_pieces(sent: Tensor, rank: int, world_size: int, with_own: bool) -> tuple[Tensor, list[Exchange]]:
    """As :func:`in_one`, by several all-to-alls. In each a rank sends one piece, and receives one from another rank."""
    targets = sent.view(world_size, -1)
    received = sent.new_empty(targets[0 if with_own else 1 :].numel())
    sources = list(received.view(-1, targets.shape[1]))
    if with_own:
        sources[rank].copy_(targets[rank])
    else:
        sources.insert(rank, targets[rank])
    step = PIECE_BYTES // sent.element_size()
    exchanges: list[Exchange] = []
    for shift in range(1, world_size):
        target, source = (rank + shift) % world_size, (rank - shift) % world_size
        for piece, into in zip(targets[target].split(step), sources[source].split(step), strict=True):
            counts = [[len(piece) * (it == other) for it in range(world_size)] for other in (source, target)]
            exchanges.append((into, piece, *counts))
    return received, exchanges


def average_with_others(shard: Tensor, received: Tensor, rank: int, world_size: int) -> None:
    """Replace a rank's shard by its mean with the others' parts.

    Args:
        shard: 1-D.
        received: The parts that arrived, perhaps with the rank's own; see :func:`in_one`.
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
