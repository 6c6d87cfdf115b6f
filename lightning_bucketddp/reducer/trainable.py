"""The trainable set since the last reduction, and the set that the ranks agreed on."""

from __future__ import annotations

from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.diagnose import other_trainable
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Status
from lightning_bucketddp.reducer.participant import Participant


class TrainableHistory(Participant):
    """Follows ``requires_grad`` from pass to pass, and has the ranks agree on every change.

    They agree on a change back to an earlier set too. A rank that changes alone would launch other buckets than the
    rest, which ends a gloo process on the spot and hangs NCCL.

    Args:
        slots: The module's parameters.
        peers: The other ranks.

    Attributes:
        since_reduction: The union of the sets of all passes since the last reduction; None before the first pass.
        agreed: The union that the ranks agreed on last.
    """

    def __init__(self, slots: SlotTable, peers: Peers) -> None:
        self._slots = slots
        self._peers = peers
        self.agreed = slots.trainable_now()
        self.since_reduction: TrainableSet | None = None

    def note(self, trainable: TrainableSet) -> TrainableSet:
        """Add the set of a pass, and return the union since the last reduction."""
        before = self.since_reduction
        if before is not None and before != trainable:
            trainable = tuple([a or b for a, b in zip(before, trainable, strict=True)])
        self.since_reduction = trainable
        return trainable

    def agree(self, trainable: TrainableSet) -> bool:
        """Have all ranks agree on ``trainable``, unless it is the set that they agreed on last.

        A rank that has nothing to ask notes its set, so that an error can name the difference.

        Args:
            trainable: The union since the last reduction.

        Returns:
            Whether the set has changed.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        peers = self._peers
        peers.here.note_trainable(self._slots.names, trainable)
        if trainable == self.agreed:
            return False
        with peers.failing():
            self._ask(trainable)
        self.agreed = trainable
        return True

    def _ask(self, trainable: TrainableSet) -> None:
        peers = self._peers
        topic = f"the trainable parameters of pass {peers.position.pass_number}"
        said = peers.exchange(topic, "".join("01"[flag] for flag in trainable))
        other = next((rank for rank, bits in enumerate(said) if bits != said[0]), None)
        if other is not None:
            first, second = (
                Status(rank, peers.position, trainable=[bit == "1" for bit in said[rank]], names=self._slots.names)
                for rank in (0, other)
            )
            raise RankMismatchError(f"rank {peers.rank}: {other_trainable(first, second)}")

    def ended(self) -> None:
        """Forget the passes before this reduction."""
        self.since_reduction = None
