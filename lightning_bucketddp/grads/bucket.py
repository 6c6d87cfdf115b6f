"""The buckets of a layout, and the progress of each in the present pass. Nothing here reads or writes a tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple

from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import REQUIRES_GRAD, SlotTable, TrainableSet
from lightning_bucketddp.layout.plan import Layout, size_text

NONE: frozenset[int] = frozenset()
NO_WORK = Work()  # instead of a default_factory: Dynamo would trace the generated function that calls it

MAX_REMEMBERED_SETS = 64
"""Number of trainable sets with remembered buckets. Buckets of other sets are worked out again."""


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket in a pass.

    Attributes:
        index: Its place in the layout.
        slots: Its slots.
        params: The parameter of each.
        held_back: Whether it waits for the end of backward, because a slot may get several gradients or none.
        flat: Its contiguous 1-D tensor.
        with_tail: ``flat`` and the control vector behind it, if the control vector travels in this bucket.
        missing: Slots whose gradients are expected in this pass and are not ready.
        launched: Whether its collective was started in this pass.
        ready_at: When its last gradient was ready, on ``time.perf_counter``; before the pass if some did not come.
        launched_at: When its collective was started.
        done_at: When this rank saw that its collective was complete; 0 until then.
        work: Its collective.
    """

    index: int
    slots: tuple[int, ...]
    params: list[Tensor]
    held_back: bool
    flat: Tensor
    with_tail: Tensor | None = None
    missing: set[int] = field(default_factory=set)
    launched: bool = False
    ready_at: float = 0.0
    launched_at: float = 0.0
    done_at: float = 0.0
    work: Work = NO_WORK

    def label(self, what: str) -> AbstractContextManager[object]:
        """A context with a label in torch's profiler, as "bucketddp: bucket 3, all-reduce, 4.2 MiB".

        Without a label if no profiler runs: it takes microseconds even then.
        """
        # There is no public way to ask. Should torch drop its flag, labels are always made.
        if not getattr(profiler, "_is_profiler_enabled", True):
            return nullcontext()
        return record_function(f"bucketddp: bucket {self.index}, {what}, {size_text(self.flat.nbytes)}")


class Buckets:
    """All buckets in launch order, and the slots with a gradient.

    Args:
        table: The slots.
        planner: Says which buckets are held back.

    Attributes:
        all: Every bucket of the layout.
        active: The buckets that the present synchronised pass reduces.
        of_slot: The bucket of each slot.
        launched: Number of active buckets that were launched.
        awaited: The bucket that this rank waits for now.
        pending: Slots with a gradient since their last reduction.
        in_order: Whether gradients are expected bucket by bucket in this pass.
        noted: The parameters whose hooks have noted that gradients are ready.
        enough: So many noted gradients may make a bucket full. 0: hooks do not note, and tell the reducer of each.
    """

    def __init__(self, table: SlotTable, planner: LayoutPlanner) -> None:
        self._table, self._planner = table, planner
        self.all: list[Bucket] = []
        self.active: list[Bucket] = []
        self.of_slot: list[Bucket] = []
        self.launched = 0
        self.awaited: Bucket | None = None
        self.pending: set[int] = set()
        self.in_order = False
        self.noted: list[Tensor] = []
        self.enough = 0
        self._expected: dict[TrainableSet, _Expected] = {}

    def lay_out(self, layout: Layout, memory: list[Tensor], with_tail: Tensor | None = None) -> None:
        """Make the buckets of a layout.

        Args:
            layout: The layout.
            memory: The contiguous 1-D tensor of each bucket.
            with_tail: The last bucket's tensor, and room for the control vector behind it. The control vector is final
                only after backward, so this bucket is held back.
        """
        params = self._table.params
        self.all = [
            Bucket(index, it.slots, [params[slot] for slot in it.slots], self._planner.holds_back(it.slots), flat)
            for index, (it, flat) in enumerate(zip(layout.buckets, memory, strict=True))
        ]
        if with_tail is not None:
            self.all[-1].with_tail, self.all[-1].held_back = with_tail, True
        of_slot = {slot: bucket for bucket in self.all for slot in bucket.slots}
        self.of_slot = [of_slot[slot] for slot in range(len(of_slot))]

    def use(self, memory: list[Tensor]) -> None:
        """Give every bucket another contiguous 1-D tensor."""
        for bucket, flat in zip(self.all, memory, strict=True):
            bucket.flat = flat

    def forget(self) -> None:
        """Drop all buckets and their memory."""
        self.all, self.active, self.of_slot, self.launched = [], [], [], 0
        self._expected.clear()

    def begin(self, trainable: TrainableSet, reachable: set[int] | None, in_order: bool) -> None:
        """Expect gradients.

        Args:
            trainable: The parameters that may get one in this pass.
            reachable: Ids of the parameters that will get one; None if this is not known.
            in_order: Whether they are expected bucket by bucket.
        """
        self.in_order = in_order and self._planner.overlap
        params = self._table.params
        for bucket, slots in self._expect(trainable).slots:
            bucket.launched = False
            bucket.missing = (
                set(slots) if reachable is None else {slot for slot in slots if id(params[slot]) in reachable}
            )

    def activate(self, trainable: TrainableSet) -> None:
        """Let this synchronised pass reduce the buckets with a parameter of the set."""
        self.active = self._expect(trainable).active
        self.launched = 0

    def begin_noting(self, synchronised: bool, one_stream: bool) -> None:
        """Let hooks note gradients, if the pass permits it.

        Args:
            synchronised: Whether the pass is synchronised.
            one_stream: As :meth:`Storage.one_stream`.
        """
        self.enough = int(one_stream and (self.in_order or not synchronised))
        self.look_from(0)

    def look_from(self, index: int) -> None:
        """Let hooks tell the reducer when the bucket at ``index`` may be full, or the next one if that is full now."""
        if self.enough:
            self.enough = next((len(bucket.missing) for bucket in self.all[index:] if bucket.missing), sys.maxsize)

    def mark_noted(self) -> tuple[list[Bucket], list[Tensor]]:
        """Mark the gradients that hooks have noted, all together where they complete a bucket in order.

        Returns:
            The buckets that are full now; and the parameters that have no slot, or whose bucket was launched.
        """
        noted = self.noted[:]
        del self.noted[: len(noted)]  # other threads may have added to it
        bucket = self._completed_by(noted)
        if bucket is not None:
            self.pending |= bucket.missing
            bucket.missing.clear()
            self.look_from(bucket.index)
            return [bucket], []
        full: list[Bucket] = []
        others: list[Tensor] = []
        at, slot_of, index_of, of_slot = 0, self._table.slot_of_index, self._table.index_of, self.of_slot
        for param in noted:
            if not param.requires_grad:
                continue  # frozen since forward: autograd calls the hook, but accumulates nothing
            slot = slot_of.get(index_of[id(param)])
            if slot is None or (bucket := of_slot[slot]).launched:
                others.append(param)
                continue
            at, missing = bucket.index, bucket.missing
            self.pending.add(slot)
            missing.discard(slot)
            if not missing:
                full.append(bucket)
        self.look_from(at)
        return full, others

    def _completed_by(self, params: list[Tensor]) -> Bucket | None:
        """The bucket whose missing gradients are those of these parameters, if they are its last ones in order."""
        slot = self._table.slot_of_index.get(self._table.index_of[id(params[0])]) if params else None
        if slot is None:
            return None
        bucket, count = self.of_slot[slot], len(params)
        if bucket.launched or len(bucket.missing) != count or not bucket.missing.issuperset(bucket.slots[-count:]):
            return None
        in_order = all(map(is_, params, bucket.params[-count:]))
        return bucket if in_order and all(map(REQUIRES_GRAD, params)) else None

    def unused(self, trainable: TrainableSet) -> AbstractSet[int]:
        """The slots that are not pending in the active buckets of this set."""
        slots = self._expect(trainable).active_slots
        return NONE if slots <= self.pending else slots - self.pending

    def next(self) -> Bucket | None:
        """The bucket to launch next; None if all were launched."""
        return self.active[self.launched] if self.launched < len(self.active) else None

    def is_last(self, bucket: Bucket) -> bool:
        """Whether a bucket is the last active one."""
        return bucket is self.active[-1]

    def awaiting(self) -> Iterator[Bucket]:
        """Yield each active bucket to a caller that waits for it, and note it in ``awaited``."""
        for bucket in self.active:
            self.awaited = bucket
            yield bucket
        self.awaited = None

    def under_way(self) -> bool:
        """Whether some launched collectives have not been waited for."""
        return any(not bucket.work.done() for bucket in self.active)

    def missing(self) -> list[int]:
        """The slots without a gradient in this pass so far, in launch order."""
        return [slot for bucket in self.active for slot in sorted(bucket.missing)]

    def _expect(self, trainable: TrainableSet) -> _Expected:
        expected = self._expected.get(trainable)
        if expected is None:
            if len(self._expected) >= MAX_REMEMBERED_SETS:
                self._expected.clear()
            slots = [
                (bucket, frozenset(slot for slot in bucket.slots if self._table.is_in(slot, trainable)))
                for bucket in self.all
            ]
            active = [bucket for bucket, own in slots if own]
            expected = _Expected(slots, active, NONE.union(*[bucket.slots for bucket in active]))
            self._expected[trainable] = expected
        return expected


class _Expected(NamedTuple):
    """A trainable set's share of a layout: the slots of each bucket, the active buckets, and all slots of these."""

    slots: list[tuple[Bucket, frozenset[int]]]
    active: list[Bucket]
    active_slots: frozenset[int]
