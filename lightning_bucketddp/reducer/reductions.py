"""Reductions turn packed buckets into their means over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from lightning_bucketddp.comm import wire
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook, HookBucket
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.comm.stage_thread import StageThread
from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage


class Reduction(Protocol):
    """Reduces buckets. All ranks start the same buckets in the same order.

    Attributes:
        name: For people.
        carries_control: Whether the control vector travels in the bucket that has room for it; the same on every rank.
        packs_early: Whether gradients may be packed as they come: into the bucket, with nobody to look at them before.
        launcher: The thread that packs and starts the buckets without the control vector; None if there is none.
    """

    name: str = "all-reduce"
    carries_control: bool = False
    packs_early: bool = False
    launcher: StageThread | None = None
    _buckets: Buckets
    _thread: StageThread | None = None

    def scale(self, bucket: Bucket) -> float | None:
        """The factor that packing applies, so that the collective need not divide; None for none."""
        return None

    def wire_memory(self, bucket: Bucket) -> Tensor | None:
        """Memory in the wire's dtype, which packing fills and the collective sends; None for the bucket's own."""
        return None

    def start(self, bucket: Bucket, sent: Tensor | None = None) -> Work:
        """Start the collective of a packed bucket.

        Args:
            bucket: The bucket.
            sent: The memory that it was packed into, if not its own.
        """

    def free(self) -> bool:
        """Whether the next bucket may be launched without waiting. Timing may decide this: the order stays."""
        return True

    def make_free(self, poll: Callable[[], None]) -> None:
        """Wait until the next bucket may be launched."""
        return

    def advance(self) -> None:
        """Hand the bucket that was launched last to the stage thread, if there is one and other buckets follow."""
        bucket = self._buckets.active[self._buckets.launched - 1]
        followed = bucket.flat.device.type == "cpu" and not self._buckets.is_last(bucket)
        if self._thread is not None and self.launcher is None and followed:
            bucket.work = self._thread.take(bucket.work)

    def start_apart(self, bucket: Bucket, pack: Callable[[], object], sent: Tensor | None) -> Work:
        """Let the launcher pack a bucket and start its collective, and the stage thread carry it on.

        Args:
            bucket: The bucket.
            pack: What :meth:`Storage.packing` has returned.
            sent: As for :meth:`start`.

        Returns:
            The work to wait for.
        """

        def launch() -> Work:
            pack()
            work = self.start(bucket, sent)
            return work if self._thread is None or work.in_last_stage else self._thread.take(work)

        assert self.launcher is not None
        return self.launcher.take(Work(on_host=True).then(launch))

    def proceed(self, poll: Callable[[], None]) -> None:
        """Start all stages of all buckets, so that other collectives may follow.

        Stage by stage: a process group then carries one stage of the buckets, in their order.
        """
        started = True
        while started:
            started = False
            for bucket in self._buckets.awaiting():
                started |= bucket.work.start_next(poll)

    def forget(self, slot: int | None = None) -> None:
        """Forget the memory of a slot that no rank used; of all buckets if None, as they change."""
        return


class AllReduce(Reduction):
    """An all-reduce per bucket.

    Args:
        collectives: The group.
        buckets: The buckets.
        wire_dtype: The dtype in which gradients travel, as for :meth:`Collectives.all_reduce_mean`.
        scales: Whether packing may divide, or convert to the wire's dtype.

    With a ``wire_dtype``, a thread starts the second stages in the second group, if there is one. Else, as on
    accelerators, the second stage of a bucket follows the launch of the next bucket.
    """

    carries_control = True

    def __init__(
        self, collectives: Collectives, buckets: Buckets, wire_dtype: torch.dtype | None, scales: bool
    ) -> None:
        self._buckets, self._collectives, self._wire_dtype, self._scales = buckets, collectives, wire_dtype, scales
        self._thread = None if collectives.second is None else StageThread()
        self._last = Work()

    def scale(self, bucket: Bucket) -> float | None:
        """One over the world size, where that saves a walk through memory."""
        if not self._scales:
            return None
        divisor = self._collectives.divisor_before(bucket.flat.dtype, bucket.flat.device, self._wire_dtype)
        return None if divisor is None else 1.0 / divisor

    def wire_memory(self, bucket: Bucket) -> Tensor | None:
        """Memory in the wire's dtype, unless buckets are made anew in each pass."""
        return wire.memory(bucket.flat, self._collectives.world_size, self._wire_dtype) if self._scales else None

    def start(self, bucket: Bucket, sent: Tensor | None = None) -> Work:
        """Start the all-reduce."""
        if bucket.with_tail is not None:  # packing has divided
            return self._collectives.all_reduce_sum(bucket.with_tail)
        flat = bucket.flat
        group = self._collectives.apart or self._collectives
        work = group.all_reduce_mean(flat, self._wire_dtype, self.scale(bucket) is not None, sent)
        if self._wire_dtype is not None and self._thread is None:
            # In a stream of its own: backward must not wait for the first stage.
            with torch.Stream(flat.device) if flat.device.type != "cpu" else nullcontext():
                self._last.proceed()
            self._last = work
        return work


class ReduceScatter(Reduction):
    """A reduce-scatter per bucket, and an all-reduce of shards across shard groups if there are several.

    The sums are divided, when only the shards are left.

    Args:
        groups: The shard groups.
        buckets: The buckets.
        wire_dtype: The dtype in which gradients travel.
    """

    name = "reduce-scatter"
    carries_control = True

    def __init__(self, groups: ShardGroups, buckets: Buckets, wire_dtype: torch.dtype | None) -> None:
        self._buckets, self._groups, self._wire_dtype = buckets, groups, wire_dtype
        self._thread = StageThread()

    def wire_memory(self, bucket: Bucket) -> Tensor | None:
        """Memory in the wire's dtype."""
        return wire.memory(bucket.flat, self._groups.shards, self._wire_dtype)

    def start(self, bucket: Bucket, sent: Tensor | None = None) -> Work:
        """Start the reduce-scatter."""
        tail = None if bucket.with_tail is None else bucket.with_tail[bucket.flat.numel() :]
        return self._groups.reduce_scatter_mean(bucket.flat, self._wire_dtype, tail, sent)


class CastReduce(Reduction):
    """torch's ``fp16_compress_hook`` or ``bf16_compress_hook`` on the CPU: gradients are packed in that dtype at once.

    An all-reduce per bucket. A thread casts the sums back.

    Args:
        collectives: The group.
        buckets: The buckets.
        dtype: The dtype in which gradients are divided and summed.
        packs: Whether packing may convert to it.
    """

    def __init__(self, collectives: Collectives, buckets: Buckets, dtype: torch.dtype, packs: bool) -> None:
        self._buckets, self._collectives, self._dtype, self._packs = buckets, collectives, dtype, packs
        self._thread = StageThread()

    def wire_memory(self, bucket: Bucket) -> Tensor | None:
        """Memory in the hook's dtype, unless buckets are made anew in each pass."""
        return wire.memory(bucket.flat, self._collectives.world_size, self._dtype) if self._packs else None

    def start(self, bucket: Bucket, sent: Tensor | None = None) -> Work:
        """Start the all-reduce."""
        flat = wire.real(bucket.flat)
        sent = flat.to(self._dtype) if sent is None else sent
        group = self._collectives.apart or self._collectives
        work = group.all_reduce_mean(sent.div_(self._collectives.world_size), divided=True)
        return work.then(lambda: Work(finish=lambda: flat.copy_(sent[: flat.numel()]), on_host=True))


class HookReduce(Reduction):
    """A communication hook per bucket, which divides by itself.

    Args:
        hook: The hook.
        buckets: The buckets.
        table: The slots.
        storage: Has the layout.
    """

    name = "communication hook"

    def __init__(self, hook: CommHook, buckets: Buckets, table: SlotTable, storage: Storage) -> None:
        self._buckets, self._hook, self._table, self._storage = buckets, hook, table, storage
        self._last = Work()

    def start(self, bucket: Bucket, sent: Tensor | None = None) -> Work:
        """Call the hook."""
        params = [self._table.params[slot] for slot in bucket.slots]
        shown = HookBucket(self._storage.layout, bucket.index, bucket.flat, params, self._buckets.is_last(bucket))
        self._last = self._hook.start(shown)
        return self._last

    def free(self) -> bool:
        """Whether the hook is done with the bucket before, if it takes one at a time."""
        return not self._hook.one_at_a_time or self._last.done()

    def make_free(self, poll: Callable[[], None]) -> None:
        """Wait until the hook is done with the bucket before, if it takes one at a time."""
        if self._hook.one_at_a_time:
            self._last.proceed(poll)

    def forget(self, slot: int | None = None) -> None:
        """Drop PowerSGD's memory."""
        if slot is None:
            self._hook.forget_buckets()
        else:
            self._hook.forget_slot(self._storage.layout, self._buckets.of_slot[slot].index, slot)
