"""The buckets of a layout, and how far each of them has come in the present pass. No tensor is touched here."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from torch import Tensor

from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.layout.plan import Layout

NONE: frozenset[int] = frozenset()

MAX_REMEMBERED_SETS = 64
"""Trainable sets whose slots per bucket are remembered; more are worked out again when they come back."""


class Bucket:
    """One bucket in a pass.

    Attributes:
        index: Its place in the layout.
        slots: Its slots.
        held_back: Whether only the end of backward may launch it, as a slot may get several gradients.
        flat: Its contiguous 1-D tensor; the storage sets it.
        with_tail: The same and what travels with it, behind it in memory: the control vector. None if nothing does.
        missing: Slots whose gradients are expected in this pass and are not ready.
        launched: Whether its collective was started in this pass while backward could still bring gradients.
        launched_at: When, on ``time.perf_counter``.
        work: That collective.
    """

    __slots__ = ("flat", "held_back", "index", "launched", "launched_at", "missing", "slots", "with_tail", "work")

    def __init__(self, index: int, slots: tuple[int, ...], held_back: bool, flat: Tensor) -> None:
        self.index = index
        self.slots = slots
        self.held_back = held_back
        self.flat = flat
        self.with_tail: Tensor | None = None
        self.missing: set[int] = set()
        self.launched = False
        self.launched_at = 0.0
        self.work = Work()


class Buckets:
    """All buckets, in launch order, and the gradients that are there.

    Args:
        table: The slots.
        planner: Says which buckets are held back.

    Attributes:
        all: Every bucket of the layout.
        of_slot: The bucket of each slot.
        launched: How many of them have been launched.
        awaited: The bucket that was waited for last.
        pending: Slots with a gradient since their last reduction.
        settled: Slots whose gradients need no attention in this pass: in a local one those that are pending already,
            as autograd adds to their gradients in place.
        marks_only: Whether a gradient of this pass has only to be marked as ready until its bucket is full.
        in_order: Whether gradients should come bucket by bucket in this pass.
    """

    def __init__(self, table: SlotTable, planner: LayoutPlanner) -> None:
        self._table, self._planner = table, planner
        self.all: list[Bucket] = []
        self.of_slot: list[Bucket] = []
        self._now: _Expected | None = None  # in the present synchronised pass
        self.launched = 0
        self.awaited: Bucket | None = None
        self.pending: set[int] = set()
        self.settled: AbstractSet[int] = NONE
        self.marks_only = False
        self.in_order = False
        self._expected: dict[TrainableSet, _Expected] = {}

    def lay_out(self, layout: Layout, memory: list[Tensor]) -> None:
        """Make the buckets of a layout.

        Args:
            layout: The layout.
            memory: The contiguous 1-D tensor of each bucket.
        """
        self.all = [
            Bucket(index, it.slots, self._planner.holds_back(it.slots), flat)
            for index, (it, flat) in enumerate(zip(layout.buckets, memory, strict=True))
        ]
        of_slot = {slot: bucket for bucket in self.all for slot in bucket.slots}
        self.of_slot[:] = [of_slot[slot] for slot in range(len(of_slot))]

    def forget(self) -> None:
        """Let go of all buckets and their memory."""
        self.all, self._now = [], None
        self.of_slot.clear()
        self._expected.clear()

    def begin(self, trainable: TrainableSet, reachable: set[int] | None, in_order: bool) -> None:
        """Expect gradients.

        Args:
            trainable: The parameters that may get one in this pass.
            reachable: Ids of the parameters that will, if that is known.
            in_order: Whether they should come bucket by bucket.
        """
        self.in_order = in_order and self._planner.overlap
        params = self._table.params
        for bucket, slots in self._expect(trainable).missing:
            bucket.launched = False
            bucket.missing = (
                set(slots) if reachable is None else {slot for slot in slots if id(params[slot]) in reachable}
            )

    def activate(self, trainable: TrainableSet) -> None:
        """Choose the buckets that this synchronised pass reduces: those with a parameter in the set."""
        self._now = self._expect(trainable)
        self.launched = 0

    @property
    def active(self) -> list[Bucket]:
        """The buckets that the present synchronised pass reduces."""
        return [] if self._now is None else self._now.active

    def unused(self) -> frozenset[int]:
        """The slots of these buckets that are not pending."""
        return NONE if self._now is None else self._now.slots - self.pending

    def next(self) -> Bucket | None:
        """The bucket that is launched next; None if all are."""
        return self.active[self.launched] if self.launched < len(self.active) else None

    def is_last(self, bucket: Bucket) -> bool:
        """Whether a bucket is the last that this pass reduces."""
        return bucket is self.active[-1]

    def awaiting(self) -> Iterator[Bucket]:
        """The active buckets, each of which the caller waits for."""
        for bucket in self.active:
            self.awaited = bucket
            yield bucket

    def under_way(self) -> bool:
        """Whether collectives were launched that nobody has waited for."""
        return any(not bucket.work.done() for bucket in self.active)

    def missing(self) -> list[int]:
        """The slots whose gradients have not come in this pass, in launch order."""
        return [slot for bucket in self.active for slot in sorted(bucket.missing)]

    def _expect(self, trainable: TrainableSet) -> _Expected:
        found = self._expected.get(trainable)
        if found is None:
            if len(self._expected) >= MAX_REMEMBERED_SETS:
                self._expected.clear()
            found = self._expected[trainable] = _Expected(self.all, self._table, trainable)
        return found


class _Expected:
    """What follows from a trainable set: per bucket the slots in it, and the buckets that have any."""

    def __init__(self, buckets: list[Bucket], table: SlotTable, trainable: TrainableSet) -> None:
        self.missing = [
            (bucket, frozenset(slot for slot in bucket.slots if table.is_in(slot, trainable))) for bucket in buckets
        ]
        self.active = [bucket for bucket, slots in self.missing if slots]
        self.slots = frozenset(slot for bucket in self.active for slot in bucket.slots)
