"""Plans layouts from the parameters that are trainable together and from the order of their gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum

import torch

from lightning_bucketddp.comm import wire
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import ALIGNMENT_BYTES, Layout, default_bucket_cap, plan
from lightning_bucketddp.peers.control import HEADER

MESSAGE_BYTES = 16
"""Each rank's part of a message is a multiple of this many bytes. NCCL is slow otherwise."""

MAX_GROUPING_SETS = 8
"""Number of trainable sets that shape bucket boundaries. Ranks agree on further sets too, but keep the layout."""


class SlotKind(Enum):
    """Which slots may share a bucket. The layout holds the kinds in the order of their values."""

    NORMAL = 0
    NEVER_SEEN = 1
    """The passes that taught the order brought no gradient. No other slot should wait for this one."""
    REPEATED = 2
    """Several gradients came in one pass (re-entrant checkpointing). Only the end of backward tells the last one."""


class LayoutPlanner:
    """Plans the same layout on every rank that was told the same.

    Args:
        table: The slots.
        options: The wrapper's options.
        world_size: Number of ranks.
        one_machine: Whether the ranks share one machine.
        levels: In how many levels buckets are reduced.
        control_up_to: Up to how many bytes the last bucket of a trainable set has room for the control vector, if its
            dtype is exact enough.

    Attributes:
        overlap: Whether buckets may be launched during backward. If not, each buffer is one bucket per set of
            parameters that are trainable together.
        batches: Whether gradients may be marked as ready several at a time. Contiguous buffers without overlap pack
            each one at once, so that none exists twice.
        kinds: The kind of each slot.
        due: Whether the planner has learned more than the present layout shows.
        settled: The slots that stay where they are, as a layout: shards lie there, and optimizer state with them. Later
            slots get buckets of their own. None while all slots may move.
    """

    def __init__(
        self,
        table: SlotTable,
        options: Options,
        world_size: int,
        one_machine: bool,
        levels: int = 1,
        control_up_to: int = 0,
    ) -> None:
        self.overlap = options.overlap and options.use_contiguous_buffers
        self.batches = self.overlap or not options.use_contiguous_buffers
        self.kinds: list[SlotKind] = []
        self._table, self._options = table, options
        assert not isinstance(options.wire_dtype, str)  # Options has made it a dtype
        self._wire_dtype = options.wire_dtype
        self._world_size, self._one_machine, self._levels = world_size, one_machine, levels
        self._control_up_to = control_up_to
        self._order: list[int] = []
        self._seen: set[int] = set()
        self._grouping_sets: list[TrainableSet] = []
        self._whole: set[int] = set()
        self.settled: Layout | None = None
        self.add(table.trainable_now())
        self.due = False

    @property
    def sets(self) -> list[TrainableSet]:
        """The trainable sets that shape buckets, in the order in which they came."""
        return [*self._grouping_sets]

    def knows(self, trainable: TrainableSet) -> bool:
        """Whether the layout serves this set too."""
        dense = self._table.without_sparse(trainable)
        if dense in self._grouping_sets:
            return True
        has_slots = all(self._table.slot_of(index) is not None for index, flag in enumerate(dense) if flag)
        return len(self._grouping_sets) == MAX_GROUPING_SETS and has_slots

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

    def keep_whole(self, indices: AbstractSet[int]) -> None:
        """Have shards cut between these parameters of the module, and never inside of one.

        Raises:
            RuntimeError: If shards lie in these parameters already, and stay.
        """
        new = indices - self._whole
        slots = {slot for index in new if (slot := self._table.slot_of(index)) is not None}
        if self.settled is not None and (late := min(slots, default=len(self.settled.slots))) < len(self.settled.slots):
            raise RuntimeError(
                "expected an optimizer that needs whole parameters before the first backward, and before the state of "
                f"any optimizer is loaded; found shards that divide {self._table.specs[late].name!r} and stay where "
                "they are. Call prepare_optimizer() as soon as the optimizer is made (a Trainer and Fabric do)"
            )
        self._whole |= new
        self.due |= bool(slots)

    def unseen(self, trainable: TrainableSet) -> bool:
        """Whether a parameter of the set had no gradient in any pass that taught the order."""
        return any(slot not in self._seen and self._table.is_in(slot, trainable) for slot in range(len(self._table)))

    def learn(self, positions: Sequence[float | None], repeated: Iterable[int]) -> None:
        """Learn the order in which gradients became ready.

        Args:
            positions: For each slot, the position of its first gradient; None if it had none.
            repeated: Slots with several gradients in one pass. They stay repeated.
        """
        self._seen.update(slot for slot, position in enumerate(positions) if position is not None)
        for slot, kind in enumerate(self.kinds):
            if kind is not SlotKind.REPEATED:
                self.kinds[slot] = SlotKind.NORMAL if slot in self._seen else SlotKind.NEVER_SEEN
        for slot in repeated:
            self.kinds[slot] = SlotKind.REPEATED
        at = [math.inf if position is None else position for position in positions]
        self._order.sort(key=at.__getitem__)  # stable: slots without a gradient in this pass keep their order

    def holds_back(self, slots: Iterable[int]) -> bool:
        """Whether a bucket of these slots waits for the end of backward."""
        return not self.overlap or any(self.kinds[slot] is not SlotKind.NORMAL for slot in slots)

    def settle(self) -> None:
        """Let all slots stay where they are from now on."""
        if self.settled is None:
            self.settled = self._plan(0)

    def plan(self) -> Layout:
        """Plan a layout from all that is known."""
        if self.settled is None:
            return self._plan(0)
        if len(self.settled.slots) < len(self._table):
            self.settled = self.settled.followed_by(self._plan(len(self.settled.slots)))
        return self.settled

    def _plan(self, first: int) -> Layout:
        """Plan a layout of the slots from ``first`` on."""
        options = self._options
        order = sorted([slot for slot in self._order if slot >= first], key=lambda slot: self.kinds[slot].value)
        whole = [slot for index in self._whole if (slot := self._table.slot_of(index)) is not None and slot >= first]
        layout = plan(
            self._table.specs[first:],
            [slot - first for slot in order],
            options.bucket_cap_bytes if self.overlap else (sys.maxsize,),
            [self._group_of(slot) for slot in range(first, len(self._table))],
            self.multiple,
            self._world_size,
            self._one_machine,
            {slot - first for slot in whole},
            options.shard_group_size or self._world_size,
            self._levels,
        )
        room = HEADER + len(self._table)
        return layout.with_room(room + -room % self.multiple, self._carry_control(layout))

    def largest_bucket(self, nbytes: int) -> int:
        """The largest size of a bucket in bytes, unless one parameter is larger, if all gradients have ``nbytes``."""
        default = default_bucket_cap(nbytes, self._world_size, self._one_machine, self._levels)
        return max(self._options.bucket_cap_bytes or (default,))

    def _carry_control(self, layout: Layout) -> set[int]:
        """The buckets with room for the control vector: of each trainable set the last one, if it is not too large."""
        found = set()
        for members in self._grouping_sets:
            indices = [at for at, bucket in enumerate(layout.buckets) if self._table.is_in(bucket.slots[0], members)]
            if indices:
                bucket = layout.buckets[indices[-1]]
                exact = layout.buffers[bucket.buffer].dtype in (torch.float32, torch.float64)
                if exact and layout.bucket_nbytes(bucket) <= self._control_up_to:
                    found.add(indices[-1])
        return found

    @property
    def multiple(self) -> int:
        """Each bucket's number of elements is a multiple of this."""
        options, specs, wire_dtype = self._options, self._table.specs, self._wire_dtype
        if wire_dtype is torch.int8:
            part = wire.RECORD_NUMEL
        elif options.shard_optimizer:  # each rank's shard starts on a boundary for vector loads
            part = ALIGNMENT_BYTES // 4
        else:
            sizes = [spec.dtype.itemsize for spec in specs] + ([] if wire_dtype is None else [wire_dtype.itemsize])
            part = MESSAGE_BYTES // min([MESSAGE_BYTES, *sizes])
        return math.lcm(options.pad_buckets_to, self._world_size * part)

    def _group_of(self, slot: int) -> Hashable:
        """The key that slots of one bucket share. A sharded bucket has parameters of one dtype, too."""
        spec = self._table.specs[slot]
        dtype = spec.param_dtype if self._options.shard_optimizer else None
        exempt = wire.is_exempt(len(spec.shape), self._wire_dtype)
        sets = tuple(self._table.is_in(slot, members) for members in self._grouping_sets)
        return self.kinds[slot], sets, str(dtype), exempt
