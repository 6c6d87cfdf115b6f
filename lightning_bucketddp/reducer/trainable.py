"""The trainable set since the last reduction, and the set that the ranks agreed on."""

from __future__ import annotations

import hashlib

import torch

from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.diagnose import other_trainable
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase, Status
from lightning_bucketddp.reducer.participant import Participant

PROVED_PASSES = 64
"""After a change, how many passes begin with a proof. That costs about as much as one more exchange."""


class TrainableHistory(Participant):
    """Follows ``requires_grad`` from pass to pass, and has the ranks agree on every change.

    They agree on a change back to an earlier set too. A rank that changes alone would launch other buckets than the
    rest, which ends a gloo process on the spot and hangs NCCL.

    A change is agreed through the store: a rank that has not changed does not come, and no collective is paired with
    another one. Sets that have changed once may change again soon, as a GAN's do. So each of the next
    ``PROVED_PASSES`` passes begins with a proof, on every rank, whether its set has changed or not: a collective of one
    fingerprint per rank. Equal fingerprints prove equal sets, also of sets that are new. Others have all ranks meet in
    the store, which tells the parameter that differs. No set or step is remembered: ranks count passes alike.

    The proof travels between hosts, and is there before the first bucket is launched. Without a backend for the CPU
    (NCCL alone), every change goes through the store. A proof on the device would not do: if the host waits for it,
    the device runs dry; if not, the optimizer steps on gradients that are not proved, and NCCL does not define what
    buckets of other sizes end in.

    Args:
        ranks: The ranks.

    Attributes:
        since_reduction: The union of the sets of all passes since the last reduction; None before the first pass.
        agreed: The union that the ranks agreed on last.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._peers = ranks, ranks.peers

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Follow these parameters from now on. The ranks have agreed on the set that is trainable now."""
        self._table = table
        self._to_prove = 0  # this many of the next passes
        self._unproved: TrainableSet | None = None
        self.agreed = table.trainable_now()
        self.since_reduction: TrainableSet | None = None

    @property
    def follows_gradients(self) -> bool:
        """Whether nothing may be launched yet, as the set is still to be proved."""
        return self._unproved is not None

    def note(self, trainable: TrainableSet) -> TrainableSet:
        """Add the set of a pass, and return the union since the last reduction."""
        before = self.since_reduction
        if before is not None and before != trainable:
            trainable = tuple([a or b for a, b in zip(before, trainable, strict=True)])
        self.since_reduction = trainable
        return trainable

    def agree(self, trainable: TrainableSet, may_send: bool) -> bool:
        """Have all ranks agree on ``trainable``, if it is to be proved or is not the set that they agreed on last.

        A rank that has nothing to ask notes its set, so that an error can name the difference.

        Args:
            trainable: The union since the last reduction.
            may_send: Whether collectives of this pass may start now. If not, the proof waits for the end of backward.

        Returns:
            Whether the set has changed.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        self._peers.here.note_trainable(self._table.names, trainable)
        changed = trainable != self.agreed
        if self._to_prove:
            self._to_prove -= 1
            self._unproved = trainable
            if may_send:
                self.decide_layout()
        elif changed:
            self._ask(trainable)
        if changed:
            self.agreed = trainable
            self._to_prove = PROVED_PASSES if self._ranks.collectives.among_hosts else 0
        return changed

    def decide_layout(self) -> None:
        """Prove that all ranks have the same set, unless that is done.

        Raises:
            RankMismatchError: As :meth:`agree`.
        """
        trainable, self._unproved = self._unproved, None
        if trainable is None:
            return
        number, topic = self._peers.position.pass_number, self._topic()
        digest = hashlib.sha256(repr((self._peers.number, number, trainable)).encode()).digest()
        mine = int.from_bytes(digest[:7])  # a sum of int64 has room for it
        if len(set(self._ranks.numbers(mine, torch.device("cpu"), topic, Phase.ROOT))) > 1:
            self._ask(trainable)

    def _topic(self) -> str:
        return f"the trainable parameters of pass {self._peers.position.pass_number}"

    def _ask(self, trainable: TrainableSet) -> None:
        peers = self._peers
        with peers.failing():
            said = peers.exchange(self._topic(), "".join("01"[flag] for flag in trainable))
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
