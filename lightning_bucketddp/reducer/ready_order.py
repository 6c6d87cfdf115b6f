"""The order in which gradients become ready, learned in one pass and shared between the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet

MAX_LEARNED_SETS = 64
"""Trainable sets whose first pass teaches the order of what was never seen before."""


class ReadyOrder:
    """What one pass showed: when each slot's first gradient came, and which slots had more than one."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        self._repeated: set[int] = set()

    def arrived(self, slot: int) -> None:
        """A gradient of ``slot`` has come."""
        if slot in self._positions:
            self._repeated.add(slot)
        else:
            self._positions[slot] = len(self._positions)

    def share(
        self, slots: int, collectives: Collectives, device: torch.device, on_idle: Callable[[], None], conclusive: bool
    ) -> tuple[list[float | None], list[int], bool]:
        """Merges what the ranks saw. All ranks must call this.

        Args:
            slots: Number of slots.
            collectives: The group.
            device: The device whose tensors travel.
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.
            conclusive: Whether this rank has seen a pass as later ones are.

        Returns:
            Per slot, its mean position over the ranks that had a gradient for it, None if none had; the slots that had
            more than one gradient on some rank; and whether the pass was conclusive on any.
        """
        vector = torch.zeros(3, slots + 1, dtype=torch.int64)
        for slot, position in self._positions.items():
            vector[0, slot] = position
            vector[1, slot] = 1
        for slot in self._repeated:
            vector[2, slot] = 1
        vector[:, slots] = int(conclusive)
        vector = vector.to(device)
        collectives.all_reduce_sum(vector).wait(on_idle)
        total, ranks, repeated = vector.tolist()
        positions = [at / seen if seen else None for at, seen in zip(total[:slots], ranks[:slots], strict=True)]
        return positions, [slot for slot in range(slots) if repeated[slot]], repeated[slots] > 0


class OrderLearner:
    """Decides which passes teach the order, and tells the slot table what they taught; the same on every rank.

    Args:
        slots: The slots.
        collectives: The group.
        enabled: Whether the order is of any use.
    """

    def __init__(self, slots: SlotTable, collectives: Collectives, enabled: bool) -> None:
        self._slots = slots
        self._collectives = collectives
        self._enabled = enabled
        self._order = ReadyOrder() if enabled else None
        self._looked_at: set[TrainableSet] = set()

    @property
    def learning(self) -> bool:
        """Whether the present pass teaches."""
        return self._order is not None

    def would_learn_from(self, trainable: TrainableSet) -> bool:
        """Whether the first pass of a trainable set is to teach."""
        if trainable in self._looked_at or len(self._looked_at) == MAX_LEARNED_SETS:
            return False
        return self._enabled and self._slots.unseen(trainable)

    def look_at(self, trainable: TrainableSet) -> None:
        """A new trainable set: its first pass teaches if it has a parameter that was never seen."""
        if self.would_learn_from(trainable):
            self._order = ReadyOrder()
        if len(self._looked_at) < MAX_LEARNED_SETS:
            self._looked_at.add(trainable)

    def arrived(self, slot: int) -> None:
        """A gradient of ``slot`` has come in a pass that teaches."""
        assert self._order is not None
        self._order.arrived(slot)

    def start_again(self) -> None:
        """The pass has failed: another one is to teach."""
        if self._order is not None:
            self._order = ReadyOrder()

    def learn(self, device: torch.device, on_idle: Callable[[], None], conclusive: bool = True) -> bool:
        """Takes in what this pass showed. All ranks must call this.

        Args:
            device: The device whose tensors travel.
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.
            conclusive: Whether gradients came as often on this rank as they may in later passes. If on none, the next
                pass teaches too.

        Returns:
            Whether there was anything to learn, so that the layout is to be planned anew.
        """
        assert self._order is not None
        positions, repeated, conclusive = self._order.share(
            len(self._slots), self._collectives, device, on_idle, conclusive
        )
        if not conclusive or all(position is None for position in positions):
            self._order = ReadyOrder()
            return False
        self._slots.learn(positions, repeated)
        self._order = None
        return True
