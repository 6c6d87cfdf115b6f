"""The buckets of a layout, and the progress of each in a pass. Nothing here reads or writes a tensor's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.layout.plan import Layout, size_text

NONE: frozenset[int] = frozenset()
NOTHING: Mapping[int, Tensor] = MappingProxyType({})
NO_LABEL = nullcontext()
NO_WORK = Work()  # instead of a default_factory: Dynamo would trace the generated function that calls it

MAX_REMEMBERED_SETS = 64
"""Number of trainable sets with remembered buckets. Buckets of other sets are worked out again."""


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket of a layout.

    Attributes:
        index: Its place in the layout.
        slots: Its slots.
        params: The parameter of each.
        held_back: Whether it waits for the end of backward, because a slot may get several gradients or none.
        flat: Its contiguous 1-D tensor.
        flat_with_control: ``flat`` and room for the control vector behind it, if the bucket has such room.
    """

    index: int
    slots: tuple[int, ...]
    params: list[Tensor]
    held_back: bool
    flat: Tensor
    flat_with_control: Tensor | None = None

    def label(self, what: str) -> AbstractContextManager[object]:
        """A context with a label in torch's profiler, as "bucketddp: bucket 3, all-reduce, 4.2 MiB".

        Without a label if no profiler runs: it takes microseconds even then.
        """
        # There is no public way to ask. Should torch drop its flag, labels are always made.
        if not getattr(profiler, "_is_profiler_enabled", True):
            return NO_LABEL
        return record_function(f"bucketddp: bucket {self.index}, {what}, {size_text(self.flat.nbytes)}")


@dataclass(slots=True, eq=False)
class BucketProgress:
    """How far a bucket has come in one pass.

    Attributes:
        bucket: The bucket.
        missing: Slots whose gradients are expected in this pass and are not ready.
        launched: Whether its reduction was started.
        ready_at: When its last gradient was ready, on ``time.perf_counter``; 0 if not all have come.
        launched_at: When its reduction was started.
        done_at: When this rank saw that its reduction was complete; 0 until then.
        work: Its reduction.
    """

    bucket: Bucket
    missing: set[int]
    launched: bool = False
    ready_at: float = 0.0
    launched_at: float = 0.0
    done_at: float = 0.0
    work: Work = field(default=NO_WORK)


class Buckets:
    """All buckets of a layout, in launch order.

    Args:
        table: The slots.
        planner: Says which buckets are held back.

    Attributes:
        all: Every bucket of the layout.
        of_slot: The index of each slot's bucket.
        batches: Whether gradients may be marked as ready several at a time.
    """

    def __init__(self, table: SlotTable, planner: LayoutPlanner) -> None:
        self._table, self._planner, self.batches = table, planner, planner.batches
        self.all: list[Bucket] = []
        self.of_slot: list[int] = []
        self._expected: dict[TrainableSet, _Expected] = {}

    def lay_out(self, layout: Layout, memory: list[Tensor], with_control: Mapping[int, Tensor] = NOTHING) -> None:
        """Make the buckets of a layout.

        Args:
            layout: The layout.
            memory: The contiguous 1-D tensor of each bucket.
            with_control: By the index of a bucket: its tensor, and room for the control vector behind it.
        """
        params, holds_back = self._table.params, self._planner.holds_back
        self.all = [
            Bucket(at, own, [params[slot] for slot in own], holds_back(own), flat, with_control.get(at))
            for at, (own, flat) in enumerate(zip([each.slots for each in layout.buckets], memory, strict=True))
        ]
        of_slot = {slot: bucket.index for bucket in self.all for slot in bucket.slots}
        self.of_slot = [of_slot[slot] for slot in range(len(of_slot))]

    def use(self, memory: list[Tensor]) -> None:
        """Give every bucket another contiguous 1-D tensor."""
        for bucket, flat in zip(self.all, memory, strict=True):
            bucket.flat = flat

    def forget(self) -> None:
        """Drop all buckets and their memory. The record of the last pass keeps the buckets."""
        for bucket in self.all:
            bucket.flat, bucket.flat_with_control = bucket.flat.new_empty(0), None
        self.all, self.of_slot = [], []
        self._expected.clear()

    def begin(self, trainable: TrainableSet) -> list[BucketProgress]:
        """The buckets in a pass that begins, in which the parameters of this set may get a gradient."""
        slots = self._expect(trainable).slots
        return [BucketProgress(bucket, set(own)) for bucket, own in zip(self.all, slots, strict=True)]

    def active(self, trainable: TrainableSet) -> Sequence[int]:
        """Indices of the buckets that a synchronised pass with this set reduces."""
        return self._expect(trainable).active

    def unused(self, trainable: TrainableSet) -> AbstractSet[int]:
        """The slots that are not pending in the active buckets of this set."""
        slots = self._expect(trainable).active_slots
        return NONE if slots <= self._table.pending else slots - self._table.pending

    def _expect(self, trainable: TrainableSet) -> _Expected:
        expected = self._expected.get(trainable)
        if expected is None:
            if len(self._expected) >= MAX_REMEMBERED_SETS:
                self._expected.clear()
            is_in = self._table.is_in
            slots = [frozenset(slot for slot in bucket.slots if is_in(slot, trainable)) for bucket in self.all]
            active = [index for index, own in enumerate(slots) if own]
            expected = _Expected(slots, active, NONE.union(*[self.all[index].slots for index in active]))
            self._expected[trainable] = expected
        return expected


class _Expected(NamedTuple):
    """A trainable set's share of a layout: the slots in each bucket, the active buckets, and all slots of these."""

    slots: list[frozenset[int]]
    active: list[int]
    active_slots: frozenset[int]
