"""The collectives of one process group, as any backend has them. :mod:`.gloo` knows better ways for gloo."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not in __all__

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.groups import belongs_to, timeout_of
from lightning_bucketddp.comm.wire import Pack
from lightning_bucketddp.comm.work import DirectWork, Handle, Stage, Stages, Work

_AVERAGED_BY_THE_BACKEND = (torch.float32, torch.float64, torch.bfloat16)

_most_groups = 0
"""The largest number after which torch has named such a group; see :func:`_equally_many_groups`."""

_left_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class Collectives:
    """Collectives of one process group.

    Each starts, and returns the :class:`Work` to wait for. Those of reductions return their stages, for a lane to run.
    Most are the group's own methods. torch's functions around them cost small steps some percent.

    Args:
        process_group: The group; None for the default one.
        parent: The collectives of the group of which this is a part; None if the user made the group. What is left
            behind in a part is left behind in the parent, and whoever aborts the parent's group aborts the part.

    Attributes:
        group: The process group.
        rank: This process's rank in it.
        world_size: How many ranks it has.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialised.
        ValueError: If this process is not in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, parent: Collectives | None = None) -> None:
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
        self._parent, self._parts = parent, list[Collectives]()
        self._of_stage: dict[int, Collectives] = {}
        self._backend_averages: bool = parent is not None and parent._backend_averages
        self._sends_from_cpu = "cpu:" in dist.get_backend_config(group)

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
        _left_behind[self.group] = why
        if self._parent is not None:
            self._parent.leave_behind(why)

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

    def split(self, parts: Sequence[Sequence[int]], backend: str | None = None) -> Collectives:
        """Make groups of some of the ranks, and return this rank's. All ranks must call this.

        Args:
            parts: Per group, its ranks within this one. Every rank is in one of them.
            backend: The groups' backend; the default group's if None.
        """
        everyone, timeout = dist.get_process_group_ranks(self.group), timeout_of(self.group)
        members = [[everyone[rank] for rank in part] for part in parts]
        if self.is_default():
            mine, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, backend=backend)
        else:  # the processes outside of this group know nothing of it
            own = next(part for part in members if everyone[self.rank] in part)
            with _equally_many_groups(self):
                mine = dist.new_group(own, timeout=timeout, backend=backend, use_local_synchronization=True)
        belongs_to(mine, self.group)
        part = type(self)(mine, parent=self)
        self._parts.append(part)
        return part

    def separate_stages(self, *numbers: int) -> None:
        """Give stages of reductions groups of their own, as several threads start them. All ranks must call this.

        Args:
            numbers: The stages, from 0.
        """
        for number in numbers:
            self._of_stage[number] = self.split([range(self.world_size)])

    def stage(self, number: int) -> Collectives:
        """The collectives for a stage of reductions: these ones, unless the stage has a group of its own."""
        return self._of_stage.get(number, self)

    def end_parts(self) -> None:
        """Destroy the groups that were made of this one, unless something is under way in them. Sends nothing.

        A part of another group than the default one stays: torch would use its name again, and find under this name
        what its ranks have left in the store.
        """
        for part in self._parts:
            part.end_parts()
            if self.is_default() and part.group not in _left_behind:
                with suppress(ValueError):  # it went with the default group
                    dist.destroy_process_group(part.group)
        self._parts.clear()

    def end_parts_with(self, owner: object) -> None:
        """Destroy the parts when ``owner`` is garbage, where ranks may do so at different times."""
        return

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

    def averages(self, dtype: torch.dtype) -> bool:
        """Whether the collective itself divides by the world size. Else gradients are divided while they are packed.

        fp16 is divided before the sum: a sum of many ranks overflows at 65504.
        """
        return self._backend_averages and dtype in _AVERAGED_BY_THE_BACKEND

    def scale(self, dtype: torch.dtype) -> float | None:
        """The factor by which the ranks' values are multiplied before they are summed; None for none."""
        return None if self.world_size == 1 or self.averages(dtype) else 1.0 / self.world_size

    def reduce(
        self, flat: Tensor, pack: Pack, wire_dtype: torch.dtype | None = None, second: Collectives | None = None
    ) -> Stages:
        """Replace ``flat`` by its mean over the ranks. All ranks end with the same bits.

        In low precision there are two stages, an all-to-all of shards, which are summed in fp32, and an all-gather of
        their means.

        Args:
            flat: 1-D, floating or complex, contiguous.
            pack: Brings its values there.
            wire_dtype: bf16 or fp16, in which values travel; no effect on a tensor of less, or other, precision.
            second: The collectives for the second stage; these ones if None.
        """
        if not self._travels_in(wire_dtype, flat):
            pack(self.scale(flat.dtype))
            if not self._nothing_to_do(flat):
                op = dist.ReduceOp.AVG if self.averages(flat.dtype) else dist.ReduceOp.SUM
                yield Stage(self.group.allreduce([wire.real(flat)], op))
            return
        sent = self._packed_in(wire_dtype, flat, pack)
        received, handle = self._exchange(sent, with_own=True)
        yield Stage(handle, (sent, received))
        self._average(received, self.shard(sent))  # rounds: this rank keeps what the others get
        yield Stage((second or self)._gather(sent))
        flat = wire.real(flat)
        flat.copy_(sent[: flat.numel()])

    def all_reduce_mean(self, flat: Tensor) -> Work:
        """Start replacing ``flat`` (1-D, floating or complex) by its mean over the ranks, in place."""
        if self._nothing_to_do(flat):
            return Work()
        averages = Collectives.averages(self, flat.dtype)
        if not averages:
            flat.mul_(1.0 / self.world_size)
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        return self._one(self.group.allreduce([wire.real(flat)], op), flat)

    def _travels_in(self, dtype: torch.dtype | None, flat: Tensor) -> TypeGuard[torch.dtype]:
        return dtype is not None and not self._nothing_to_do(flat) and wire.may_travel_in(dtype, wire.real(flat))

    def _packed_in(self, dtype: torch.dtype, flat: Tensor, pack: Pack) -> Tensor:
        """Pack into memory of another dtype, with as many elements for each rank."""
        values = wire.real(flat)
        if flat.is_complex():
            pack()
            pack = wire.packed(values)
        numel = wire.shard_length(flat, self.world_size) * self.world_size * (values.numel() // flat.numel())
        sent = values.new_empty(numel, dtype=dtype)
        pack(memory=sent)
        return sent

    def _average(self, received: Tensor, out: Tensor) -> None:
        """Write the mean of the ranks' parts, which have arrived one after the other, summed in fp32 at least."""
        parts = received.view(self.world_size, -1)[:, : out.numel()]
        total = torch.sum(parts, 0, dtype=torch.promote_types(received.dtype, torch.float32))  # one kernel
        out.copy_(total.mul_(1.0 / self.world_size))

    # -- shards --------------------------------------------------------------------------------------

    def shard(self, flat: Tensor) -> Tensor:
        """The part of ``flat`` (1-D) that is this rank's in a reduce-scatter.

        Shards have ``numel / world_size`` elements, rounded up. The last shards may be shorter or empty.
        """
        length = wire.shard_length(flat, self.world_size)
        return flat[self.rank * length : (self.rank + 1) * length]

    def reduce_scatter(self, flat: Tensor, pack: Pack, wire_dtype: torch.dtype | None = None) -> Stages:
        """Replace this rank's :meth:`shard` of ``flat`` by its mean over the ranks; the rest means nothing afterwards.

        Args:
            flat: 1-D, floating or complex, contiguous.
            pack: Brings its values there.
            wire_dtype: bf16 or fp16, in which values travel; they are summed in fp32, and the shard is not rounded.
        """
        shard = wire.real(self.shard(flat))
        if self._travels_in(wire_dtype, flat):
            sent = self._packed_in(wire_dtype, flat, pack)
            received, handle = self._exchange(sent, with_own=True)
            yield Stage(handle, (sent, received))
            self._average(received, shard)
            return
        pack()
        if self._nothing_to_do(flat):
            return
        sent = wire.real(self._padded(flat))
        if (scale := self.scale(sent.dtype)) is not None:
            sent.mul_(scale)
        mean = sent.new_empty(sent.numel() // self.world_size)
        op = dist.ReduceOp.AVG if scale is None else dist.ReduceOp.SUM
        yield Stage(dist.reduce_scatter_single(mean, sent, op=op, group=self.group, async_op=True), (sent, mean))
        shard.copy_(mean[: shard.numel()])

    def _padded(self, flat: Tensor) -> Tensor:
        """A copy with as many elements for each rank, or ``flat`` itself if it has."""
        numel = wire.shard_length(flat, self.world_size) * self.world_size
        return flat if flat.numel() == numel else wire.padded(flat, numel)

    def all_gather_shards(self, flat: Tensor) -> Work:
        """Start filling ``flat`` with every rank's :meth:`shard` of it, in place.

        Args:
            flat: 1-D, contiguous; its length is a multiple of the world size.
        """
        if self._nothing_to_do(flat):
            return Work()
        return self._one(self._gather(flat), flat)

    def _gather(self, flat: Tensor) -> Handle:
        """Start filling ``flat`` with every rank's shard, where all shards have one length."""
        values = wire.real(flat)
        return dist.all_gather_single(values, self.shard(values), group=self.group, async_op=True)

    def _exchange(self, sent: Tensor, with_own: bool) -> tuple[Tensor, Handle]:
        """Start giving each rank its part of all ranks' ``sent``; return memory for the parts, by rank.

        Args:
            sent: A part for each rank, one after the other.
            with_own: Whether this rank needs its own part among those that it gets.
        """
        received = torch.empty_like(sent)
        return received, self.group.all_to_all_single(received, sent, [], [])

    # -- sums and copies -----------------------------------------------------------------------------

    def sum(self, tensor: Tensor, pack: Callable[[], None] | None = None) -> Stages:
        """Replace ``tensor`` by its sum over the ranks, in place.

        Args:
            tensor: The tensor.
            pack: Brings its values there; None if they are there.
        """
        if pack is not None:
            pack()
        if not self._nothing_to_do(tensor):
            yield Stage(self.group.allreduce([tensor], dist.ReduceOp.SUM))

    def all_reduce_sum(self, tensor: Tensor) -> Work:
        """Start replacing ``tensor`` by its sum over the ranks, in place."""
        return self._direct(self.sum(tensor), tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        """Start replacing ``tensor`` by the one of the group's rank ``source``, in place."""
        if self._nothing_to_do(tensor):
            return Work()
        return self._one(self.group.broadcast(tensor, source), tensor)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Work]:
        """Start gathering every rank's ``tensor``; shape and dtype are the same on all ranks.

        Returns:
            A tensor of shape ``(world size, *tensor.shape)``, by rank, and the work to wait for before it is read.
        """
        if self._nothing_to_do(tensor):
            return tensor.expand(self.world_size, *tensor.shape), Work()
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        handle = dist.all_gather_single(gathered.view(-1), tensor.reshape(-1), group=self.group, async_op=True)
        return gathered, self._one(handle, tensor)

    def exchange_objects(self, mine: Any, poll: Callable[[], None] | None = None) -> list[Any]:
        """Exchange objects, pickled, and return every rank's, by rank.

        Args:
            mine: This rank's.
            poll: As for :meth:`Work.wait`. No effect where the backend sends nothing from the CPU.
        """
        if self.world_size == 1:
            return [mine]
        if not self._sends_from_cpu:
            found: list[Any] = [None] * self.world_size
            dist.all_gather_object(found, mine, group=self.group)
            return found
        packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes, work = self.all_gather(torch.tensor([len(packed)]))
        work.wait(poll)
        gathered, work = self.all_gather(wire.padded(packed, int(sizes.max())))
        work.wait(poll)
        return [
            pickle.loads(values[: int(size)].numpy().tobytes()) for values, size in zip(gathered, sizes, strict=True)
        ]

    def _nothing_to_do(self, tensor: Tensor) -> bool:
        return self.world_size == 1 or tensor.numel() == 0

    def _one(self, handle: Handle, tensor: Tensor) -> Work:
        return DirectWork(Stage(handle), iter(()), tensor.device.type == "cpu", self.leave_behind)

    def _direct(self, stages: Stages, tensor: Tensor) -> Work:
        return DirectWork(next(stages, None), stages, tensor.device.type == "cpu", self.leave_behind)


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
