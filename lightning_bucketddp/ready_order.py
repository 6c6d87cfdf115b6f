"""The order in which gradients become ready, learned in one pass and shared by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from lightning_bucketddp.collectives import Collectives


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

    def slots(self) -> Collection[int]:
        """The slots that had a gradient, earliest first."""
        return self._positions.keys()

    def share(
        self, slots: int, collectives: Collectives, device: torch.device, on_idle: Callable[[], None]
    ) -> tuple[list[int], list[int]]:
        """Gives every rank rank 0's order and everyone's repeated slots. All ranks must call this.

        Args:
            slots: Number of slots.
            collectives: The group.
            device: The device whose tensors travel.
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.

        Returns:
            Per slot, its position in rank 0's order (``slots`` for never); and the slots that had more than one
            gradient on some rank.
        """
        vector = torch.zeros(2 * slots, dtype=torch.int64)
        if collectives.rank == 0:
            for slot in range(slots):
                vector[slot] = self._positions.get(slot, slots)
        for slot in self._repeated:
            vector[slots + slot] = 1
        vector = vector.to(device)
        collectives.all_reduce_sum(vector).wait(on_idle)
        numbers = vector.tolist()
        return numbers[:slots], [slot for slot in range(slots) if numbers[slots + slot]]
