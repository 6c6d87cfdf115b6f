"""The arithmetic of messages: pure functions of tensors.

Three ranks and a bucket of 7 elements: shards have 3 elements, 2 are padding::

    rank 0 sends      | 0 1 2 | 3 4 5 | 6 - - |     a part to each rank
    rank 1 receives   | 3 4 5 | 3 4 5 | 3 4 5 |     each rank's part for it; their mean is its shard

In 8 bits each block of 128 values has a step of its own. Four blocks make a record of 528 bytes, 33 times 16; each
rank's part has whole ones::

    | integers of block 0 | 1 | 2 | 3 | steps of block 0 | 1 | 2 | 3 |     a value is its integer times its step
    |        128          |   |   |   |         4        |   |   |   |     bytes
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK_NUMEL = 128
"""Values that share a step in 8 bits. More have larger steps; fewer send more steps."""

RECORD_NUMEL = 4 * BLOCK_NUMEL
RECORD_BYTES = RECORD_NUMEL + 4 * torch.float32.itemsize


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


def packed_in(dtype: torch.dtype, flat: Tensor, pack: Pack, world_size: int, memory: Tensor | None = None) -> Tensor:
    """Pack a flat tensor into memory of another dtype, with as many elements for each rank.

    Args:
        dtype: The memory's dtype.
        flat: The tensor.
        pack: Brings its values into memory.
        world_size: Number of ranks.
        memory: The memory; made here if None.
    """
    values = real(flat)
    if flat.is_complex():
        pack()
        pack = packed(values)
    if memory is None:
        memory = values.new_empty(_padded_numel(flat, world_size), dtype=dtype)
    pack(memory=memory)
    return memory


def _padded_numel(flat: Tensor, world_size: int) -> int:
    """Real numbers of a flat tensor, with as many for each rank."""
    return shard_length(flat, world_size) * world_size * (2 if flat.is_complex() else 1)


def is_exempt(dims: int, wire_dtype: torch.dtype | None) -> bool:
    """Whether a parameter's gradient does not travel in 8 bits: of one dimension (biases, norms), there are few."""
    return wire_dtype is torch.int8 and dims < 2


def message_numel(dtype: torch.dtype, flat: Tensor, world_size: int) -> tuple[int, torch.dtype]:
    """The length of :func:`message_in`, and the dtype of its elements."""
    numel = _padded_numel(flat, world_size)
    return (numel // RECORD_NUMEL * RECORD_BYTES, torch.uint8) if dtype is torch.int8 else (numel, dtype)


def message_in(dtype: torch.dtype, flat: Tensor, pack: Pack, world_size: int, message: Tensor | None = None) -> Tensor:
    """Pack a flat tensor into a message, with a part of the same length for each rank.

    Args:
        dtype: The dtype in which values travel. For int8 each rank's shard must have whole records.
        flat: The tensor.
        pack: Brings its values into memory.
        world_size: Number of ranks.
        message: Its memory; made here if None.
    """
    if dtype is not torch.int8:
        return packed_in(dtype, flat, pack, world_size, message)
    values = packed_in(torch.float32, flat, pack, world_size)
    assert values.numel() % (world_size * RECORD_NUMEL) == 0, f"expected whole records, found {values.numel()} values"
    if message is None:
        message = values.new_empty(values.numel() // RECORD_NUMEL * RECORD_BYTES, dtype=torch.uint8)
    write_8_bits(values, message)
    return message


def write_8_bits(values: Tensor, message: Tensor) -> None:
    """Write fp32 values into a message of 8 bits. This changes them.

    A block with NaN or an infinity gets a step that is one: no value of it will be finite.
    """
    integers, steps = _records(message)
    blocks = values.view(integers.shape)
    step = blocks.abs().amax(-1, keepdim=True).div_(127)
    step.add_(2.0**-149)  # the smallest fp32: a step is not zero, nor rounded down where it is nearly as small
    steps.copy_(step)
    integers.copy_(blocks.div_(step).round_())


def values_of(message: Tensor) -> Tensor:
    """The values of a message: in fp32 if it has 8 bits, else the message itself."""
    return message if message.dtype is not torch.uint8 else torch.mul(*_records(message)).view(-1)


def _records(message: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message: integers (records, blocks of each, values of each) and steps (records, blocks of each, 1)."""
    records = message.view(-1, RECORD_BYTES)
    integers = records[:, :RECORD_NUMEL].view(torch.int8).unflatten(1, (-1, BLOCK_NUMEL))
    return integers, records[:, RECORD_NUMEL:].view(torch.float32).unsqueeze(2)
