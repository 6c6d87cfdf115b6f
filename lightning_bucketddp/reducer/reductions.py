"""Reductions turn buckets into their means over the ranks. Each is a generator of stages, which a lane runs."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook, HookBucket
from lightning_bucketddp.comm.levels import Levels
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.comm.wire import Pack, is_exempt
from lightning_bucketddp.comm.work import Stages, Work
from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.grads.storage import Storage


class Reduction(Protocol):
    """Reduces buckets. All ranks start the same buckets in the same order.

    Attributes:
        name: For people.
        collectives_each: How many collectives a bucket takes, one after the other.
    """

    name: str = "all-reduce"
    collectives_each: int = 1

    def stages(self, bucket: Bucket, pack: Pack, is_last: bool) -> Stages:
        """Reduce a bucket.

        Args:
            bucket: The bucket.
            pack: Packs it.
            is_last: Whether it is the last one of its pass.
        """

    def ready_for_next(self) -> bool:
        """Whether the next bucket may be launched without waiting. Timing may decide this: the order stays."""
        return True

    def wait_until_ready(self) -> None:
        """Wait until the next bucket may be launched."""
        return

    def launched(self, work: Work) -> None:
        """Note the work of the bucket that was launched last."""
        return

    def forget(self, slot: int | None = None) -> None:
        """Forget the memory of a slot that no rank used; of all buckets if None, as they change."""
        return


class AllReduce(Reduction):
    """An all-reduce per bucket.

    Args:
        collectives: The group.
        wire_dtype: bf16, fp16 or int8: gradients travel in it and are summed in fp32. None for their own dtype.
        levels: The two levels in which buckets are reduced; None for one level.
    """

    def __init__(self, collectives: Collectives, wire_dtype: torch.dtype | None, levels: Levels | None) -> None:
        self._collectives, self._wire_dtype, self._levels = collectives, wire_dtype, levels
        self.collectives_each = (1 if wire_dtype is None else 2) + (0 if levels is None else 2)

    def stages(self, bucket: Bucket, pack: Pack, is_last: bool) -> Stages:
        """Sum the bucket with the control vector; give the others their mean."""
        collectives = self._collectives
        if is_last and bucket.flat_with_control is not None:
            return collectives.sum(bucket.flat_with_control, partial(pack, 1.0 / collectives.world_size))
        wire_dtype = _wire_dtype_of(bucket, self._wire_dtype)
        if self._levels is not None:
            return self._levels.reduce(bucket.flat, pack, wire_dtype)
        return collectives.stage(0).reduce(bucket.flat, pack, wire_dtype, collectives.stage(1))


class ReduceScatter(Reduction):
    """A reduce-scatter per bucket, and an all-reduce of shards across shard groups if there are several.

    Args:
        groups: The shard groups.
        wire_dtype: As of an all-reduce.
    """

    name = "reduce-scatter"

    def __init__(self, groups: ShardGroups, wire_dtype: torch.dtype | None) -> None:
        self._groups, self._wire_dtype, self.collectives_each = groups, wire_dtype, groups.collectives_each

    def stages(self, bucket: Bucket, pack: Pack, is_last: bool) -> Stages:
        """Leave this rank the mean of its shard."""
        return self._groups.reduce_scatter(bucket.flat, pack, _wire_dtype_of(bucket, self._wire_dtype))


def _wire_dtype_of(bucket: Bucket, wire_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which a bucket travels. Parameters that are exempt share buckets with each other only."""
    return None if is_exempt(bucket.params[0].dim(), wire_dtype) else wire_dtype


class HookReduce(Reduction):
    """A communication hook per bucket, which divides by itself.

    Args:
        hook: The hook.
        storage: Has the layout.
        one_at_a_time: Whether a bucket waits until the hook is done with the one before.
    """

    name = "communication hook"

    def __init__(self, hook: CommHook, storage: Storage, one_at_a_time: bool) -> None:
        self._hook, self._storage, self._one_at_a_time = hook, storage, one_at_a_time
        self._last = Work()

    def stages(self, bucket: Bucket, pack: Pack, is_last: bool) -> Stages:
        """Call the hook."""
        shown = partial(HookBucket, self._storage.layout, bucket.index, bucket.flat, bucket.params, is_last)
        return self._hook.stages(shown, pack)

    def launched(self, work: Work) -> None:
        """Keep the work."""
        self._last = work

    def ready_for_next(self) -> bool:
        """Whether the hook is done with the bucket before, if it takes one at a time."""
        return not self._one_at_a_time or self._last.done()

    def wait_until_ready(self) -> None:
        """Wait until the hook is done with the bucket before, if it takes one at a time."""
        if self._one_at_a_time:
            self._last.wait()

    def forget(self, slot: int | None = None) -> None:
        """Drop PowerSGD's memory."""
        if slot is None:
            self._hook.forget_buckets()
        else:
            self._hook.forget_slot(self._storage.layout, slot)
