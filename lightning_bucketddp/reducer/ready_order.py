"""The order in which gradients become ready: learned in one pass, and shared between the ranks.

The ranks share it at the end of backward, before anything is launched. Buckets follow it from the next pass on. Shards
follow it at once, as they do not move when they hold gradients or optimizer state.
"""

from __future__ import annotations

import torch

from lightning_bucketddp.grads.bucket import MAX_REMEMBERED_SETS
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.state import Origin, Pass

Lesson = tuple[list[float | None], list[int], list[TrainableSet]]
"""Of each slot when its first gradient was ready; slots with several gradients; the sets that shape buckets."""


class OrderLearner(Participant):
    """Decides which passes teach the order, and tells the planner the order; the same on every rank.

    The ranks exchange, per slot, when its first gradient was ready. The planner gets the mean position.

    Args:
        ranks: The ranks.
        sharded: Whether shards lie in the buckets.

    Attributes:
        lessons: What was learned, in simple types, for checkpoints.
    """

    def __init__(self, ranks: Ranks, sharded: bool) -> None:
        self._ranks, self._sharded = ranks, sharded

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Learn the order of these parameters' gradients; nothing is known yet."""
        self._table, self._planner = table, planner
        self._teaches = planner.overlap
        self._opened: Pass | None = None
        self._position: dict[int, int] = {}  # of each slot's first gradient
        self._repeated: set[int] = set()  # slots with several gradients
        self._looked_at: set[TrainableSet] = set()
        self.lessons: list[Lesson] = []

    @property
    def follows_gradients(self) -> bool:
        """Whether the next pass teaches."""
        return self._teaches

    def look_at(self, trainable: TrainableSet) -> None:
        """Let the next pass teach if the trainable set is new and has a parameter that was never seen."""
        if trainable not in self._looked_at:
            if len(self._looked_at) >= MAX_REMEMBERED_SETS:
                self._looked_at.clear()
            self._looked_at.add(trainable)
            self._teaches |= self._planner.overlap and self._planner.unseen(trainable)

    def resume(self, lessons: list[Lesson]) -> None:
        """Learn what an earlier run has learned; the same on every rank, before optimizer state is loaded.

        Sums of three ranks and more depend on the layout, and so on the order.
        """
        for positions, repeated, sets in lessons:
            for trainable in sets:
                if len(trainable) == len(self._table.all_params) and not self._planner.knows(tuple(trainable)):
                    self._planner.add(tuple(trainable))
            self._learn(positions, repeated)

    def _learn(self, positions: list[float | None], repeated: list[int]) -> None:
        if len(positions) == len(self._table):  # else the other run had other trainable sets
            self.lessons.append((positions, repeated, self._planner.sets))
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

    def decide_layout(self) -> Layout | None:
        """Share the order, and learn it. If no rank had a gradient, let the next pass teach."""
        if self._opened is None or self._opened.origin is Origin.CALL:
            return None
        slots, settled = range(len(self._table)), self._planner.settled is not None
        seen = [[self._position.get(slot, 0), slot in self._position, slot in self._repeated] for slot in slots]
        with self._ranks.waiting_for("the order of gradients", Phase.PASS):  # for the device, too
            summed = torch.tensor([*seen, [settled, 0, 0]]).to(self._table.all_params[0].device)
            self._ranks.collectives.all_reduce_sum(summed.view(-1)).wait()
            *rows, (settled, _, _) = summed.tolist()
        positions = [total / ranks if ranks else None for total, ranks, _ in rows]
        if all(position is None for position in positions):
            return None
        if settled:  # by optimizer state that some rank has loaded
            self._planner.settle()
        self._learn(positions, [slot for slot, row in enumerate(rows) if row[2]])
        if not self._sharded:
            return None
        self._planner.due = False
        return self._planner.plan()

    def ended(self) -> None:
        """Let shards stay where they are, as gradients lie in them."""
        if self._sharded:
            self._planner.settle()
