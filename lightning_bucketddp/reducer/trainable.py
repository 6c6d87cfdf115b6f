"""Which parameters were trainable since the last reduction, and what the ranks agreed on."""

from __future__ import annotations

from collections.abc import Callable

from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.peers.agreement import Agreement


class TrainableHistory:
    """Follows ``requires_grad`` from pass to pass, and has every change agreed between the ranks.

    A change back to an earlier set is agreed too: a rank that changes alone would launch other buckets than the rest,
    which ends a gloo process on the spot and hangs NCCL.

    Args:
        slots: The module's parameters.
        agreement: The group's store.

    Attributes:
        since_reduction: The union of the sets of all passes since the last reduction; None if there was no pass.
        agreed: The union that the ranks agreed on last.
    """

    def __init__(self, slots: SlotTable, agreement: Agreement) -> None:
        self._slots = slots
        self._agreement = agreement
        self.agreed = slots.trainable_now()
        self.since_reduction: TrainableSet | None = None
        self._changes = 0

    def note(self, trainable: TrainableSet) -> TrainableSet:
        """Adds the set of a pass, and returns the union since the last reduction."""
        self.since_reduction = self.including(trainable)
        return self.since_reduction

    def including(self, trainable: TrainableSet) -> TrainableSet:
        """The union since the last reduction, with one set more."""
        before = self.since_reduction
        if before is None or before == trainable:
            return trainable
        return tuple([a or b for a, b in zip(before, trainable, strict=True)])

    def agree(self, trainable: TrainableSet, pass_number: int, on_idle: Callable[[], None]) -> bool:
        """Makes sure that all ranks go from the set agreed last to ``trainable``; asks them if it is another.

        Args:
            trainable: The union since the last reduction.
            pass_number: Which synchronised pass.
            on_idle: Called now and then while waiting; an exception it raises ends the wait.

        Returns:
            Whether the set has changed.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        if trainable == self.agreed:
            return False
        self._changes += 1
        self._agreement.require_same_trainable(pass_number, self._changes, trainable, self._slots.names, on_idle)
        self.agreed = trainable
        return True

    def answer(self, pass_number: int) -> None:
        """Tells a rank that asks about a pass, in which this one has found nothing to ask, what is trainable here.

        Args:
            pass_number: The synchronised pass that this rank is in.

        Raises:
            RankMismatchError: If a rank asks.
        """
        self._agreement.answer_trainable(pass_number, self._changes + 1, self.agreed, self._slots.names)

    def reduced(self) -> None:
        """A synchronised pass has ended."""
        self.since_reduction = None
