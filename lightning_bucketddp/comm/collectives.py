"""The only caller of ``torch.distributed``. What differs per backend is decided here, once."""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not in __all__

POLL_SECONDS = 0.5
"""How often a rank that waits for a collective looks whether another rank has failed."""

# torch 2.13 renamed it and warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_AVERAGED_BY_THE_BACKEND = (torch.float32, torch.float64, torch.bfloat16)

CACHED_NUMEL = 65536
"""Elements that are worked on at a time where several operations follow each other: 256 KiB of fp32."""


Started = tuple[dist.Work | None, Callable[[], object] | None]
"""What torch returned for a collective, and what is to be run when it has completed."""


class Work:
    """A collective that was started.

    Args:
        work: What torch returned for it; None if there was nothing to do (one rank).
        after: Run once, on the waiting thread, when the collective has completed.
        blocking: Whether the host must wait for it (CPU tensors). On accelerators waiting only makes
            the current stream wait.
        left_behind: Called with the error when a wait ends with one, the collective being under way still.
        second: Starts a second collective that completes the first; called when that has completed.
    """

    def __init__(
        self,
        work: dist.Work | None = None,
        after: Callable[[], object] | None = None,
        blocking: bool = False,
        left_behind: Callable[[str], None] = lambda _: None,
        second: Callable[[], Started] | None = None,
    ) -> None:
        self._left_behind = left_behind
        self._work = work
        self._after = after
        self._blocking = blocking
        self._second = second

    def done(self) -> bool:
        """Whether it was waited for, or has completed by itself."""
        return self._second is None and (self._work is None or self._work.is_completed())

    def settle(self) -> bool:
        """Does what is left to do if the collective has completed, without waiting for it.

        On the host only; accelerators have streams for what is left to do. A collective that failed is left to
        :meth:`wait`, which raises.

        Returns:
            Whether nothing is left to wait for.
        """
        if self._second is not None or not self._blocking:
            return False
        if self._work is not None:
            if not self._work.is_completed():
                return False
            try:
                self._work.wait()  # is_success() warns of being deprecated
            except RuntimeError:  # raised anew by every wait
                return False
            self.wait()
        return True

    def proceed(self, on_idle: Callable[[], None] | None = None) -> None:
        """Starts the second of two collectives, when the first has completed; does nothing if there is only one.

        Never started by the completion itself, whose order differs between ranks: all ranks must call this at the
        same point in the order of their collectives.

        Args:
            on_idle: As for :meth:`wait`.

        Raises:
            RuntimeError: As :meth:`wait`.
        """
        if self._second is not None:
            self._wait_or_leave_behind(on_idle)
            self._work, self._after = self._second()
            self._second = None

    def wait(self, on_idle: Callable[[], None] | None = None) -> None:
        """Waits for the collective, in the sense of the device (host or current stream). Proceeds first if need be.

        Args:
            on_idle: Called every :data:`POLL_SECONDS` while the host waits; an exception it raises
                ends the wait.

        Raises:
            RuntimeError: What the backend raises when a peer is gone or the time is up.
        """
        self.proceed(on_idle)
        self._wait_or_leave_behind(on_idle)
        self._work = None
        if self._after is not None:
            self._after()
            self._after = None

    def _wait_or_leave_behind(self, on_idle: Callable[[], None] | None) -> None:
        try:
            self._wait(on_idle)
        except BaseException as error:
            self._left_behind(str(error))
            raise

    def _wait(self, on_idle: Callable[[], None] | None) -> None:
        work = self._work
        if work is not None:
            if on_idle is not None and self._blocking:
                _wait_in_turns(work, on_idle)
            work.wait()


def _wait_in_turns(work: dist.Work, on_idle: Callable[[], None]) -> None:
    """Blocks the host until ``work`` is completed, and calls ``on_idle`` every :data:`POLL_SECONDS`.

    By waits with a timeout, after which gloo's collectives go on. A callback of the work's future would have to get
    hold of the interpreter's lock in gloo's thread first, which takes longer than a small collective.
    """
    while not work.is_completed():
        begin = time.monotonic()
        try:
            work.wait(timedelta(seconds=POLL_SECONDS))
        except RuntimeError:
            if work.is_completed():
                return  # in time after all, or with an error that the caller's wait raises
            if time.monotonic() - begin < POLL_SECONDS / 2:
                raise  # not for want of time
        else:
            return
        on_idle()  # not in the handler: what it raises has nothing to do with the time being up


def poll_until_done(future: torch.Future[Any], on_idle: Callable[[], None]) -> None:
    """Blocks the host until ``future`` is completed, and calls ``on_idle`` every :data:`POLL_SECONDS`."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    while not done.wait(POLL_SECONDS):
        on_idle()


def available_backends() -> list[str]:
    """Names of the communication backends that this build of torch has."""
    if not dist.is_available():
        return []
    return [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]


def debug_level() -> str:
    """``"OFF"``, ``"INFO"`` or ``"DETAIL"``, by ``TORCH_DISTRIBUTED_DEBUG`` or ``set_debug_level``, in this process."""
    return dist.get_debug_level().name  # type: ignore[attr-defined]  # documented, not in __all__


_left_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()

# Held weakly: torch holds a group until it is destroyed, and its threads must not outlive that.
_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def group_apart(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A second group of all processes, made once, for collectives whose place among those of the first one varies.

    All processes must call this at the same point.

    Args:
        timeout: How long collectives in it wait, if it has to be made; torch's default if None.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _apart.get(world)
    group = known() if known is not None else None
    if group is None:
        group = dist.new_group(timeout=timeout)
        _apart[world] = weakref.ref(group)
    return group


class Collectives:
    """Collectives of one process group.

    Args:
        process_group: The group; None for the default one.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialised.
        ValueError: If this process is not in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "expected torch.distributed to be initialised, found no default process group; call "
                "torch.distributed.init_process_group() first (a Trainer with strategy='bucketddp' does)"
            )
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self._group = group
        self._may_be_destroyed = False
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"process {dist.get_rank()} is not a member of the process group it was given")
        self.world_size = dist.get_world_size(group)
        self._backend_averages = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._group

    @property
    def name(self) -> str:
        """The group's name, the same on all its ranks and on no other group of the same store.

        torch numbers groups, and starts again after ``destroy_process_group()``: the members tell such groups apart.
        """
        members = hashlib.sha256(repr(dist.get_process_group_ranks(self._group)).encode()).hexdigest()
        return f"{self._group.group_name}/{members[:16]}"

    def is_default(self) -> bool:
        """Whether the group is the default one, of all processes."""
        return self._group is dist.group.WORLD

    def leave_behind(self, why: str) -> None:
        """Remembers that collectives are under way in the group which not all ranks will join.

        Whatever is started after them would be paired with them.

        Args:
            why: What happened.
        """
        _left_behind[self._group] = why

    def require_nothing_left_behind(self) -> None:
        """Requires that the group is fit for use in this process.

        Raises:
            RuntimeError: If collectives of a failed pass are under way.
        """
        why = _left_behind.get(self._group)
        if why is not None:
            raise RuntimeError(
                "expected a process group without unfinished collectives, found one in which a pass failed half-way "
                f"({why}); start the processes anew, or make a new group"
            )

    def store(self, prefix: str) -> Store:
        """The group's key-value store, with ``prefix`` before every key."""
        return PrefixStore(prefix, self._group.get_group_store())

    def probe(self, device: torch.device) -> None:
        """Finds out whether the backend knows ``ReduceOp.AVG``. All ranks must call this, before any average.

        Args:
            device: The device whose tensors travel.

        Raises:
            RuntimeError: What the backend raises when a peer is gone or the time is up.
        """
        if self.world_size == 1:
            return
        value = torch.full((1,), float(self.rank), device=device)
        try:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=self._group)
        except (RuntimeError, ValueError) as error:
            if "AVG" not in str(error):
                raise
            return  # refused by name, on every rank alike
        self._backend_averages = value.item() == (self.world_size - 1) / 2

    def divisor_before(self, dtype: torch.dtype, device: torch.device, wire_dtype: torch.dtype | None) -> int | None:
        """What tensors should be divided by on their way into the buffer, where that spares a walk through memory.

        gloo's average is a sum and a division, by itself, of everything once more.

        Returns:
            The world size, or None if :meth:`all_reduce_mean` should divide.
        """
        if self.world_size == 1 or wire_dtype is not None or device.type != "cpu":
            return None
        return self.world_size if dtype in (torch.float32, torch.float64) else None

    def all_reduce_mean(self, flat: Tensor, wire_dtype: torch.dtype | None = None, divided: bool = False) -> Work:
        """Starts replacing ``flat`` (1-D, floating or complex) by its mean over the ranks, in place.

        fp16 is divided before it is summed: a sum of many ranks overflows at 65504.

        Args:
            flat: The tensor; contiguous.
            wire_dtype: One of :data:`WIRE_DTYPES`: values travel in it and are summed in fp32, in two stages, an
                all-to-all of shards that starts now and an all-gather of their means that starts when the caller
                proceeds. All ranks end with the same bits. Of no effect on a tensor of less, or other, precision.
            divided: Whether the tensor has been divided by the world size.
        """
        if self._nothing_to_do(flat):
            return Work()
        flat = _real(flat)
        if wire_dtype is not None and _may_travel_in(wire_dtype, flat):
            return self._all_reduce_mean_in(wire_dtype, flat)
        after = None
        op = dist.ReduceOp.SUM
        if divided:
            pass
        elif flat.dtype is torch.float16:
            flat.mul_(1.0 / self.world_size)
        elif self._backend_averages and flat.dtype in _AVERAGED_BY_THE_BACKEND:
            op = dist.ReduceOp.AVG
        else:

            def after() -> object:
                return flat.mul_(1.0 / self.world_size)

        return self._started(dist.all_reduce(flat, op=op, group=self._group, async_op=True), after, flat)

    def _all_reduce_mean_in(self, wire_dtype: torch.dtype, flat: Tensor) -> Work:
        work, sent, mean = self._exchange_shards(flat, self._shard_length(flat), wire_dtype)

        def gather() -> Started:
            shard = mean().to(wire_dtype)  # this rank's own is rounded like the others', so that all ranks end equal
            gathered = sent  # has arrived
            gather_work = _all_gather(gathered, shard, group=self._group, async_op=True)
            return gather_work, lambda: (flat.copy_(gathered[: flat.numel()]), shard)

        return self._started(work, None, flat, gather)

    def shard(self, flat: Tensor) -> Tensor:
        """The part of ``flat`` (1-D) that is this rank's in a reduce-scatter.

        Shards have equal length, ``numel / world_size`` rounded up, but for the last ones, which may be shorter or
        empty.
        """
        length = self._shard_length(flat)
        return flat[self.rank * length : (self.rank + 1) * length]

    def _shard_length(self, flat: Tensor) -> int:
        return -(-flat.numel() // self.world_size)

    def reduce_scatter_mean(self, flat: Tensor, wire_dtype: torch.dtype | None = None) -> Work:
        """Starts replacing this rank's :meth:`shard` of ``flat`` by its mean over the ranks, in place.

        The rest of ``flat`` is of no meaning afterwards.

        Args:
            flat: 1-D, floating or complex, contiguous; of any length.
            wire_dtype: As for :meth:`all_reduce_mean`; the shard itself is not rounded.
        """
        if self._nothing_to_do(flat):
            return Work()
        shard, length = _real(self.shard(flat)), self._shard_length(flat) * (2 if flat.is_complex() else 1)
        flat = _real(flat)
        travels_in = wire_dtype if wire_dtype is not None and _may_travel_in(wire_dtype, flat) else flat.dtype
        on_gloo = f"{flat.device.type}:gloo" in dist.get_backend_config(self._group).split(",")
        if travels_in is flat.dtype is not wire_dtype and not on_gloo:  # gloo's takes longer than its all-reduce
            return self._reduce_scatter_by_the_backend(flat, shard, length)
        if travels_in is flat.dtype is torch.float32 and flat.numel() == length * self.world_size:
            return self._reduce_scatter_by_all_to_all(flat, shard, length)
        work, _, mean = self._exchange_shards(flat, length, travels_in)
        return self._started(work, lambda: shard.copy_(mean()[: shard.numel()]), flat)

    def all_gather_shards(self, flat: Tensor) -> Work:
        """Starts replacing every rank's :meth:`shard` of ``flat`` by what that rank has there, in place.

        Args:
            flat: 1-D, contiguous; its length is a multiple of the world size.
        """
        if self._nothing_to_do(flat):
            return Work()
        values = flat.view(torch.uint8) if flat.device.type == "cpu" else _real(flat)
        work = _all_gather(values, self.shard(values), group=self._group, async_op=True)
        return self._started(work, None, flat)

    def _reduce_scatter_by_the_backend(self, flat: Tensor, shard: Tensor, length: int) -> Work:
        whole = flat if flat.numel() == length * self.world_size else self._staged(flat, length, flat.dtype)
        result = whole.new_empty(length)
        averages = self._backend_averages and flat.dtype in _AVERAGED_BY_THE_BACKEND
        if not averages:  # before the sum: fp16 overflows at 65504
            whole.mul_(1.0 / self.world_size)
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        work = _reduce_scatter(result, whole, op=op, group=self._group, async_op=True)
        return self._started(work, lambda: (shard.copy_(result[: shard.numel()]), whole), flat)

    def _reduce_scatter_by_all_to_all(self, flat: Tensor, shard: Tensor, length: int) -> Work:
        counts = [length] * self.world_size
        sent = flat
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        if self.rank in (0, self.world_size - 1):  # what this rank would send to itself can be left out
            counts[self.rank] = 0
            sent = flat[length:] if self.rank == 0 else flat[:-length]
            others = list(range(self.world_size - 1))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, counts, counts, group=self._group, async_op=True)
        parts = received.view(-1, length)
        return self._started(work, lambda: _average_with([parts[row] for row in others], shard), flat)

    def _exchange_shards(
        self, flat: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[dist.Work | None, Tensor, Callable[[], Tensor]]:
        """Starts sending every rank the values of its shard.

        Returns:
            The work; the tensor that is sent, ``world_size * length`` elements of ``dtype``; and a function that gives
            the mean of this rank's shard (``length`` elements, at least fp32) when the work has completed.
        """
        sent = self._staged(flat, length, dtype)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)

        def mean() -> Tensor:
            total = received.view(self.world_size, length).sum(0, dtype=torch.promote_types(dtype, torch.float32))
            return total.mul_(1.0 / self.world_size)

        return work, sent, mean

    def _staged(self, flat: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """A copy of ``flat`` in ``dtype`` with zeros behind it, ``world_size * length`` elements together."""
        staged = flat.new_empty(self.world_size * length, dtype=dtype)
        staged[: flat.numel()].copy_(flat)
        staged[flat.numel() :].zero_()
        return staged

    def all_reduce_sum(self, tensor: Tensor) -> Work:
        """Starts replacing ``tensor`` by its sum over the ranks, in place."""
        if self._nothing_to_do(tensor):
            return Work()
        return self._started(dist.all_reduce(tensor, group=self._group, async_op=True), None, tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        """Starts replacing ``tensor`` by that of the group's rank ``source``, in place."""
        if self._nothing_to_do(tensor):
            return Work()
        work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        return self._started(work, None, tensor)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Work]:
        """Starts gathering every rank's ``tensor``, of the same shape and dtype on all of them.

        Returns:
            A tensor of shape ``(world size, *tensor.shape)``, by rank, and what to wait for before it is read.
        """
        if self._nothing_to_do(tensor):
            return tensor.expand(self.world_size, *tensor.shape), Work()
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        work = _all_gather_single(gathered.view(-1), tensor.reshape(-1), group=self._group, async_op=True)
        return gathered, self._started(work, None, tensor)

    def exchange_objects(self, mine: Any, on_idle: Callable[[], None] | None = None) -> list[Any]:
        """Every rank's object, by rank; objects are pickled.

        Args:
            mine: This rank's.
            on_idle: As for :meth:`Work.wait`; of no effect where the backend sends nothing from the CPU.
        """
        if self.world_size == 1:
            return [mine]
        if "cpu:gloo" not in dist.get_backend_config(self._group).split(","):
            found: list[Any] = [None] * self.world_size
            dist.all_gather_object(found, mine, group=self._group)
            return found
        packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes, pending = self.all_gather(torch.tensor([len(packed)]))
        pending.wait(on_idle)
        padded = packed.new_zeros(int(sizes.max()))
        padded[: len(packed)] = packed
        gathered, pending = self.all_gather(padded)
        pending.wait(on_idle)
        return [pickle.loads(it[: int(size)].numpy().tobytes()) for it, size in zip(gathered, sizes, strict=True)]

    def apart(self, timeout: timedelta | None = None) -> Collectives:
        """Collectives of the same ranks whose order has nothing to do with these ones'. All ranks must call this."""
        if self.world_size == 1:
            return self
        return self.divided([range(self.world_size)], timeout)

    def divided(self, groups: Sequence[Sequence[int]], timeout: timedelta | None = None) -> Collectives:
        """Makes groups of some of the ranks, and gives this rank's. All ranks must call this.

        Args:
            groups: The ranks, within this group, of each; every rank is in one of them.
            timeout: How long collectives in it wait; torch's default if None.
        """
        everyone = dist.get_process_group_ranks(self._group)
        mine: Collectives | None = None
        for ranks in groups:
            members = [everyone[rank] for rank in ranks]
            if self.is_default():  # every process has to help with every group
                group = dist.new_group(members, timeout=timeout)
            elif self.rank in ranks:
                group = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
            if self.rank in ranks:
                mine = Collectives(group)
                # The others' names are used again, and what their ranks have left in the store under them would be too.
                mine._may_be_destroyed = self.is_default()
                mine._backend_averages = self._backend_averages
        assert mine is not None
        return mine

    def end(self) -> None:
        """Destroys the group, if :meth:`divided` has made it and nothing is under way in it. Sends nothing."""
        if self._may_be_destroyed and self._group not in _left_behind:
            self._may_be_destroyed = False
            dist.destroy_process_group(self._group)

    def _nothing_to_do(self, tensor: Tensor) -> bool:
        return self.world_size == 1 or tensor.numel() == 0

    def _started(
        self,
        work: dist.Work | None,
        after: Callable[[], object] | None,
        tensor: Tensor,
        second: Callable[[], Started] | None = None,
    ) -> Work:
        return Work(work, after, tensor.device.type == "cpu", self.leave_behind, second)


def _average_with(others: Sequence[Tensor], mine: Tensor) -> None:
    """Replaces ``mine`` (1-D) by the mean of it and the others, in stretches short enough for caches."""
    for start in range(0, len(mine), CACHED_NUMEL):
        stretch = mine[start : start + CACHED_NUMEL]
        for other in others:
            stretch.add_(other[start : start + CACHED_NUMEL])
        stretch.mul_(1.0 / (len(others) + 1))


def _real(flat: Tensor) -> Tensor:
    """The 1-D real tensor of the same memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _may_travel_in(wire_dtype: torch.dtype, flat: Tensor) -> bool:
    return flat.dtype is wire_dtype or (flat.is_floating_point() and flat.dtype.itemsize > wire_dtype.itemsize)


def _all_gather(output: Tensor, part: Tensor, **options: Any) -> dist.Work | None:
    if hasattr(dist, "all_gather_single"):  # the name since torch 2.13, where the old one warns
        return dist.all_gather_single(output, part, **options)
    return dist.all_gather_into_tensor(output, part, **options)


def _reduce_scatter(output: Tensor, whole: Tensor, **options: Any) -> dist.Work | None:
    if hasattr(dist, "reduce_scatter_single"):  # as above
        return dist.reduce_scatter_single(output, whole, **options)
    return dist.reduce_scatter_tensor(output, whole, **options)
