"""The order in which gradients become ready: learned in one pass, and shared between the ranks."""

from __future__ import annotations

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant, PassResult
from lightning_bucketddp.reducer.state import Origin, Pass


class OrderLearner(Participant):
    """Decides which passes teach the order, and tells the planner the order; the same on every rank.

    The ranks exchange, per slot, when its first gradient was ready. The planner gets the mean position.

    Args:
        table: The slots.
        planner: Plans layouts.
        collectives: The group.
        peers: The other ranks.
    """

    def __init__(self, table: SlotTable, planner: LayoutPlanner, collectives: Collectives, peers: Peers) -> None:
        self._table, self._planner = table, planner
        self._collectives, self._peers = collectives, peers
        self._teaches = planner.overlap
        self._opened: Pass | None = None
        self._position: dict[int, int] = {}  # of each slot's first gradient
        self._repeated: set[int] = set()  # slots with several gradients
        self._looked_at: set[TrainableSet] = set()
        self.lessons: list[tuple[list[float | None], list[int]]] = []  # of simple types, for checkpoints

    @property
    def follows_gradients(self) -> bool:
        """Whether the next pass teaches."""
        return self._teaches

    @property
    def reads_control(self) -> bool:
        """Whether this pass teaches. The ranks share its order only if none has failed."""
        return self._teaches

    def look_at(self, trainable: TrainableSet) -> None:
        """Let the next pass teach if the trainable set is new and has a parameter that was never seen."""
        if trainable not in self._looked_at:
            self._looked_at.add(trainable)
            self._teaches |= self._planner.overlap and self._planner.unseen(trainable)

    def learn(self, positions: list[float | None], repeated: list[int]) -> None:
        """Teach the planner, from a pass of this run or of one that goes on here. Takes what the planner takes.

        Sums of three ranks and more depend on the layout, and so on the order.
        """
        if len(positions) == len(self._table):  # else the other run had other trainable sets
            self.lessons.append((positions, repeated))
            self._planner.learn(positions, repeated)
            self._planner.due, self._teaches = True, False

    def opened(self, this_pass: Pass) -> None:
        """Forget an earlier pass that did not teach after all."""
        self._opened = this_pass
        self._position, self._repeated = {}, set()

    def ready(self, slot: int) -> None:
        """Note the position of the gradient."""
        if slot in self._position:
            self._repeated.add(slot)
        else:
            self._position[slot] = len(self._position)

    def use_reports(self, result: PassResult) -> None:
        """Share the order, and have buckets rebuilt. If no rank had a gradient, let the next pass teach."""
        if not self._teaches or self._opened is None or self._opened.origin is Origin.CALL:
            return
        slots = range(len(self._table))
        seen = [[self._position.get(slot, 0), slot in self._position, slot in self._repeated] for slot in slots]
        with self._peers.waiting_for("the order of readiness", Phase.PASS):
            summed = torch.tensor(seen, dtype=torch.int64).to(self._table.all_params[0].device)
            self._collectives.all_reduce_sum(summed.view(-1)).wait(self._peers.poll)
        positions = [total / ranks if ranks else None for total, ranks, _ in summed.tolist()]
        if any(position is not None for position in positions):
            self.learn(positions, [slot for slot, row in enumerate(summed.tolist()) if row[2]])
