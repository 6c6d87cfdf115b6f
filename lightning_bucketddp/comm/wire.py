"""The arithmetic of messages: pure functions of tensors.

Three ranks and a bucket of 7 elements: shards have 3 elements, 2 are padding::

    rank 0 sends      | 0 1 2 | 3 4 5 | 6 - - |     a part to each rank
    rank 1 receives   | 3 4 5 | 3 4 5 | 3 4 5 |     each rank's part for it; their mean is its shard
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Pack(Protocol):
    """Brings the values of a flat tensor into its memory."""

    def __call__(self, scale: float | None = None, memory: Tensor | None = None) -> None:
        """Pack.

        Args:
            scale: A factor for the values; None for none.
            memory: Memory of any dtype to bring them into instead, unscaled, with zeros behind them.
        """


def packed(flat: Tensor) -> Pack:
    """The function to pack values that are in ``flat`` already."""

    def pack(scale: float | None = None, memory: Tensor | None = None) -> None:
        if memory is not None:
            memory[: flat.numel()].copy_(flat)
            memory[flat.numel() :].zero_()
        elif scale is not None:
            flat.mul_(scale)

    return pack


def real(flat: Tensor) -> Tensor:
    """View complex numbers as pairs of reals; other tensors as they are."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def may_travel_in(dtype: torch.dtype, flat: Tensor) -> bool:
    """Whether a tensor has this dtype, or a floating or complex one of more precision."""
    values = real(flat)
    return values.dtype is dtype or (values.is_floating_point() and values.dtype.itemsize > dtype.itemsize)


def shard_length(flat: Tensor, world_size: int) -> int:
    """Elements of a shard of ``flat``. The last shards may be shorter."""
    return -(-flat.numel() // world_size)


def padded(flat: Tensor, numel: int) -> Tensor:
    """A copy of ``flat`` with zeros behind it up to ``numel`` elements; ``flat`` itself if it has as many."""
    return flat if flat.numel() == numel else torch.cat([flat, flat.new_zeros(numel - flat.numel())])


def packed_in(dtype: torch.dtype, flat: Tensor, pack: Pack, world_size: int) -> Tensor:
    """Pack a flat tensor into memory of another dtype, with as many elements for each rank.

    Args:
        dtype: The memory's dtype.
        flat: The tensor.
        pack: Brings its values into memory.
        world_size: Number of ranks.
    """
    values = real(flat)
    if flat.is_complex():
        pack()
        pack = packed(values)
    numel = shard_length(flat, world_size) * world_size * (values.numel() // flat.numel())
    sent = values.new_empty(numel, dtype=dtype)
    pack(memory=sent)
    return sent
