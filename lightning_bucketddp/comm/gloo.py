"""What is gloo's alone: better ways for CPU ranks than gloo's own collectives.

gloo's all-reduce and all-gather take several rounds, each as long as the latency of the network. Its reduce-scatter
takes longer than its all-reduce. Its one thread per device reads a message to its end before it writes again. Inside a
node, too, it sends through sockets: the system copies each byte twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import starmap

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.shared_memory import shared_memory
from lightning_bucketddp.comm.work import FutureHandle, Handle, Handles, Stage, Stages, Work, wait_for

SHORT_BYTES = 256 * 1024
"""Up to this many bytes per rank, ranks send each other everything at once. These are more bytes than gloo's own
collectives send, but in one round."""

LONG_BYTES = 2 * 1024 * 1024
"""Longer messages from one rank to another travel in pieces.

Of two long messages that ranks send each other, one may wait for the other. In pieces, both directions of the link are
in use. Shorter messages fit into the sockets' buffers, and pieces would cost more than they bring.
"""

PIECE_BYTES = 512 * 1024
"""Length of a piece."""


def collectives_of(process_group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """The collectives of a group, for tensors of a device.

    Args:
        process_group: The group; None for the default one.
        device: The device whose tensors travel.
    """
    plain = Collectives(process_group, device)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(plain.group).split(","))
    return GlooCollectives(process_group, device) if backends.get(device.type) == "gloo" else plain


def end_subgroups_with(owner: object, collectives: Collectives) -> None:
    """Destroy the subgroups of a group when ``owner`` is garbage, if it is gloo's: gloo's threads would stay.

    Nobody waits for that on gloo. On other backends ranks would have to do so at the same time.
    """
    if isinstance(collectives, GlooCollectives):
        weakref.finalize(owner, collectives.end_subgroups).atexit = False


class GlooCollectives(Collectives):
    """Collectives of a group with gloo as its backend.

    Wrappers have subgroups of their own, as threads of each start collectives there, in an order of their own.
    """

    _by_gloo = True

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        super().__init__(process_group, device)
        self._spare: list[Tensor] = []  # of bytes; as many as messages have been under way at once

    def split(self, members: Sequence[Sequence[int]], backend: str | None = None) -> Collectives:
        """As on any backend. And wait until all ranks have connected: the subgroup may be destroyed at once."""
        subgroup = super().split(members, backend)
        subgroup.all_reduce_sum(torch.zeros(1)).wait()
        return subgroup

    def split_by_node(self, members: Sequence[Sequence[int]]) -> Collectives:
        """Make subgroups of ranks that share a node. They read each other's memory where the system lets them."""
        subgroup = self.split(members)
        memory = shared_memory(_FIRST_BYTES * subgroup.world_size, subgroup.exchange_objects, subgroup.rank == 0)
        return subgroup if memory is None else _NodeCollectives(subgroup, memory)

    def scale(self, dtype: torch.dtype) -> float | None:
        """As on any backend. But gloo divides exact dtypes in a second walk through memory: packing does, instead."""
        exact = self.world_size > 1 and dtype in (torch.float32, torch.float64)
        return 1.0 / self.world_size if exact else super().scale(dtype)

    def _scatter(self, flat: Tensor, pack: wire.Pack) -> Stages:
        """By all-to-alls, and sums in fp32 at least."""
        pack()
        sent = wire.real(wire.padded(flat, wire.shard_length(flat, self.world_size) * self.world_size))
        in_place = sent.dtype is torch.float32 and sent.data_ptr() == flat.data_ptr()
        received, handle = self._exchange(sent, with_own=not in_place)
        yield Stage(handle, (sent, received))
        shard = wire.real(self.shard(flat))
        self._average(received.view(-1, sent.numel() // self.world_size)[:, : shard.numel()], shard)

    def _average(self, parts: Tensor, out: Tensor) -> None:
        """As on any backend, added up in the ranks' order. This rank's own part may be in ``out`` instead."""
        rows, in_place = list(parts), out.dtype is torch.promote_types(parts.dtype, torch.float32)
        if len(rows) < self.world_size:
            rows.insert(self.rank, out)
            in_place = False
        for start in range(0, out.numel(), _CACHED_NUMEL):  # in stretches short enough for caches
            stretch, *of_ranks = (row[start : start + _CACHED_NUMEL] for row in (out, *rows))
            total = (
                stretch if in_place else torch.empty_like(stretch, dtype=torch.promote_types(out.dtype, torch.float32))
            )
            first, second, *others = of_ranks
            torch.add(first.to(total.dtype), second, out=total)
            for other in others:
                total.add_(other)
            total.mul_(1.0 / self.world_size)
            if not in_place:
                stretch.copy_(total)

    def sum(self, tensor: Tensor, pack: Callable[[], None] | None = None) -> Stages:
        """Replace ``tensor`` by its sum. If it is short, each rank sends it to all others and adds up by itself."""
        if self._nothing_to_do(tensor) or tensor.nbytes * self.world_size > SHORT_BYTES:
            yield from super().sum(tensor, pack)
            return
        if pack is not None:
            pack()
        values = wire.real(tensor.view(-1))
        sent = torch.stack([values] * self.world_size)
        received = torch.empty_like(sent)
        yield Stage(self.group.all_to_all_single(received, sent, [], []))
        torch.sum(received, 0, dtype=values.dtype, out=values)

    def all_gather_shards(self, flat: Tensor) -> Work:
        """As on any backend, for every dtype that torch has."""
        return super().all_gather_shards(flat.view(torch.uint8))

    def _gather(self, flat: Tensor) -> Handle:
        mine = self.shard(flat)
        if self.world_size == 2:  # gloo's all-gather receives into memory of its own, and copies
            other = 1 - self.rank
            theirs = flat.view(2, -1)[other]
            pieces = _pieces(mine, theirs, other, other, 2, PIECE_BYTES if self._in_pieces(flat) else mine.nbytes)
            return Handles([*starmap(self.group.all_to_all_single, pieces)])
        if flat.nbytes <= SHORT_BYTES:
            return self.group.all_to_all_single(flat, torch.cat([mine] * self.world_size), [], [])
        if not self._in_pieces(flat):
            return super()._gather(flat)
        parts = [part.split(PIECE_BYTES // flat.element_size()) for part in flat.view(self.world_size, -1)]
        return Handles([
            dist.all_gather(list(pieces), pieces[self.rank], group=self.group, async_op=True)
            for pieces in zip(*parts, strict=True)
        ])  # fmt: skip

    @contextmanager
    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """As on any backend, but used again: the system takes freed memory back, and clears pages that it gives."""
        nbytes = numel * dtype.itemsize
        memory = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
        if memory.numel() < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        try:
            yield memory[:nbytes].view(dtype)
        finally:
            self._spare.append(memory)

    def _exchange(self, sent: Tensor, with_own: bool) -> tuple[Tensor, Handle]:
        way = _in_pieces if self._in_pieces(sent) else _in_one
        received, exchanges = way(sent, self.rank, self.world_size, with_own)
        return received, Handles([*starmap(self.group.all_to_all_single, exchanges)])

    def _in_pieces(self, flat: Tensor) -> bool:
        """Whether what each rank gets of ``flat`` travels in pieces."""
        return flat.nbytes > self.world_size * LONG_BYTES


class _NodeCollectives(GlooCollectives):
    """Collectives of ranks that share a node: shards travel through memory.

    Each rank has two slots there, which messages use in turn. It writes into its own, meets the others, and reads::

        slot of rank 0   | . . | . . |     reduce-scatter: rank 1 averages the second parts of all slots
        slot of rank 1   | . . | . . |     all-gather: each slot has one part, and ranks copy the others'

    A rank meets the others when it has read the message before. So when they have met, the slots of the message before
    are free for the next one. The messages of a group start in one order, on every rank.

    Args:
        subgroup: The collectives of these ranks through sockets.
        memory: The memory that they share.
    """

    def __init__(self, subgroup: Collectives, memory: Tensor) -> None:
        super().__init__(subgroup.group, subgroup.device)
        self._backend_averages, self.made_of = subgroup._backend_averages, subgroup.made_of
        self._slots, self._turn = self._cut(memory), 0
        self._met: Handle = Handles(())
        self._read = torch.futures.Future[None]()  # the last message
        self._read.set_result(None)

    def _cut(self, memory: Tensor) -> Tensor:
        """Two slots for each rank: (2, ranks, bytes)."""
        return memory.view(2, self.world_size, -1)

    def _message(self, nbytes: int, write: Callable[[Tensor], object], read: Callable[[Tensor], object]) -> Stages:
        """Exchange a message.

        Args:
            nbytes: Its length, the same on all ranks.
            write: Writes it into this rank's slot.
            read: Reads the slots (ranks, bytes).
        """
        wait_for(self._met)
        if nbytes > self._slots.shape[-1]:
            self._slots = self._cut(self._larger(2 * self.world_size * nbytes))
        self._turn = 1 - self._turn
        slots = self._slots[self._turn, :, :nbytes]
        write(slots[self.rank])
        before, self._read = self._read, torch.futures.Future[None]()
        wait_for(FutureHandle(before))
        before.wait()
        done, nothing = self._read, torch.zeros(1, dtype=torch.uint8)
        self._met = self.group.allreduce([nothing])  # takes a third of the processor time of gloo's all-to-all
        yield Stage(self._met, (nothing,))
        read(slots)
        done.set_result(None)

    def _larger(self, nbytes: int) -> Tensor:
        memory = shared_memory(nbytes, self.exchange_objects, self.rank == 0)
        if memory is None:
            raise RuntimeError(
                f"place {self.rank} on its node: expected {nbytes} bytes of memory that all of its ranks can open, "
                "found none, though there was some before; hierarchical=False needs none"
            )
        return memory

    def _scatter(self, flat: Tensor, pack: wire.Pack) -> Stages:
        """In memory. The length is a multiple of the number of ranks."""
        values, mean = wire.real(flat), wire.real(self.shard(flat))

        def write(slot: Tensor) -> None:
            if flat.is_complex():
                pack()
                slot.view(values.dtype).copy_(values)
            else:
                pack(memory=slot.view(flat.dtype))

        def read(slots: Tensor) -> None:
            self._average(slots.view(values.dtype).unflatten(1, (self.world_size, -1))[:, self.rank], mean)

        return self._message(flat.nbytes, write, read)

    def gather(self, flat: Tensor) -> Stages:
        """In memory."""
        parts = flat.view(torch.uint8).view(self.world_size, -1)
        mine = parts[self.rank]

        def read(slots: Tensor) -> None:
            for place, slot in enumerate(slots):
                if place != self.rank:
                    parts[place].copy_(slot)

        return self._message(len(mine), lambda slot: slot.copy_(mine), read)


_FIRST_BYTES = 64
"""Memory per rank until the first message, which is longer."""

_CACHED_NUMEL = 262144
"""Elements that several operations work on before the next ones: 1 MiB of fp32, which stays in the cache."""

_Exchange = tuple[Tensor, Tensor, list[int], list[int]]
"""Output and input of an all-to-all, and how much of each belongs to each rank."""


def _in_one(sent: Tensor, rank: int, world_size: int, with_own: bool) -> tuple[Tensor, list[_Exchange]]:
    """The all-to-all of :meth:`Collectives._exchange`, and memory for the parts that arrive."""
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


def _in_pieces(sent: Tensor, rank: int, world_size: int, with_own: bool) -> tuple[Tensor, list[_Exchange]]:
    """As :func:`_in_one`, by several all-to-alls: in each a rank sends one piece, and receives one from another."""
    targets = sent.view(world_size, -1)
    received = sent.new_empty(targets[0 if with_own else 1 :].numel())
    sources = list(received.view(-1, targets.shape[1]))
    if with_own:
        sources[rank].copy_(targets[rank])
    else:
        sources.insert(rank, targets[rank])
    exchanges: list[_Exchange] = []
    for shift in range(1, world_size):
        target, source = (rank + shift) % world_size, (rank - shift) % world_size
        exchanges += _pieces(targets[target], sources[source], target, source, world_size, PIECE_BYTES)
    return received, exchanges


def _pieces(
    sent: Tensor, received: Tensor, target: int, source: int, world_size: int, nbytes: int
) -> Iterator[_Exchange]:
    """All-to-alls in which this rank sends to one rank, and receives as much from one, in pieces of ``nbytes``."""
    step = nbytes // sent.element_size()
    for piece, into in zip(sent.split(step), received.split(step), strict=True):
        counts = [[len(piece) * (rank == other) for rank in range(world_size)] for other in (source, target)]
        yield (into, piece, *counts)
