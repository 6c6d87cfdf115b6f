"""What is gloo's alone: better ways for CPU ranks than gloo's own collectives.

gloo's all-reduce and all-gather take several rounds, each as long as the latency of the network. Its reduce-scatter
takes longer than its all-reduce. Its one thread per device reads a message to its end before it writes again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import starmap

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.work import Handle, Handles, Stage, Stages, Work

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

    def split(self, members: Sequence[Sequence[int]], backend: str | None = None) -> Collectives:
        """As on any backend. And wait until all ranks have connected: the subgroup may be destroyed at once."""
        subgroup = super().split(members, backend)
        subgroup.all_reduce_sum(torch.zeros(1)).wait()
        return subgroup

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
        self._average(received, wire.real(self.shard(flat)))

    def _average(self, received: Tensor, out: Tensor) -> None:
        """As on any backend. Here one sum after the other is faster than ``torch.sum``.

        Args:
            received: The parts that have arrived, perhaps without this rank's own, which is in ``out`` then.
            out: For the mean.
        """
        without_own = received.numel() < self.world_size * out.numel()
        parts = [part[: out.numel()] for part in received.view(self.world_size - without_own, -1)]
        if without_own:
            parts.insert(self.rank, out)
        for start in range(0, out.numel(), _CACHED_NUMEL):  # in stretches short enough for caches
            first, *others = (part[start : start + _CACHED_NUMEL] for part in parts)
            total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
            for other in others:
                total.add_(other)
            out[start : start + _CACHED_NUMEL].copy_(total.mul_(1.0 / self.world_size))

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
