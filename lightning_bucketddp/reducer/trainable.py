"""The trainable set since the last reduction, and the set that the ranks agreed on."""

from __future__ import annotations

from lightning_bucketddp.grads.bucket import MAX_REMEMBERED_SETS
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.diagnose import other_trainable
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Status
from lightning_bucketddp.reducer.participant import Participant

_Turn = tuple[int, TrainableSet]
"""How many passes a set stayed, and the set that followed."""

_ENDLESS: _Turn = (-1, ())


class TrainableHistory(Participant):
    """Follows ``requires_grad`` from pass to pass, and has the ranks agree on what nobody expects.

    A rank that changes alone would launch other buckets than the rest, which ends a gloo process on the spot and hangs
    NCCL. So ranks launch without asking only what all of them expect: a set stays for as many passes as last time, and
    the same one follows it as last time. What they expect follows from what they agreed on, so it is the same on every
    rank. A rank with another set asks in the store before it launches anything. If all ranks have that set, they meet
    there. If some have the expected one, they wait for its gradients while the others wait in the store, until the roll
    call finds that out and names the parameter that differs.

    So parts that are trained in turn, as a GAN's, meet in the store until their turns have come once. "Last time" is
    the last time that the set came after the set before it; if that is new, the last time that it came at all.

    Args:
        peers: The ranks.

    Attributes:
        since_reduction: The union of the sets of all passes since the last reduction; None before the first pass.
        agreed: The union that the ranks agreed on last.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Follow these parameters from now on. The ranks have agreed on the set that is trainable now."""
        self._table = table
        self.agreed = table.trainable_now()
        self._passes, self._before = 0, self.agreed  # how often it came in a row, and the set before it
        self._turns: dict[TrainableSet | tuple[TrainableSet, TrainableSet], _Turn] = {}
        self._expected = _ENDLESS
        self.since_reduction: TrainableSet | None = None

    def note(self, trainable: TrainableSet) -> TrainableSet:
        """Add the set of a pass, and return the union since the last reduction."""
        before = self.since_reduction
        if before is not None and before != trainable:
            trainable = tuple([a or b for a, b in zip(before, trainable, strict=True)])
        self.since_reduction = trainable
        return trainable

    def agree(self, trainable: TrainableSet) -> bool:
        """Have all ranks agree on ``trainable``, unless all expect it.

        A rank that has nothing to ask notes its set, so that an error can name the difference.

        Args:
            trainable: The union since the last reduction.

        Returns:
            Whether the set has changed.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        self._peers.here.note_trainable(self._table.names, trainable)
        last, follower = self._expected
        changed = trainable != self.agreed
        if trainable != follower if self._passes == last else changed:
            self._ask(trainable)
        if changed:
            if len(self._turns) >= MAX_REMEMBERED_SETS:
                self._turns.clear()
            self._turns[self._before, self.agreed] = self._turns[self.agreed] = self._passes, trainable
            self._passes, self._before, self.agreed = 0, self.agreed, trainable
            turns = self._turns
            self._expected = turns.get((self._before, trainable)) or turns.get(trainable, _ENDLESS)
        self._passes += 1
        return changed

    def _ask(self, trainable: TrainableSet) -> None:
        peers = self._peers
        with peers.failing():
            topic = f"the trainable parameters of pass {peers.position.pass_number}"
            said = peers.exchange(topic, "".join("01"[flag] for flag in trainable))
            other = next((rank for rank, bits in enumerate(said) if bits != said[0]), None)
            if other is not None:
                first, second = (
                    Status(rank, peers.position, trainable=[bit == "1" for bit in said[rank]], names=self._table.names)
                    for rank in (0, other)
                )
                raise RankMismatchError(f"rank {peers.rank}: {other_trainable(first, second)}")

    def ended(self) -> None:
        """Forget the passes before this reduction."""
        self.since_reduction = None
