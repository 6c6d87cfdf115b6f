"""What is gloo's alone: better ways for CPU ranks than gloo's own collectives.

gloo's all-reduce and all-gather take several rounds, each as long as the latency of the network. Its reduce-scatter
takes longer than its all-reduce. Its one thread per device reads a message to its end before it writes again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import starmap

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.work import Handle, Handles, Stage, Stages, Work

SHORT_BYTES = 256 * 1024
"""Ranks send each other everything at once if that is at most so many bytes on each rank. More would be sent than by
gloo's own collectives, in one round."""

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
    plain = Collectives(process_group)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(plain.group).split(","))
    return GlooCollectives(process_group) if backends.get(device.type) == "gloo" else plain


class GlooCollectives(Collectives):
    """Collectives of a group with gloo as its backend."""

    def end_parts_with(self, owner: object) -> None:
        """Destroy the parts with ``owner``: nobody waits for that, and gloo's threads would stay."""
        weakref.finalize(owner, self.end_parts).atexit = False

    def averages(self, dtype: torch.dtype) -> bool:
        """Whether gloo is to divide. For the exact dtypes it would, in a second walk through memory: packing does."""
        return dtype not in (torch.float32, torch.float64) and super().averages(dtype)

    def reduce_scatter(self, flat: Tensor, pack: wire.Pack, wire_dtype: torch.dtype | None = None) -> Stages:
        """By all-to-alls, and sums in fp32 at least."""
        if self._nothing_to_do(flat) or self._travels_in(wire_dtype, flat):
            yield from super().reduce_scatter(flat, pack, wire_dtype)
            return
        pack()
        shard = wire.real(self.shard(flat))
        sent = wire.real(self._padded(flat))
        in_place = sent.dtype is torch.float32 and sent.data_ptr() == flat.data_ptr()
        received, handle = self._exchange(sent, with_own=not in_place)
        yield Stage(handle, (sent, received))
        if in_place:
            _average_with_others(shard, received, self.rank, self.world_size)
        else:
            self._average(received, shard)

    def _average(self, received: Tensor, out: Tensor) -> None:
        """As on any backend. Here one sum after the other is faster than ``torch.sum``."""
        first, *others = received.view(self.world_size, -1)[:, : out.numel()]
        total = first.to(torch.promote_types(received.dtype, torch.float32), copy=True)
        for part in others:
            total.add_(part)
        out.copy_(total.mul_(1.0 / self.world_size))

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
        if flat.nbytes <= SHORT_BYTES:
            return self.group.all_to_all_single(flat, torch.cat([mine] * self.world_size), [], [])
        if not self._in_pieces(flat):
            return super()._gather(flat)
        parts = [part.split(PIECE_BYTES // flat.element_size()) for part in flat.view(self.world_size, -1)]
        return Handles([
            dist.all_gather(list(pieces), pieces[self.rank], group=self.group, async_op=True)
            for pieces in zip(*parts, strict=True)
        ])  # fmt: skip

    def _exchange(self, sent: Tensor, with_own: bool) -> tuple[Tensor, Handle]:
        way = _in_pieces if self._in_pieces(sent) else _in_one
        received, exchanges = way(sent, self.rank, self.world_size, with_own)
        return received, Handles([*starmap(self.group.all_to_all_single, exchanges)])

    def _in_pieces(self, flat: Tensor) -> bool:
        """Whether what each rank gets of ``flat`` travels in pieces."""
        return flat.nbytes > self.world_size * LONG_BYTES


_CACHED_NUMEL = 65536
"""Elements that several operations work on before the next ones: 256 KiB of fp32, which stay in the cache."""

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
    step = PIECE_BYTES // sent.element_size()
    exchanges: list[_Exchange] = []
    for shift in range(1, world_size):
        target, source = (rank + shift) % world_size, (rank - shift) % world_size
        for piece, into in zip(targets[target].split(step), sources[source].split(step), strict=True):
            counts = [[len(piece) * (rank == other) for rank in range(world_size)] for other in (source, target)]
            exchanges.append((into, piece, *counts))
    return received, exchanges


def _average_with_others(shard: Tensor, received: Tensor, rank: int, world_size: int) -> None:
    """Replace a rank's shard by its mean with the others' parts.

    Args:
        shard: 1-D.
        received: The parts that arrived, perhaps with the rank's own; see :func:`_in_one`.
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
