"""What is known of the slots that shapes the layout: which were trainable together, and when their gradients come."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum

from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import ALIGNMENT_BYTES, Layout, plan

MAX_GROUPING_SETS = 8
"""Trainable sets that shape bucket boundaries. Later ones are agreed and obeyed but move nothing."""


class SlotKind(Enum):
    """Why a slot may stand apart from the others; the values give the order in which the kinds are laid out."""

    NORMAL = 0
    NEVER_SEEN = 1
    """No gradient in the passes that taught the order: must hold nobody up, and may come any number of times."""
    REPEATED = 2
    """More than one gradient in one pass (re-entrant checkpointing of one layer several times): only the end of
    backward tells that the last has come."""


class LayoutPlanner:
    """Plans layouts, the same on every rank that was told the same.

    Args:
        table: The slots.
        options: What was asked for.
        world_size: Number of ranks.
        one_machine: Whether they share one machine.

    Attributes:
        overlap: Whether buckets may be launched during backward; if not, each buffer is one bucket per set of
            parameters that are trainable together.
        kinds: The kind of each slot.
        due: Whether something was learned that the present layout does not know.
    """

    def __init__(self, table: SlotTable, options: Options, world_size: int = 2, one_machine: bool = False) -> None:
        self.overlap = options.overlap and options.use_contiguous_buffers
        self.kinds: list[SlotKind] = []
        self.due = False
        self._table = table
        self._options = options
        self._world_size, self._one_machine = world_size, one_machine
        self._order: list[int] = []
        self._seen: set[int] = set()
        self._grouping_sets: list[TrainableSet] = []
        self.add(table.trainable_now())
        self.due = False

    def knows(self, trainable: TrainableSet) -> bool:
        """Whether the layout needs no change for the set."""
        dense = self._table.without_sparse(trainable)
        if dense in self._grouping_sets:
            return True
        has_all = all(index in self._table.slot_of_index for index, flag in enumerate(dense) if flag)
        return len(self._grouping_sets) == MAX_GROUPING_SETS and has_all

    def add(self, trainable: TrainableSet) -> None:
        """Give every parameter of the set a slot, and group buckets by the set."""
        self._table.add(trainable)
        new = range(len(self.kinds), len(self._table))
        self.kinds += [SlotKind.NORMAL] * len(new)
        self._order += new
        dense = self._table.without_sparse(trainable)
        if dense not in self._grouping_sets and len(self._grouping_sets) < MAX_GROUPING_SETS:
            self._grouping_sets.append(dense)
        self.due = True

    def unseen(self, trainable: TrainableSet) -> bool:
        """Whether a parameter of the set has not had a gradient in any pass that taught the order."""
        return any(slot not in self._seen and self._table.is_in(slot, trainable) for slot in range(len(self._table)))

    def learn(self, positions: Sequence[float | None], repeated: Iterable[int]) -> None:
        """Take in the order in which gradients became ready.

        Args:
            positions: Per slot, when its first gradient came; None for never.
            repeated: Slots with more than one gradient in a pass; they stay so.
        """
        for slot, position in enumerate(positions):
            if position is not None:
                self._seen.add(slot)
            if self.kinds[slot] is not SlotKind.REPEATED:
                self.kinds[slot] = SlotKind.NORMAL if slot in self._seen else SlotKind.NEVER_SEEN
        for slot in repeated:
            self.kinds[slot] = SlotKind.REPEATED

        def when(slot: int) -> float:
            position = positions[slot]
            return math.inf if position is None else position

        self._order.sort(key=when)  # stable: what was not seen this time keeps its order

    def holds_back(self, slots: Iterable[int]) -> bool:
        """Whether a bucket of these slots waits for the end of backward, as one may get several gradients, or none."""
        return not self.overlap or any(self.kinds[slot] is not SlotKind.NORMAL for slot in slots)

    def plan(self) -> Layout:
        """The layout for what is known now."""
        options = self._options
        order = sorted(self._order, key=lambda slot: self.kinds[slot].value)
        return plan(
            self._table.specs,
            order,
            options.bucket_cap_bytes if self.overlap else sys.maxsize,
            [self._group_of(slot) for slot in range(len(self._table))],
            _bucket_multiple(options, self._world_size),
            self._world_size,
            self._one_machine,
        )

    def _group_of(self, slot: int) -> Hashable:
        """What slots that may share a bucket have in common; in one that is sharded, the parameters' dtype too."""
        index = self._table.index_of(slot)
        dtype = self._table.specs[slot].param_dtype if self._options.shard_optimizer else None
        return self.kinds[slot], tuple(members[index] for members in self._grouping_sets), str(dtype)


def _bucket_multiple(options: Options, ranks: int) -> int:
    """Elements that the length of each bucket is a multiple of; shards of them begin where vector loads do."""
    per_line = ALIGNMENT_BYTES // 4
    return math.lcm(options.pad_buckets_to, ranks * per_line) if options.shard_optimizer else options.pad_buckets_to
