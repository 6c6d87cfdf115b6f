"""The order in which gradients become ready, learned in one pass and shared between the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant, Settled
from lightning_bucketddp.reducer.state import Origin, Pass

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


class OrderLearner(Participant):
    """Decides which passes teach the order, and tells the planner what they taught; the same on every rank.

    Args:
        table: The slots.
        planner: Plans layouts.
        collectives: The group.
        peers: The other ranks.
    """

    def __init__(self, table: SlotTable, planner: LayoutPlanner, collectives: Collectives, peers: Peers) -> None:
        self._table, self._planner = table, planner
        self._collectives, self._peers = collectives, peers
        self._order = ReadyOrder() if planner.overlap else None
        self._looked_at: set[TrainableSet] = set()
        self._opened: Pass | None = None

    @property
    def follows_gradients(self) -> bool:
        """Whether the next pass teaches."""
        return self._order is not None

    @property
    def reads_control(self) -> bool:
        """Whether this pass teaches: no rank may have failed before it is shared."""
        return self._order is not None

    def look_at(self, trainable: TrainableSet) -> None:
        """A new trainable set: its first pass teaches if it has a parameter that was never seen."""
        if trainable in self._looked_at or len(self._looked_at) == MAX_LEARNED_SETS:
            return
        self._looked_at.add(trainable)
        if self._planner.overlap and self._planner.unseen(trainable):
            self._order = ReadyOrder()

    def opened(self, it: Pass) -> None:
        """Remember what kind of pass it is."""
        self._opened = it

    def ready(self, slot: int) -> None:
        """Note when the gradient has come, in a synchronised pass."""
        if self._order is not None and self._opened is not None and self._opened.synchronised:
            self._order.arrived(slot)

    def dropped(self) -> None:
        """Another pass is to teach."""
        if self._order is not None:
            self._order = ReadyOrder()

    def settle(self, settled: Settled) -> None:
        """Take in what this pass has shown on all ranks. If it was conclusive on none, the next pass teaches too."""
        it = self._opened
        if self._order is None or it is None or it.origin is Origin.CALL:  # which teaches nothing
            return
        with self._peers.waiting_for("the order of readiness", Phase.PASS):
            positions, repeated, conclusive = self._order.share(
                len(self._table),
                self._collectives,
                self._table.all_params[0].device,
                self._peers.poll,
                it.shown,
            )
        if not conclusive or all(position is None for position in positions):
            self._order = ReadyOrder()
            return
        self._planner.learn(positions, repeated)
        self._planner.due = True
        self._order = None
