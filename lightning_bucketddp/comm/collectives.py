"""The collectives of one process group, as any backend has them. :mod:`.gloo` knows better ways for gloo."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.groups import Group, end_subgroup, subgroup_of
from lightning_bucketddp.comm.host_copy import bytes_of
from lightning_bucketddp.comm.wire import Pack
from lightning_bucketddp.comm.work import DirectWork, Handle, Stage, Stages, Work

_AVERAGED_BY_THE_BACKEND = (torch.float32, torch.float64, torch.bfloat16)


class Collectives(Group):
    """Collectives of one process group, and of groups made of its ranks.

    Each starts, and returns the :class:`Work` to wait for. Those of reductions return their stages, for a lane to run.
    Most are the group's own methods. torch's functions around them cost small steps some percent.

    Args:
        process_group: The group; None for the default one.
        device: The device whose tensors travel; the current accelerator if None.

    Attributes:
        device: The device whose tensors travel, if it was given.
        of_stage: The collectives of a group of its own, by the stages of reductions that have one.
        among_hosts: Whether tensors on the CPU travel, too: the group has a backend for them.
        made_of: The ranks of each subgroup of the split that made this group, so that a second split gives the same
            ones; all ranks of a group that was not made so.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialised.
        ValueError: If this process is not in the group.
    """

    _by_gloo = False

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        super().__init__(process_group)
        self._subgroups: list[dist.ProcessGroup] = []
        self._splits: Counter[str] = Counter()
        self.made_of: Sequence[Sequence[int]] = [range(self.world_size)]
        self.of_stage: dict[int, Collectives] = {}
        self._backend_averages = False
        backends = dist.get_backend_config(self.group)
        # Subgroups stay for later wrappers, which use them in turn: NCCL waits for all ranks to end one.
        self._keeps_subgroups = not (self._by_gloo or all(each.endswith("gloo") for each in backends.split(",")))
        self.among_hosts = "cpu:" in backends
        self.device = device
        accelerator = device or torch.accelerator.current_accelerator()
        self._sends_from = torch.device("cpu") if self.among_hosts else accelerator

    # -- subgroups -----------------------------------------------------------------------------------

    def split(self, members: Sequence[Sequence[int]], backend: str | None = None) -> Collectives:
        """Make subgroups, and return the collectives of this rank's. All ranks must call this.

        Args:
            members: Per subgroup, its ranks within this group. Every rank is in one of them.
            backend: The groups' backend; that of this one if None.

        Raises:
            ValueError: If some processes are not in the group.
        """
        number, ranks = None, str([list(each) for each in members])
        if backend is None and self._keeps_subgroups:
            number = self._splits[ranks]
            self._splits[ranks] += 1
        mine = subgroup_of(self, members, backend, number)
        if number is None:
            self._subgroups.append(mine)
        subgroup = type(self)(mine, self.device)
        subgroup._backend_averages, subgroup.made_of = self._backend_averages, members
        return subgroup

    def split_by_node(self, members: Sequence[Sequence[int]]) -> Collectives:
        """Make subgroups as :meth:`split` does, of ranks that share a node."""
        return self.split(members)

    def stage(self, number: int) -> Collectives:
        """The collectives for a stage of reductions: these ones, unless the stage has a group of its own."""
        return self.of_stage.get(number, self)

    def end_subgroups(self) -> None:
        """Destroy the subgroups, but for those that stay; see :func:`end_subgroup`."""
        while self._subgroups:
            end_subgroup(self._subgroups.pop())

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
            handle = dist.all_reduce(value, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
            self._work(iter([Stage(handle)]), value).wait()
        except (RuntimeError, ValueError) as error:
            if "AVG" not in str(error):
                raise
            return  # refused by name, on every rank alike
        # NCCL multiplies by 1 / world_size, which is rounded, and then adds up. A sum would be a multiple of the mean.
        self._backend_averages = abs(value.item() - (self.world_size - 1) / 2) < 0.25

    def scale(self, dtype: torch.dtype) -> float | None:
        """The factor by which the ranks' values are multiplied before they are summed.

        None where the collective itself divides by the world size. fp16 is divided before the sum: a sum of many ranks
        overflows at 65504.
        """
        averages = self.world_size == 1 or (self._backend_averages and dtype in _AVERAGED_BY_THE_BACKEND)
        return None if averages else 1.0 / self.world_size

    def reduce(
        self, flat: Tensor, pack: Pack, wire_dtype: torch.dtype | None = None, second: Collectives | None = None
    ) -> Stages:
        """Replace ``flat`` by its mean over the ranks. All ranks end with the same bits.

        In low precision two ranks gather all values and sum them in fp32. More ranks have two stages: an all-to-all of
        shards, which are summed in fp32, and an all-gather of their means, which are rounded.

        Args:
            flat: 1-D, floating or complex, contiguous.
            pack: Brings its values there.
            wire_dtype: bf16, fp16 or int8, in which values travel; no effect on a tensor of less, or other, precision.
            second: The collectives for the second stage; these ones if None.
        """
        if wire_dtype is None or self._nothing_to_do(flat) or not wire.may_travel_in(wire_dtype, flat):
            return self._mean(flat, pack, self.scale(flat.dtype))
        return self._mean_in(wire_dtype, flat, pack, second or self)

    def all_reduce_mean(self, flat: Tensor) -> Work:
        """Start replacing ``flat`` (1-D, floating or complex) by its mean over the ranks, in place."""
        return self._work(self._mean(flat, wire.packed(flat), Collectives.scale(self, flat.dtype)), flat)

    def _mean(self, flat: Tensor, pack: Pack, scale: float | None) -> Stages:
        pack(scale)
        if not self._nothing_to_do(flat):
            op = dist.ReduceOp.AVG if scale is None else dist.ReduceOp.SUM
            yield Stage(self.group.allreduce([wire.real(flat)], op), followed=False)

    def _mean_in(self, dtype: torch.dtype, flat: Tensor, pack: Pack, second: Collectives) -> Stages:
        if self.world_size == 2:  # an all-gather has as many bytes, and is one round
            numel, sent_as = wire.message_numel(dtype, flat, 2)
            with self._memory(2 * numel, sent_as, flat.device) as received:
                wire.message_in(dtype, flat, pack, 2, self.shard(received))
                yield Stage(self._gather(received), (received,))
                flat = wire.real(flat)
                self._average(wire.values_of(received).view(2, -1)[:, : flat.numel()], flat)
            return
        sent = wire.message_in(dtype, flat, pack, self.world_size)
        flat = wire.real(flat)
        received, handle = self._exchange(sent, with_own=True)
        yield Stage(handle, (sent, received))
        parts, part = wire.values_of(received).view(self.world_size, -1), self.shard(sent)
        if dtype is torch.int8:
            mean = torch.empty_like(parts[0])
            self._average(parts, mean)
            wire.write_8_bits(mean, part)
        else:
            self._average(parts, part)  # rounds: this rank keeps what the others get
        yield Stage(second._gather(sent))
        flat.copy_(wire.values_of(sent)[: flat.numel()])

    @contextmanager
    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Memory (1-D) inside the context."""
        yield torch.empty(numel, dtype=dtype, device=device)

    def _average(self, parts: Tensor, out: Tensor) -> None:
        """Write the mean of the ranks' parts (ranks, elements), summed in fp32 at least."""
        total = torch.sum(parts, 0, dtype=torch.promote_types(parts.dtype, torch.float32))  # one kernel
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
            wire_dtype: bf16, fp16 or int8, in which values travel; they are summed in fp32, and the shard is not
                rounded.
        """
        if self._nothing_to_do(flat):
            return self._mean(flat, pack, None)
        if wire_dtype is None or not wire.may_travel_in(wire_dtype, flat):
            return self._scatter(flat, pack)
        return self._scatter_in(wire_dtype, flat, pack)

    def _scatter(self, flat: Tensor, pack: Pack) -> Stages:
        pack()
        sent = wire.real(wire.padded(flat, wire.shard_length(flat, self.world_size) * self.world_size))
        if (scale := self.scale(sent.dtype)) is not None:
            sent.mul_(scale)
        mean = sent.new_empty(sent.numel() // self.world_size)
        op = dist.ReduceOp.AVG if scale is None else dist.ReduceOp.SUM
        made = (mean,) if sent.data_ptr() == flat.data_ptr() else (sent, mean)
        yield Stage(dist.reduce_scatter_single(mean, sent, op=op, group=self.group, async_op=True), made)
        shard = wire.real(self.shard(flat))
        shard.copy_(mean[: shard.numel()])

    def _scatter_in(self, dtype: torch.dtype, flat: Tensor, pack: Pack) -> Stages:
        sent = wire.message_in(dtype, flat, pack, self.world_size)
        received, handle = self._exchange(sent, with_own=True)
        yield Stage(handle, (sent, received))
        shard = wire.real(self.shard(flat))
        self._average(wire.values_of(received).view(self.world_size, -1)[:, : shard.numel()], shard)

    def all_gather_shards(self, flat: Tensor) -> Work:
        """Start filling ``flat`` with every rank's :meth:`shard` of it, in place.

        Args:
            flat: 1-D, contiguous; its length is a multiple of the world size.
        """
        if self._nothing_to_do(flat):
            return Work()
        return self._work(iter([Stage(self._gather(flat))]), flat)

    def gather(self, flat: Tensor) -> Stages:
        """Fill ``flat`` with every rank's :meth:`shard` of it, as :meth:`all_gather_shards` does."""
        yield Stage(self._gather(flat))

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
            yield Stage(self.group.allreduce([tensor], dist.ReduceOp.SUM), followed=False)

    def all_reduce_sum(self, tensor: Tensor) -> Work:
        """Start replacing ``tensor`` by its sum over the ranks, in place."""
        return self._work(self.sum(tensor), tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        """Start replacing ``tensor`` by the one of the group's rank ``source``, in place."""
        if self._nothing_to_do(tensor):
            return Work()
        return self._work(iter([Stage(self.group.broadcast(tensor, source))]), tensor)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Work]:
        """Start gathering every rank's ``tensor``; shape and dtype are the same on all ranks.

        Returns:
            A tensor of shape ``(world size, *tensor.shape)``, by rank, and the work to wait for before it is read.
        """
        if self._nothing_to_do(tensor):
            return tensor.expand(self.world_size, *tensor.shape), Work()
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        handle = dist.all_gather_single(gathered.view(-1), tensor.reshape(-1), group=self.group, async_op=True)
        return gathered, self._work(iter([Stage(handle)]), tensor)

    def exchange_objects(self, mine: Any) -> list[Any]:
        """Exchange objects, pickled, and return every rank's, by rank. Waits for them."""
        if self.world_size == 1:
            return [mine]
        packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(self._sends_from)
        sizes, work = self.all_gather(torch.tensor([len(packed)], device=packed.device))
        work.wait()
        gathered, work = self.all_gather(wire.padded(packed, int(sizes.max())))
        work.wait()
        everyone = zip(gathered.cpu(), sizes.tolist(), strict=True)
        return [pickle.loads(bytes_of(values[:size])) for values, (size,) in everyone]

    def _nothing_to_do(self, tensor: Tensor) -> bool:
        return self.world_size == 1 or tensor.numel() == 0

    def _work(self, stages: Stages, tensor: Tensor) -> Work:
        return DirectWork(next(stages, None), stages, not is_accelerator(tensor.device), self.leave_behind)
