"""The module's parameters, and the slots of those that were trainable at some time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

import torch
from torch import nn

from lightning_bucketddp.layout.plan import ParamSpec

REQUIRES_GRAD = attrgetter("requires_grad")
"""Asks many tensors in less time than a loop does."""

attributes_only = torch._C.DisableTorchFunctionSubclass  # torch's documentation names it
"""A context for loops that read no values. Parameters that the lazy all-gather has yet to fill would else be asked in
Python, for each attribute."""

TrainableSet = tuple[bool, ...]
"""For each parameter of the module, in registration order, whether it requires grad."""


class SlotTable:
    """Numbers slots in the order in which their parameters became trainable.

    A slot keeps its number. Parameters with sparse gradients have no slot, nor have those that were unfrozen in a local
    pass and not agreed on yet.

    Args:
        named_params: All parameters of the module, each once, in registration order.
        sparse_names: The parameters whose gradients are sparse.

    Attributes:
        names: Names of all parameters.
        all_params: All parameters.
        index_of: The index in the module of each parameter, by its id.
        sparse: Indices of the parameters whose gradients are sparse.
        params: The parameter of each slot.
        specs: The specification of each slot.
        slot_of_index: The slot of each parameter that has one.
        pending: What has a gradient since its last reduction: slots, and ``~index`` for parameters without a slot.
    """

    def __init__(self, named_params: Sequence[tuple[str, nn.Parameter]], sparse_names: Collection[str] = ()) -> None:
        self.names = [name for name, _ in named_params]
        self.all_params = [param for _, param in named_params]
        self.index_of = {id(param): index for index, param in enumerate(self.all_params)}
        self.sparse = frozenset(index for index, name in enumerate(self.names) if name in sparse_names)
        self.params: list[nn.Parameter] = []
        self.specs: list[ParamSpec] = []
        self.slot_of_index: dict[int, int] = {}
        self.pending: set[int] = set()
        self._index_of: list[int] = []
        self.add(self.trainable_now())

    def __len__(self) -> int:
        return len(self.params)

    def slot_of(self, index: int) -> int | None:
        """The slot of the module's parameter at ``index``; None if it has none."""
        return self.slot_of_index.get(index)

    def trainable_now(self) -> TrainableSet:
        """The trainable set, from ``requires_grad`` at this moment."""
        with attributes_only():
            return tuple([param.requires_grad for param in self.all_params])

    def without_sparse(self, trainable: TrainableSet) -> TrainableSet:
        """The set without parameters whose gradients are sparse."""
        if not self.sparse:
            return trainable
        return tuple([flag and index not in self.sparse for index, flag in enumerate(trainable)])

    def is_in(self, slot: int, trainable: TrainableSet) -> bool:
        """Whether the set holds the parameter of ``slot``."""
        return trainable[self._index_of[slot]]

    def add(self, trainable: TrainableSet) -> None:
        """Give a slot to every dense parameter of the set that has none, in reverse registration order."""
        trainable = self.without_sparse(trainable)
        for index in reversed(range(len(trainable))):
            if trainable[index] and index not in self.slot_of_index:
                slot = self.slot_of_index[index] = len(self.params)
                if ~index in self.pending:
                    self.pending.remove(~index)
                    self.pending.add(slot)
                self._index_of.append(index)
                self.params.append(self.all_params[index])
                self.specs.append(ParamSpec.of(self.names[index], self.all_params[index]))

    def key(self, index: int) -> int:
        """What stands for the parameter at ``index`` in ``pending``."""
        return self.slot_of_index.get(index, ~index)

    def rename(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give parameters new names. Names of those that are gone stay."""
        names = {id(param): name for name, param in named_params}
        for index, param in enumerate(self.all_params):
            self.names[index] = names.get(id(param), self.names[index])
        for slot, index in enumerate(self._index_of):
            self.specs[slot] = replace(self.specs[slot], name=self.names[index])

    def pending_indices(self) -> set[int]:
        """The indices of the parameters with a gradient since their last reduction."""
        return {index for index in range(len(self.names)) if self.key(index) in self.pending}

    def pending_slots(self) -> set[int]:
        """The slots among ``pending``; this may be the set ``pending`` itself, so do not change it."""
        if len(self.params) == len(self.names):
            return self.pending
        return {key for key in self.pending if key >= 0}
