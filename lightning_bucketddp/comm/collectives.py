"""The collectives of one process group. What differs per backend is decided here, once."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.groups import timeout_of
from lightning_bucketddp.comm.work import Handle, Handles, Work

_AVERAGED_BY_THE_BACKEND = (torch.float32, torch.float64, torch.bfloat16)

_most_groups = 0
"""The largest number after which torch has named such a group; see :func:`_equally_many_groups`."""

_left_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class Collectives:
    """Collectives of one process group. Each starts, and returns the :class:`Work` to wait for.

    Most are the group's own methods. torch's functions around them cost small steps some percent.

    Args:
        process_group: The group; None for the default one.
        owned: Whether :meth:`end` destroys the group.
        averages: Whether the backend is known to have ``ReduceOp.AVG``; else see :meth:`probe`.

    Attributes:
        group: The process group.
        rank: This process's rank in it.
        world_size: How many ranks it has.
        second: A group of the same ranks for the second stages of low-precision all-reduces; None if there is none.
        apart: A group of the same ranks for collectives that a thread starts; None if there is none.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialised.
        ValueError: If this process is not in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, owned: bool = False, averages: bool = False) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "expected torch.distributed to be initialised, found no default process group; call "
                "torch.distributed.init_process_group() first (a Trainer with strategy='bucketddp' does)"
            )
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.group: dist.ProcessGroup = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"process {dist.get_rank()} is not a member of the process group it was given")
        self.world_size = dist.get_world_size(group)
        self.second: Collectives | None = None
        self.apart: Collectives | None = None
        self._of: Collectives | None = None
        self._owned, self._backend_averages = owned, averages
        backends = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._on_gloo = {device for device, backend in backends if backend == "gloo"}

    # -- the group -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The group's name: the same on all its ranks, and another on each group of the same store.

        torch numbers groups, and starts again after ``destroy_process_group()``. Their members tell such groups apart.
        """
        members = hashlib.sha256(repr(dist.get_process_group_ranks(self.group)).encode()).hexdigest()
        return f"{self.group.group_name}/{members[:16]}"

    def is_default(self) -> bool:
        """Whether the group is the default one, of all processes."""
        return self.group is dist.group.WORLD

    def store(self, prefix: str) -> Store:
        """The group's key-value store, with ``prefix`` before every key."""
        return PrefixStore(prefix, self.group.get_group_store())

    def leave_behind(self, why: str) -> None:
        """Note that collectives are under way which some ranks will never join.

        The next collectives of those ranks would be paired with them.

        Args:
            why: What happened.
        """
        for it in (self, self.second, self.apart):
            if it is not None:
                _left_behind[it.group] = why
        if self._of is not None:
            self._of.leave_behind(why)

    def require_nothing_left_behind(self) -> None:
        """Require that no collectives of a failed pass are under way.

        Raises:
            RuntimeError: If some are.
        """
        why = _left_behind.get(self.group)
        if why is not None:
            raise RuntimeError(
                "expected a process group without unfinished collectives, found one that was given up after a failure "
                f"({why}); start the processes anew, or make a new group"
            )

    def split(self, parts: Sequence[Sequence[int]]) -> Collectives:
        """Make groups of some of the ranks, and return this rank's. All ranks must call this.

        Args:
            parts: Per group, its ranks within this one. Every rank is in one of them.
        """
        everyone, of_all = dist.get_process_group_ranks(self.group), self.is_default()
        mine: dist.ProcessGroup | None = None
        options: dict[str, Any] = {"timeout": timeout_of(self.group), "use_local_synchronization": not of_all}
        with nullcontext() if of_all else _equally_many_groups(self):
            for part in parts:
                if of_all or self.rank in part:  # within the default group, every process has to help with every part
                    made = dist.new_group([everyone[it] for it in part], **options)
                    mine = made if self.rank in part else mine
        assert mine is not None
        # A part of another group is never destroyed: torch would use its name again, and find under this name what
        # its ranks have left in the store.
        return Collectives(mine, of_all, self._backend_averages)

    def again(self) -> Collectives:
        """Make another group of the same ranks, whose collectives may start at any time between those of this one.

        All ranks must call this. What is left behind in it counts as left behind in this one.
        """
        other = self.split([range(self.world_size)])
        other._of = self
        return other

    def end(self) -> None:
        """Destroy the group if it is owned and nothing is under way in it, and its other groups. Sends nothing."""
        for other in (self.second, self.apart):
            if other is not None:
                other.end()
        if self._owned and self.group not in _left_behind:
            self._owned = False
            with suppress(ValueError):  # it went with the default group
                dist.destroy_process_group(self.group)

    # -- means ---------------------------------------------------------------------------------------

    def probe(self, device: torch.device) -> None:
        """Find out whether the backend knows ``ReduceOp.AVG``. All ranks must call this, before any mean.

        Args:
            device: The device whose tensors travel.

        Raises:
            RuntimeError: From the backend, when a peer is gone or the time is up.
        """
        if self.world_size == 1:
            return
        value = torch.full((1,), float(self.rank), device=device)
        try:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=self.group)
        except (RuntimeError, ValueError) as error:
            if "AVG" not in str(error):
                raise
            return  # refused by name, on every rank alike
        self._backend_averages = value.item() == (self.world_size - 1) / 2

    def divisor_before(self, dtype: torch.dtype, device: torch.device, wire_dtype: torch.dtype | None) -> int | None:
        """The divisor to apply while gradients are packed, where that spares a walk through memory.

        That is so on the CPU: gloo's own average divides everything in a second walk.

        Returns:
            The world size; None if :meth:`all_reduce_mean` divides.
        """
        if self.world_size == 1 or wire_dtype is not None or device.type != "cpu":
            return None
        return self.world_size if dtype in (torch.float32, torch.float64) else None

    def all_reduce_mean(
        self,
        flat: Tensor,
        wire_dtype: torch.dtype | None = None,
        divided: bool = False,
        sent: Tensor | None = None,
    ) -> Work:
        """Start replacing ``flat`` (1-D, floating or complex) by its mean over the ranks, in place.

        Args:
            flat: The tensor; contiguous.
            wire_dtype: bf16 or fp16: values travel in it and are summed in fp32. There are two stages, an all-to-all of
                shards and an all-gather of their means. All ranks end with the same bits. No effect on a tensor of
                less, or other, precision.
            divided: Whether the tensor has been divided by the world size.
            sent: What :func:`wire.memory` made, filled; ``flat`` is not read then.
        """
        if self._nothing_to_do(flat):
            return Work()
        flat = wire.real(flat)
        if wire_dtype is not None and wire.may_travel_in(wire_dtype, flat):
            if sent is None:
                sent = wire.padded(flat, wire.shard_length(flat, self.world_size) * self.world_size, wire_dtype)
            received, exchanges = self._exchanges(sent, with_own=True)
            handle = Handles([*starmap(self.group.all_to_all_single, exchanges)])
            return self._started(handle, None, flat).then(partial(self._gather_means, received, sent, flat))
        op = dist.ReduceOp.SUM if divided else self._averaging_op(flat)
        return self._started(self.group.allreduce([flat], op), None, flat)

    def _averaging_op(self, flat: Tensor) -> dist.ReduceOp.RedOpType:
        """The operation for a mean. Where the backend cannot average, ``flat`` is divided here.

        fp16 always is, before the sum: a sum of many ranks overflows at 65504.
        """
        if self._backend_averages and flat.dtype in _AVERAGED_BY_THE_BACKEND:
            return dist.ReduceOp.AVG
        flat.mul_(1.0 / self.world_size)
        return dist.ReduceOp.SUM

    def _gather_means(self, received: Tensor, sent: Tensor, flat: Tensor) -> Work:
        """Start the second stage of an all-reduce in low precision, in the memory that the first one has sent."""
        shard = self.shard(sent)
        if received.device.type != "cpu":  # its memory must not be used again before this stream has read it
            received.record_stream(torch.accelerator.current_stream(received.device))
        wire.mean_of_parts(received, self.world_size, shard)  # rounds: this rank keeps what the others get
        second = self.second or self
        return second._started(second._gather(sent), lambda: flat.copy_(sent[: flat.numel()]), flat)

    # -- shards --------------------------------------------------------------------------------------

    def shard(self, flat: Tensor) -> Tensor:
        """The part of ``flat`` (1-D) that is this rank's in a reduce-scatter.

        Shards have ``numel / world_size`` elements, rounded up. The last shards may be shorter or empty.
        """
        length = wire.shard_length(flat, self.world_size)
        return flat[self.rank * length : (self.rank + 1) * length]

    def reduce_scatter_mean(
        self,
        flat: Tensor,
        wire_dtype: torch.dtype | None = None,
        tail: Tensor | None = None,
        sent: Tensor | None = None,
    ) -> Work:
        """Start replacing this rank's :meth:`shard` of ``flat`` by its mean over the ranks, in place.

        The rest of ``flat`` means nothing afterwards.

        Args:
            flat: 1-D, floating or complex, contiguous; of any length.
            wire_dtype: As for :meth:`all_reduce_mean`; the shard itself is not rounded.
            tail: Travels along, and is replaced by its sum over the ranks. 1-D. ``flat`` is copied then. It has the
                same dtype, which is fp32 or fp64, and a multiple of the world size of elements.
            sent: As for :meth:`all_reduce_mean`.
        """
        if tail is None and self._nothing_to_do(flat):
            return Work()
        shard, whole = wire.real(self.shard(flat)), wire.real(flat)
        if tail is not None:
            sent = wire.parts_with_tail(whole, tail, self.world_size)
            received = torch.empty_like(sent)
            finish = partial(wire.mean_and_sum, received, shard, tail)
            return self._started(self.group.all_to_all_single(received, sent, [], []), finish, flat)
        numel = wire.shard_length(flat, self.world_size) * self.world_size * (whole.numel() // flat.numel())
        fits = whole.numel() == numel
        dtype = wire_dtype if wire_dtype is not None and wire.may_travel_in(wire_dtype, whole) else whole.dtype
        if dtype is whole.dtype is not wire_dtype and flat.device.type not in self._on_gloo:
            sent = whole if fits else wire.padded(whole, numel, dtype)
            mean = sent.new_empty(numel // self.world_size)
            op = self._averaging_op(sent)
            handle = dist.reduce_scatter_single(mean, sent, op=op, group=self.group, async_op=True)
            return self._started(handle, lambda: shard.copy_(mean[: shard.numel()]), flat)
        # By all-to-alls: gloo's own reduce-scatter takes longer than its all-reduce.
        exact = dtype is whole.dtype is torch.float32 and fits
        if sent is None:
            sent = whole if exact else wire.padded(whole, numel, dtype)
        received, exchanges = self._exchanges(sent, with_own=not exact)
        handle = Handles([*starmap(self.group.all_to_all_single, exchanges)])
        if exact:
            finish = partial(wire.average_with_others, shard, received, self.rank, self.world_size)
        else:
            finish = partial(wire.mean_of_parts, received, self.world_size, shard)
        return self._started(handle, finish, flat)

    def all_gather_shards(self, flat: Tensor) -> Work:
        """Start filling ``flat`` with every rank's :meth:`shard` of it, in place.

        Args:
            flat: 1-D, contiguous; its length is a multiple of the world size.
        """
        if self._nothing_to_do(flat):
            return Work()
        values = flat.view(torch.uint8) if flat.device.type == "cpu" else wire.real(flat)
        return self._started(self._gather(values), None, flat)

    def _gather(self, flat: Tensor) -> Handle:
        """Start filling ``flat`` with every rank's shard, where all shards have one length."""
        mine = self.shard(flat)
        if _at_once(flat, flat.nbytes, self._on_gloo):
            return self.group.all_to_all_single(flat, torch.cat([mine] * self.world_size), [], [])
        if not _in_pieces(flat, self.world_size, self._on_gloo):
            return dist.all_gather_single(flat, mine, group=self.group, async_op=True)
        parts = [part.split(wire.PIECE_BYTES // flat.element_size()) for part in flat.view(self.world_size, -1)]
        start = partial(dist.all_gather, group=self.group, async_op=True)
        return Handles([start(list(pieces), pieces[self.rank]) for pieces in zip(*parts, strict=True)])

    def _exchanges(self, sent: Tensor, with_own: bool) -> tuple[Tensor, list[wire.Exchange]]:
        way = wire.in_pieces if _in_pieces(sent, self.world_size, self._on_gloo) else wire.in_one
        return way(sent, self.rank, self.world_size, with_own)

    # -- sums and copies -----------------------------------------------------------------------------

    def all_reduce_sum(self, tensor: Tensor) -> Work:
        """Start replacing ``tensor`` by its sum over the ranks, in place.

        If it is short, each rank sends it to all others and adds up by itself.
        """
        if self._nothing_to_do(tensor):
            return Work()
        if _at_once(tensor, tensor.nbytes * self.world_size, self._on_gloo):
            values = wire.real(tensor.view(-1))
            sent = torch.stack([values] * self.world_size)
            received = torch.empty_like(sent)
            add_up = partial(torch.sum, received, 0, dtype=values.dtype, out=values)
            return self._started(self.group.all_to_all_single(received, sent, [], []), add_up, tensor)
        return self._started(self.group.allreduce([tensor], dist.ReduceOp.SUM), None, tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        """Start replacing ``tensor`` by the one of the group's rank ``source``, in place."""
        if self._nothing_to_do(tensor):
            return Work()
        return self._started(self.group.broadcast(tensor, source), None, tensor)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Work]:
        """Start gathering every rank's ``tensor``; shape and dtype are the same on all ranks.

        Returns:
            A tensor of shape ``(world size, *tensor.shape)``, by rank, and the work to wait for before it is read.
        """
        if self._nothing_to_do(tensor):
            return tensor.expand(self.world_size, *tensor.shape), Work()
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        handle = dist.all_gather_single(gathered.view(-1), tensor.reshape(-1), group=self.group, async_op=True)
        return gathered, self._started(handle, None, tensor)

    def exchange_objects(self, mine: Any, poll: Callable[[], None] | None = None) -> list[Any]:
        """Exchange objects, pickled, and return every rank's, by rank.

        Args:
            mine: This rank's.
            poll: As for :meth:`Work.wait`. No effect where the backend sends nothing from the CPU.
        """
        if self.world_size == 1:
            return [mine]
        if "cpu" not in self._on_gloo:
            found: list[Any] = [None] * self.world_size
            dist.all_gather_object(found, mine, group=self.group)
            return found
        packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes, work = self.all_gather(torch.tensor([len(packed)]))
        work.wait(poll)
        gathered, work = self.all_gather(wire.padded(packed, int(sizes.max()), torch.uint8))
        work.wait(poll)
        return [pickle.loads(it[: int(size)].numpy().tobytes()) for it, size in zip(gathered, sizes, strict=True)]

    def _nothing_to_do(self, tensor: Tensor) -> bool:
        return self.world_size == 1 or tensor.numel() == 0

    def _started(self, handle: Handle | None, finish: Callable[[], object] | None, tensor: Tensor) -> Work:
        return Work(handle, finish, tensor.device.type == "cpu", self.leave_behind)


@contextmanager
def _equally_many_groups(collectives: Collectives) -> Iterator[None]:
    """Have torch think that all ranks know equally many groups, and more than before.

    It names a group that only its members make after that number. Ranks may differ in it: in groups with others, and in
    when a dropped wrapper's groups are destroyed.
    """
    global _most_groups
    # Private; without it ranks with different numbers wait for each other, as a test notices.
    known: dict[Any, str] = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", {})
    _most_groups = max(collectives.exchange_objects(max(len(known), _most_groups) + 1))
    fillers = {object(): "no group" for _ in range(len(known), _most_groups)}
    known.update(fillers)
    try:
        yield
    finally:
        for filler in fillers:
            del known[filler]


def _at_once(tensor: Tensor, nbytes: int, on_gloo: Container[str]) -> bool:
    """Whether ranks send each other all of ``tensor`` at once, ``nbytes`` in all; see :data:`wire.SHORT_BYTES`."""
    return nbytes <= wire.SHORT_BYTES and tensor.device.type == "cpu" and "cpu" in on_gloo


def _in_pieces(flat: Tensor, world_size: int, on_gloo: Container[str]) -> bool:
    """Whether what each rank gets of ``flat`` travels in pieces; see :data:`wire.LONG_BYTES`."""
    long = flat.nbytes > world_size * wire.LONG_BYTES
    return long and flat.device.type == "cpu" and "cpu" in on_gloo
