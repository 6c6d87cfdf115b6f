"""Which parameters have a slot, and what is known of them that shapes the layout."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Hashable, Iterable, Sequence
from enum import Enum

from torch import nn

from lightning_bucketddp.layout.plan import Layout, ParamSpec, plan

MAX_GROUPING_SETS = 8
"""Trainable sets that shape bucket boundaries. Later ones are agreed and obeyed but move nothing."""

TrainableSet = tuple[bool, ...]
"""Per parameter of the module, in registration order, whether it requires grad."""


class SlotKind(Enum):
    """Why a slot may stand apart from the others; the values give the order in which the kinds are laid out."""

    NORMAL = 0
    NEVER_SEEN = 1
    """No gradient in the passes that taught the order: must hold nobody up, and may come any number of times."""
    REPEATED = 2
    """More than one gradient in one pass (re-entrant checkpointing of one layer several times): only the end of
    backward tells that the last has come."""


class SlotTable:
    """The module's parameters and the slots of those that were trainable at some time.

    Slots are numbered in the order in which parameters became trainable, and keep their number for good. Parameters
    with sparse gradients have none.

    Args:
        named_params: All parameters of the module, each once, in registration order.
        bucket_cap_bytes: Largest bucket in bytes; None for the default rule.
        sparse_names: The parameters whose gradients are sparse.
        bucket_multiple: Elements that the length of each bucket is a multiple of.
        overlap: Whether buckets may be launched during backward; if not, each buffer is one bucket per set of
            parameters that are trainable together.
        world_size: Number of ranks.
        one_machine: Whether they share one machine.
        by_param_dtype: Whether parameters in one bucket must have one dtype, as their gradients must.

    Attributes:
        sparse: Indices of the parameters whose gradients are sparse.
        names: Names of all parameters.
        all_params: All parameters.
        slot_of_index: The slot of each parameter that has one.
        params: The parameter of each slot.
        specs: The specification of each slot.
        kinds: The kind of each slot.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        bucket_cap_bytes: int | None,
        sparse_names: Collection[str] = (),
        bucket_multiple: int = 1,
        overlap: bool = True,
        world_size: int = 2,
        one_machine: bool = False,
        by_param_dtype: bool = False,
    ) -> None:
        self._by_param_dtype = by_param_dtype
        self.sparse = frozenset(index for index, (name, _) in enumerate(named_params) if name in sparse_names)
        self.names = [name for name, _ in named_params]
        self.all_params = [param for _, param in named_params]
        self._bucket_cap_bytes = bucket_cap_bytes if overlap else sys.maxsize
        self._bucket_multiple = bucket_multiple
        self._world_size, self._one_machine = world_size, one_machine
        self.params: list[nn.Parameter] = []
        self.specs: list[ParamSpec] = []
        self.kinds: list[SlotKind] = []
        self._index_of: list[int] = []
        self.slot_of_index: dict[int, int] = {}
        self._order: list[int] = []
        self._seen: set[int] = set()
        self._grouping_sets: list[TrainableSet] = []
        self.add(self.trainable_now())

    def __len__(self) -> int:
        return len(self.params)

    def slot_of(self, index: int) -> int | None:
        """The slot of the parameter at ``index`` in the module, if it has one."""
        return self.slot_of_index.get(index)

    def index_of(self, slot: int) -> int:
        """The index in the module of a slot's parameter."""
        return self._index_of[slot]

    def indices_without_slot(self) -> set[int]:
        """The indices in the module of parameters that have no slot."""
        return set(range(len(self.all_params))) - set(self._index_of)

    def with_main_grad(self) -> list[int]:
        """The slots whose gradients have another dtype than their parameters; they carry a ``main_grad``."""
        return [slot for slot, spec in enumerate(self.specs) if spec.param_dtype is not None]

    def trainable_now(self) -> TrainableSet:
        """The trainable set as ``requires_grad`` has it at this moment."""
        return tuple([param.requires_grad for param in self.all_params])

    def has_all(self, trainable: TrainableSet) -> bool:
        """Whether every parameter of the set has a slot, those with sparse gradients apart."""
        return all(index in self.slot_of_index for index, flag in enumerate(self._without_sparse(trainable)) if flag)

    def _without_sparse(self, trainable: TrainableSet) -> TrainableSet:
        if not self.sparse:
            return trainable
        return tuple([flag and index not in self.sparse for index, flag in enumerate(trainable)])

    def knows(self, trainable: TrainableSet) -> bool:
        """Whether the layout needs no change for the set."""
        return self._without_sparse(trainable) in self._grouping_sets or (
            len(self._grouping_sets) == MAX_GROUPING_SETS and self.has_all(trainable)
        )

    def is_in(self, slot: int, trainable: TrainableSet) -> bool:
        """Whether the parameter of ``slot`` is in the set."""
        return trainable[self._index_of[slot]]

    def add(self, trainable: TrainableSet) -> range:
        """Gives every parameter of the set that has none a slot, last registered first, and groups by the set.

        Parameters with sparse gradients are left out.

        Returns:
            The new slots.
        """
        known = len(self.params)
        trainable = self._without_sparse(trainable)
        for index in reversed(range(len(trainable))):
            if trainable[index] and index not in self.slot_of_index:
                slot = len(self.params)
                self.slot_of_index[index] = slot
                self._index_of.append(index)
                self.params.append(self.all_params[index])
                self.specs.append(ParamSpec.of(self.names[index], self.all_params[index]))
                self.kinds.append(SlotKind.NORMAL)
                self._order.append(slot)
        if trainable not in self._grouping_sets and len(self._grouping_sets) < MAX_GROUPING_SETS:
            self._grouping_sets.append(trainable)
        return range(known, len(self.params))

    def unseen(self, trainable: TrainableSet) -> bool:
        """Whether a parameter of the set has not had a gradient in any pass that taught the order."""
        return any(slot not in self._seen and self.is_in(slot, trainable) for slot in range(len(self)))

    def learn(self, positions: Sequence[float | None], repeated: Iterable[int]) -> None:
        """Takes in the order in which gradients became ready.

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

    def _group_of(self, slot: int) -> Hashable:
        """What slots that may share a bucket have in common."""
        index = self._index_of[slot]
        dtype = self.specs[slot].param_dtype if self._by_param_dtype else None
        return self.kinds[slot], tuple(members[index] for members in self._grouping_sets), str(dtype)

    def plan(self) -> Layout:
        """The layout for what is known now; the same on every rank that was told the same."""
        order = sorted(self._order, key=lambda slot: self.kinds[slot].value)
        groups = [self._group_of(slot) for slot in range(len(self))]
        return plan(
            self.specs,
            order,
            self._bucket_cap_bytes,
            groups,
            self._bucket_multiple,
            self._world_size,
            self._one_machine,
        )
