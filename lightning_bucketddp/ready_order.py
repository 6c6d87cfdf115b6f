"""The order in which gradients become ready, learned in one pass and shared between the ranks."""

from __future__ import annotations

from collections.abc import Callable

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

    def share(
        self, slots: int, collectives: Collectives, device: torch.device, on_idle: Callable[[], None]
    ) -> tuple[list[float | None], list[int]]:
        """Merges what the ranks saw. All ranks must call this.

        Args:
            slots: Number of slots.
            collectives: The group.
            device: The device whose tensors travel.
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.

        Returns:
            Per slot, its mean position over the ranks that had a gradient for it, None if none had; and the slots that
            had more than one gradient on some rank.
        """
        vector = torch.zeros(3, slots, dtype=torch.int64)
        for slot, position in self._positions.items():
            vector[0, slot] = position
            vector[1, slot] = 1
        for slot in self._repeated:
            vector[2, slot] = 1
        vector = vector.to(device)
        collectives.all_reduce_sum(vector).wait(on_idle)
        total, ranks, repeated = vector.tolist()
        positions = [at / seen if seen else None for at, seen in zip(total, ranks, strict=True)]
        return positions, [slot for slot in range(slots) if repeated[slot]]
