"""Where each gradient lies: parameter specifications in, slots and buckets out.

Pure arithmetic on frozen values. The same input gives the same layout on every rank, so ranks issue the same
collectives without asking one another.

An example: four fp32 parameters and a cap of 320 bytes. Backward computes the gradients of ``c``, ``b`` and ``a`` in
this order, and none of ``d``::

    parameter      a (8, 4)    b (16, 4)   c (10,)    d (3,)
    bytes          128         256         40         12

    offset (elements)   0      16        80      112    128
                        |c  ~~~|b        |a      |d~~~~~|
    bucket              |-------- 0 -----|-- 1 --|- 2 --|

``~`` is padding. It is zero and travels with its bucket. Every slot starts on a 64-byte boundary (16 elements here),
because vectorised kernels want aligned data. The cap separates buckets 0 and 1. ``d`` has a bucket of its own, so that
no other gradient waits for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

ALIGNMENT_BYTES = 64
"""Every slot starts at a multiple of this many bytes: one cache line, the widest vector load."""

MIB = 1024 * 1024
MAX_DEFAULT_BUCKET_BYTES = 25 * MIB
"""Largest default cap, and the default on one machine; torch DDP's ``bucket_cap_mb`` default."""
MIN_DEFAULT_BUCKET_BYTES = 4 * MIB
"""Smallest default cap: in smaller buckets the latency of collectives outweighs the overlap."""
DEFAULT_BUCKET_COUNT = 32
"""Default number of buckets for two ranks on two machines. Backward then hides all but about 1/32 of the communication.

A collective takes more hops with more ranks, at least log2 of their number, so fewer buckets are better.
"""
MIN_DEFAULT_BUCKET_COUNT = 4

MANY_RANKS = 128
"""From this many ranks on, default buckets overflow: the latency of a collective grows with the number of ranks."""


def size_text(nbytes: int) -> str:
    """A number of bytes for people, as ``"4.2 MiB"``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    return f"{nbytes / 1024:.1f} KiB" if nbytes < MIB else f"{nbytes / MIB:.1f} MiB"


@dataclass(frozen=True)
class ParamSpec:
    """The properties of one parameter that a layout depends on.

    Attributes:
        name: The parameter's qualified name, as in ``module.named_parameters()``.
        shape: Its shape.
        strides: Strides of its view, in elements: the parameter's own if it is dense.
        dtype: The gradient's dtype: the parameter's own unless ``Tensor.grad_dtype`` says otherwise.
        device: The device as a string, e.g. ``"cpu"`` or ``"cuda:0"``.
        param_dtype: The parameter's dtype if the gradient has another; else None.
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
        """The specification of ``param``."""
        strides = torch.empty_like(param.detach(), device="meta").stride()  # dense in any case
        dtype = param.grad_dtype or param.dtype
        param_dtype = None if dtype is param.dtype else param.dtype
        return cls(name, tuple(param.shape), strides, dtype, str(param.device), param_dtype)


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
class PlannedBucket:
    """A contiguous run of slots, reduced by one collective.

    Attributes:
        buffer: Index of its buffer in ``Layout.buffers``.
        start: First element.
        stop: One past the last element, padding included.
        slots: Indices into ``Layout.slots``, in the order in which gradients are expected.
        whole: Whether shards are cut between slots, so that no slot is divided.
        room: Number of elements behind it, for the control vector of passes in which it is the last bucket.
    """

    buffer: int
    start: int
    stop: int
    slots: tuple[int, ...]
    whole: bool = False
    room: int = 0

    @property
    def numel(self) -> int:
        """Number of elements, padding included and the room behind it not."""
        return self.stop - self.start


@dataclass(frozen=True)
class BufferSpec:
    """One gradient buffer: a device (as a string), a dtype and a number of elements."""

    device: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Layout:
    """Slots, buckets, and the buffers that the buckets tile.

    Attributes:
        slots: One per parameter, in the order of the specifications.
        buckets: In launch order: every rank launches bucket *k* before bucket *k + 1*.
        buffers: One per (device, dtype); :meth:`followed_by` adds others.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[PlannedBucket, ...]
    buffers: tuple[BufferSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(self.bucket_nbytes(bucket) for bucket in self.buckets)

    def bucket_nbytes(self, bucket: PlannedBucket) -> int:
        """Bytes of one bucket, padding included."""
        return bucket.numel * self.buffers[bucket.buffer].dtype.itemsize

    def with_room(self, room: int, behind: Collection[int]) -> Layout:
        """This layout with ``room`` elements more behind some buckets; what follows them stays aligned."""
        slots, buckets, moved = [*self.slots], [*self.buckets], [0] * len(self.buffers)
        for index, bucket in enumerate(self.buckets):
            by, own = moved[bucket.buffer], room if index in behind else 0
            for slot in bucket.slots:
                slots[slot] = replace(slots[slot], offset=slots[slot].offset + by)
            buckets[index] = replace(bucket, start=bucket.start + by, stop=bucket.stop + by, room=own)
            moved[bucket.buffer] += own + -own % ALIGNMENT_BYTES
        buffers = [replace(each, numel=each.numel + by) for each, by in zip(self.buffers, moved, strict=True)]
        return Layout(tuple(slots), tuple(buckets), tuple(buffers))

    def followed_by(self, later: Layout) -> Layout:
        """This layout, and behind it the slots of another one, in buckets and buffers of their own."""
        slots, buffers = len(self.slots), len(self.buffers)
        moved_slots = [replace(slot, buffer=slot.buffer + buffers) for slot in later.slots]
        moved_buckets = [
            replace(bucket, buffer=bucket.buffer + buffers, slots=tuple([slot + slots for slot in bucket.slots]))
            for bucket in later.buckets
        ]
        return Layout((*self.slots, *moved_slots), (*self.buckets, *moved_buckets), self.buffers + later.buffers)


def plan(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    bucket_cap_bytes: Sequence[int] = (),
    groups: Sequence[Hashable] | None = None,
    multiple: int = 1,
    world_size: int = 2,
    one_machine: bool = False,
    whole: Collection[int] = (),
    shards: int = 1,
    levels: int = 1,
) -> Layout:
    """Lay parameters out in the order in which their gradients become ready.

    Args:
        specs: The parameters, in any fixed order.
        order: Indices into ``specs``, earliest gradient first; each index once.
        bucket_cap_bytes: Largest size of each bucket in bytes; the last one holds for all further buckets. A larger
            parameter has a bucket of its own, and one of more than half ends its bucket, so that it need not wait for
            the small ones of the next layer. Empty: :func:`default_bucket_cap`, with small buckets at both ends; from
            :data:`MANY_RANKS` on, the others take parameters until they reach it, as torch DDP's do. On one machine
            without accelerators all alike, as collectives take processors away from the computation there, and little
            is hidden behind it.
        groups: One key per parameter. Parameters with different keys never share a bucket.
        multiple: Each bucket's number of elements is a multiple of this.
        world_size: Number of ranks, for the default cap.
        one_machine: Whether they share one machine, for the default.
        whole: Indices of parameters that no shard may divide. They share buckets with each other only.
        shards: Number of shards of each bucket. ``multiple`` is a multiple of it.
        levels: In how many levels buckets are reduced, for the default cap.

    Returns:
        The layout. Its buckets are sorted by when their last gradient is expected.
    """
    position = {slot: at for at, slot in enumerate(order)}
    assert sorted(order) == list(range(len(specs))), f"expected each of {len(specs)} parameters once, found {order}"
    sizes = [_padded(spec) * spec.dtype.itemsize for spec in specs]
    cut: Callable[[list[int], Sequence[int], Sequence[int]], list[list[int]]] = _cut_by_size
    caps = bucket_cap_bytes
    if not caps:
        caps = [default_bucket_cap(sum(spec.nbytes for spec in specs), world_size, one_machine, levels)]
        if not (one_machine and all(spec.device == "cpu" for spec in specs)):
            cut = partial(_cut_with_small_ends, overflow=world_size >= MANY_RANKS)
    together: defaultdict[Hashable, list[int]] = defaultdict(list)
    for slot in order:
        together[specs[slot].device, specs[slot].dtype, groups and groups[slot], slot in whole].append(slot)
    members: list[list[int]] = []
    for run in together.values():
        if run[0] in whole:  # room for as many of the largest one as there are shards, else much would be padding
            members += _cut_by_size(run, sizes, [max(caps[-1], shards * max(sizes[slot] for slot in run))])
        else:
            members += cut(run, sizes, caps)

    filled: dict[tuple[str, torch.dtype], int] = {}  # elements of each buffer
    slots: dict[int, Slot] = {}
    buckets: list[PlannedBucket] = []
    for bucket in sorted(members, key=lambda slots: position[slots[-1]]):
        key = specs[bucket[0]].device, specs[bucket[0]].dtype
        start = filled.setdefault(key, 0)
        buffer, divided = list(filled).index(key), bucket[0] not in whole
        places, numel = _in_order(bucket, specs, multiple) if divided else _in_shards(bucket, specs, multiple, shards)
        for slot, place in places.items():
            slots[slot] = Slot(specs[slot], buffer, start + place)
        filled[key] += numel
        buckets.append(PlannedBucket(buffer, start, filled[key], tuple(bucket), whole=not divided))
    buffers = tuple(BufferSpec(device, dtype, numel) for (device, dtype), numel in filled.items())
    return Layout(tuple(slots[index] for index in range(len(specs))), tuple(buckets), buffers)


def default_bucket_cap(total_bytes: int, world_size: int, one_machine: bool, levels: int = 1) -> int:
    """The default bucket size in bytes.

    On one machine backward leaves little communication to wait for, and each collective costs processor time. In two
    levels a bucket takes three collectives instead of one.

    Args:
        total_bytes: Of all gradients.
        world_size: Number of ranks.
        one_machine: Whether they share one machine.
        levels: In how many levels buckets are reduced.

    Returns:
        25 MiB on one machine. On several 1/32 of the total for two ranks, 1/16 for four, 1/11 for eight, and so on
        with the logarithm of their number; in two levels twice as much; up to 1/4, and from 4 to 25 MiB.
    """
    if one_machine:
        return MAX_DEFAULT_BUCKET_BYTES
    hops = max(1, (world_size - 1).bit_length())
    count = max(MIN_DEFAULT_BUCKET_COUNT, round(DEFAULT_BUCKET_COUNT / hops / levels))
    return max(MIN_DEFAULT_BUCKET_BYTES, min(MAX_DEFAULT_BUCKET_BYTES, total_bytes // count))


def _padded(spec: ParamSpec) -> int:
    """The parameter's number of elements, rounded up to the alignment."""
    per_line = max(1, ALIGNMENT_BYTES // spec.dtype.itemsize)
    return -(-spec.numel // per_line) * per_line


def _in_order(slots: Sequence[int], specs: Sequence[ParamSpec], multiple: int) -> tuple[dict[int, int], int]:
    """Places of slots in their bucket, one behind the other, and the bucket's number of elements."""
    places, numel = {}, 0
    for slot in slots:
        places[slot] = numel
        numel += _padded(specs[slot])
    return places, numel + -numel % multiple


def _in_shards(
    slots: Sequence[int], specs: Sequence[ParamSpec], multiple: int, shards: int
) -> tuple[dict[int, int], int]:
    """Places of slots in their bucket, each in one shard, and the bucket's number of elements.

    Shards are as long as the fullest one. The slot that costs most goes first, to the shard that has least to do. To
    orthogonalise a matrix takes its number of elements times its shorter side, in multiplications.
    """
    cost = {slot: specs[slot].numel * min(specs[slot].shape, default=1) for slot in slots}
    work, filled = [0] * shards, [0] * shards
    at: dict[int, tuple[int, int]] = {}
    for slot in sorted(slots, key=lambda slot: -cost[slot]):
        shard = min(range(shards), key=lambda shard: (work[shard], filled[shard]))
        at[slot] = shard, filled[shard]
        work[shard] += cost[slot]
        filled[shard] += _padded(specs[slot])
    numel = max(filled) * shards
    numel += -numel % multiple
    return {slot: shard * (numel // shards) + place for slot, (shard, place) in at.items()}, numel


def _cut_by_size(
    slots: list[int], sizes: Sequence[int], caps: Sequence[int], overflow: bool = False
) -> list[list[int]]:
    """Cut slots into runs by their sizes; the last cap holds for all further runs.

    A run is at most as large as its cap. A larger slot stands alone, and one of more than half of the cap ends its run.
    With ``overflow`` a run ends when it has reached its cap.
    """
    runs: list[list[int]] = []
    cap = room = -1
    for slot in slots:
        if not runs or (room <= 0 if overflow else sizes[slot] > room):
            room = cap = caps[min(len(runs), len(caps) - 1)]
            runs.append([])
        runs[-1].append(slot)
        ends = sizes[slot] > cap / 2 and not overflow
        room = -1 if ends else room - sizes[slot]
    return runs


def _cut_with_small_ends(
    slots: list[int], sizes: Sequence[int], caps: Sequence[int], overflow: bool
) -> list[list[int]]:
    """Cut slots into runs of the first cap, and of at most a quarter of it at both ends.

    A small first bucket starts the wire early. The last bucket is what remains to be sent after backward.
    """
    edge = [caps[0] // 4]
    if sum(sizes[slot] for slot in slots) <= 2 * edge[0]:
        return [slots]
    head = _cut_by_size(slots, sizes, edge)[0]
    rest = slots[len(head) :]
    tail = [run[::-1] for run in _cut_by_size(rest[::-1], sizes, edge)[:1]]
    middle = rest[: len(rest) - sum(map(len, tail))]
    return [head, *_cut_by_size(middle, sizes, caps, overflow), *tail]
