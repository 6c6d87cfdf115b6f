"""Where every gradient lives: parameters' specifications in, buckets and slots out.

Pure arithmetic on frozen values: no device, no process, no tensor. The same input gives the same
layout on every rank, which is what lets ranks issue the same collectives without asking each other.

A buffer with real numbers: four fp32 parameters, ready in the order ``c, b, a`` during backward, a
fourth, ``d``, that was never seen; ``bucket_cap_mb`` of 320 bytes::

    parameter      a (8, 4)    b (16, 4)   c (10,)    d (3,)
    bytes          128         256         40         12

    offset (elements)   0      16        80      112    128
                        |c  ~~~|b        |a      |d~~~~~|
    bucket              |-------- 0 -----|-- 1 --|- 2 --|

``~`` is padding: every slot starts on a 64-byte boundary (16 elements here), so that vectorised
kernels find aligned data. Padding is zero and travels with its bucket. Buckets 0 and 1 are split by
the cap; bucket 2 stands alone because a never-seen parameter must hold nobody up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 64
"""Every slot starts at a multiple of this many bytes: one cache line, the widest vector load."""

MIB = 1024 * 1024
MAX_DEFAULT_BUCKET_BYTES = 25 * MIB
"""Upper bound of the default bucket size, and the size on one machine; torch DDP's ``bucket_cap_mb`` default."""
MIN_DEFAULT_BUCKET_BYTES = 4 * MIB
"""Lower bound of the default bucket size: below it what a collective costs besides its bytes outweighs overlap."""
DEFAULT_BUCKET_COUNT = 32
"""Buckets the default rule aims at between two machines: the tail that no backward compute hides is then about 1/32.

With more ranks a collective takes more hops, log2 of their number at best, and fewer buckets are worth theirs.
"""
MIN_DEFAULT_BUCKET_COUNT = 4


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of one parameter.

    Attributes:
        name: The parameter's qualified name, as in ``module.named_parameters()``.
        shape: Its shape.
        strides: Strides, in elements, of its view: the parameter's own if it is dense and
            non-overlapping, contiguous ones otherwise.
        dtype: The gradient's dtype: the parameter's own unless ``Tensor.grad_dtype`` says otherwise.
        device: The device as a string, e.g. ``"cpu"`` or ``"cuda:0"``.
        param_dtype: The parameter's dtype where the gradient has another; None where it is the same.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
    param_dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, param: torch.Tensor) -> ParamSpec:
        """The specification of ``param``, whose gradient has its shape, dtype and (if dense) strides."""
        shape = tuple(param.shape)
        strides = tuple(param.stride())
        if not is_dense(shape, strides):
            strides = contiguous_strides(shape)
        dtype = param.grad_dtype or param.dtype
        return cls(name, shape, strides, dtype, str(param.device), None if dtype is param.dtype else param.dtype)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a gradient buffer.

    Attributes:
        spec: The parameter.
        buffer: Index of its buffer in ``Layout.buffers``.
        offset: First element in that buffer.
    """

    spec: ParamSpec
    buffer: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """A contiguous run of slots that is reduced by one collective.

    Attributes:
        buffer: Index of its buffer in ``Layout.buffers``.
        start: First element.
        stop: One past the last element, padding included.
        slots: Indices into ``Layout.slots``, by offset.
    """

    buffer: int
    start: int
    stop: int
    slots: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements that travel, padding included."""
        return self.stop - self.start


@dataclass(frozen=True)
class BufferSpec:
    """One flat tensor: a device (as a string), a dtype and a number of elements."""

    device: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Slots, buckets in launch order, and the buffers that the buckets tile.

    Attributes:
        slots: One per parameter, in the order the specifications were given.
        buckets: In launch order: bucket *k* is launched before bucket *k + 1*, on every rank.
        buffers: One per (device, dtype).
    """

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    buffers: tuple[BufferSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def bucket_nbytes(self, bucket: Bucket) -> int:
        """Bytes of one bucket, padding included."""
        return bucket.numel * self.buffers[bucket.buffer].dtype.itemsize


def plan(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    bucket_cap_bytes: int | None = None,
    groups: Sequence[Hashable] | None = None,
    multiple: int = 1,
    world_size: int = 2,
    one_machine: bool = False,
) -> Layout:
    """Lays parameters out in the order in which their gradients become ready.

    Args:
        specs: The parameters, in any fixed order.
        order: Indices into ``specs``, earliest gradient first; each index once.
        bucket_cap_bytes: Largest bucket in bytes; a parameter larger than that has a bucket of its
            own. ``None``: :func:`default_bucket_cap`, with small buckets at both ends.
        groups: One key per parameter. Parameters with different keys never share a bucket.
        multiple: Elements that the length of each bucket is a multiple of.
        world_size: Number of ranks, for the default cap.
        one_machine: Whether they share one machine, for the default cap.

    Returns:
        The layout. Slots have the order of ``specs``; buckets are sorted by when their last
        gradient is expected.

    Raises:
        ValueError: If ``order`` is not a permutation or the cap is negative.
    """
    if sorted(order) != list(range(len(specs))):
        raise ValueError(f"expected `order` to hold each of the {len(specs)} parameters once, found {list(order)}")
    if bucket_cap_bytes is not None and bucket_cap_bytes < 0:
        raise ValueError(f"expected a bucket cap of 0 or more, found {bucket_cap_bytes} bytes")

    runs: dict[tuple[str, torch.dtype, Hashable], list[int]] = {}
    for slot in order:
        key = (specs[slot].device, specs[slot].dtype, groups[slot] if groups is not None else None)
        runs.setdefault(key, []).append(slot)

    total = sum(spec.nbytes for spec in specs)
    members: list[tuple[int, ...]] = []
    for run in runs.values():
        sizes = [_padded(specs[slot]) * specs[slot].dtype.itemsize for slot in run]
        if bucket_cap_bytes is not None:
            cuts = _cut_by_size(sizes, bucket_cap_bytes)
        else:
            cuts = _cut_default(sizes, default_bucket_cap(total, world_size, one_machine))
        members.extend(tuple(run[a:b]) for a, b in cuts)
    position = {slot: at for at, slot in enumerate(order)}
    members.sort(key=lambda slots: max(position[slot] for slot in slots))

    buffers: dict[tuple[str, torch.dtype], int] = {}
    filled: list[int] = []
    slots: dict[int, Slot] = {}
    buckets: list[Bucket] = []
    for bucket in members:
        first = specs[bucket[0]]
        buffer = buffers.setdefault((first.device, first.dtype), len(buffers))
        if buffer == len(filled):
            filled.append(0)
        start = filled[buffer]
        for slot in bucket:
            slots[slot] = Slot(specs[slot], buffer, filled[buffer])
            filled[buffer] += _padded(specs[slot])
        filled[buffer] += -(filled[buffer] - start) % multiple
        buckets.append(Bucket(buffer, start, filled[buffer], bucket))
    return Layout(
        slots=tuple(slots[index] for index in range(len(specs))),
        buckets=tuple(buckets),
        buffers=tuple(BufferSpec(device, dtype, filled[at]) for (device, dtype), at in buffers.items()),
    )


def default_bucket_cap(total_bytes: int, world_size: int, one_machine: bool) -> int:
    """The default bucket size in bytes.

    Args:
        total_bytes: Of all gradients.
        world_size: Number of ranks.
        one_machine: Whether they share one machine, where little is left to wait for after backward, and each
            collective takes processors away from it.

    Returns:
        On one machine 25 MiB. On several 1/32 of the total for two ranks, 1/16 for four, 1/11 for eight, and so on
        with the logarithm of their number up to 1/4; from 4 to 25 MiB.
    """
    if one_machine:
        return MAX_DEFAULT_BUCKET_BYTES
    hops = max(1, (world_size - 1).bit_length())
    count = max(MIN_DEFAULT_BUCKET_COUNT, round(DEFAULT_BUCKET_COUNT / hops))
    return max(MIN_DEFAULT_BUCKET_BYTES, min(MAX_DEFAULT_BUCKET_BYTES, total_bytes // count))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides cover ``prod(shape)`` elements without gaps or overlap, in any axis order."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(strides, shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, for ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _padded(spec: ParamSpec) -> int:
    """Elements that the parameter occupies: its own, rounded up to the alignment."""
    per_line = max(1, ALIGNMENT_BYTES // spec.dtype.itemsize)
    return -(-spec.numel // per_line) * per_line


def _cut_by_size(sizes: Sequence[int], cap: int) -> list[tuple[int, int]]:
    """Cuts consecutive sizes (bytes) into ranges of at most ``cap``; a larger element stands alone."""
    cuts: list[tuple[int, int]] = []
    start, held = 0, 0
    for at, size in enumerate(sizes):
        if at > start and held + size > cap:
            cuts.append((start, at))
            start, held = at, 0
        held += size
    if len(sizes) > start:
        cuts.append((start, len(sizes)))
    return cuts


def _cut_default(sizes: Sequence[int], cap: int) -> list[tuple[int, int]]:
    """Cuts with a cap, and a quarter of it at both ends.

    A small first bucket starts the wire early; a small last one is what remains exposed after backward.
    """
    edge = cap // 4
    if sum(sizes) <= 2 * edge:
        return _cut_by_size(sizes, cap)
    head = _cut_by_size(sizes, edge)[0][1]
    reversed_tail = _cut_by_size(list(reversed(sizes)), edge)[0][1]
    tail = max(head, len(sizes) - reversed_tail)
    middle = [(head + a, head + b) for a, b in _cut_by_size(sizes[head:tail], cap)]
    return [(0, head), *middle, *([(tail, len(sizes))] if tail < len(sizes) else [])]
