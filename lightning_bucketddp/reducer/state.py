"""The states of a reducer, and a pass: what is known when it opens, and how far it has come."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import is_

from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket, BucketProgress, Buckets
from lightning_bucketddp.grads.slots import REQUIRES_GRAD, SlotTable, TrainableSet, attributes_only
from lightning_bucketddp.peers.control import ControlExchange


class PassState(Enum):
    """Where a reducer is. ``TRANSITIONS`` lists what may follow."""

    IDLE = auto()
    """No backward is running."""
    LOCAL = auto()
    """A backward inside ``no_sync``: gradients accumulate, nothing is sent."""
    SYNCHRONISED = auto()
    """A backward whose gradients are reduced."""
    CLOSED = auto()
    """The hooks are removed. Nothing is reduced any more."""


TRANSITIONS = {
    PassState.IDLE: {PassState.IDLE, PassState.LOCAL, PassState.SYNCHRONISED, PassState.CLOSED},
    PassState.LOCAL: {PassState.IDLE, PassState.CLOSED},
    PassState.SYNCHRONISED: {PassState.IDLE, PassState.CLOSED},
    PassState.CLOSED: {PassState.CLOSED},
}


class Origin(Enum):
    """Who opens a pass."""

    BACKWARD = auto()
    """A plain backward: its first gradient, or an output of ``forward`` that it reached."""
    CONTEXT = auto()
    """``backward_pass()``. Its caller sees an exception of backward."""
    CALL = auto()
    """A reduction by hand, without a backward."""


class Role(Enum):
    """What this rank does in passes."""

    ACTIVE = auto()
    """It trains."""
    JOINED = auto()
    """It has run out of data. It takes part in collectives, and its gradients do not count."""


class Contribution(Enum):
    """What this rank's part in a reduction consists of."""

    OWN = auto()
    """Gradients of its own batches, of this pass or of local passes before it."""
    EARLIER = auto()
    """Only what earlier reductions have left in ``.grad``, which the other ranks have too."""
    ZERO = auto()
    """Zeros: the mean is that of the other ranks."""


@dataclass(slots=True, eq=False)
class Pass:
    """A pass.

    Attributes:
        number: How many synchronised passes came before.
        synchronised: Whether its gradients are reduced.
        trainable: The parameters that were trainable since the last reduction, this pass included.
        origin: Who opened it.
        role: What this rank does in it.
        contribution: What this rank reduces.
        in_order: Whether gradients are expected bucket by bucket.
        followed: Whether participants follow its gradients one by one.
        buckets: All buckets, by index.
        active: The buckets that it reduces, in launch order; none in a local pass.
        launched: Number of active buckets that were launched.
        awaited: The bucket that this rank waits for now.
        recorded: The parameters whose hooks have recorded gradients that are not marked as ready yet.
        notify_after: With this many recorded gradients a bucket may be full: the reducer is notified.
        exchange: Its control vector, once that is on its way.
        weight: The factor of this rank's gradients in the sum over the ranks; None for 1.
        dropped: Whether its gradients are dropped instead of published. A participant decides, the same on every rank.
    """

    number: int
    synchronised: bool
    trainable: TrainableSet
    origin: Origin
    role: Role
    contribution: Contribution
    in_order: bool = False
    followed: bool = False
    buckets: Sequence[BucketProgress] = ()
    active: Sequence[BucketProgress] = ()
    launched: int = 0
    awaited: Bucket | None = None
    recorded: list[Tensor] = field(default_factory=list)
    notify_after: int = 1
    exchange: ControlExchange | None = None
    weight: int | None = None
    dropped: bool = False

    @property
    def contributes_zeros(self) -> bool:
        """Whether this rank reduces zeros, whatever its gradients are: those of no samples may be NaN."""
        return self.contribution is Contribution.ZERO or self.weight == 0

    @property
    def batched(self) -> bool:
        """Whether recorded gradients are marked several at a time, as buckets become full."""
        return self.in_order or not self.synchronised

    def use(self, buckets: Buckets, trainable: TrainableSet) -> None:
        """Expect gradients in these buckets, and reduce the active ones.

        Args:
            buckets: The buckets.
            trainable: The parameters that may get a gradient now.
        """
        self.in_order = buckets.batches and not self.followed
        self.buckets = buckets.begin(trainable)
        if self.synchronised:
            self.active = [self.buckets[index] for index in buckets.active(self.trainable)]

    def next_to_launch(self) -> BucketProgress | None:
        """The bucket to launch next; None if all were launched."""
        return self.active[self.launched] if self.launched < len(self.active) else None

    def next_full(self) -> BucketProgress | None:
        """The bucket to launch next, if it is full and need not wait for the end of backward."""
        progress = self.next_to_launch()
        if progress is None or progress.missing or progress.bucket.held_back or self.carries_control(progress):
            return None
        return progress

    def carries_control(self, progress: BucketProgress) -> bool:
        """Whether the control vector, final after backward, travels behind this bucket: the last, and with room."""
        return progress.bucket.flat_with_control is not None and progress is self.active[-1]

    def launch_packs(self, progress: BucketProgress) -> bool:
        """Whether its launch packs a full bucket: it was launched, or is next and only awaits the control vector."""
        return progress.launched or (progress is self.next_to_launch() and self.carries_control(progress))

    def awaiting(self) -> Iterator[BucketProgress]:
        """Yield each active bucket to a caller that waits for it, and note it in ``awaited``."""
        for progress in self.active:
            self.awaited = progress.bucket
            yield progress
        self.awaited = None

    def under_way(self) -> bool:
        """Whether some launched reductions have not been waited for."""
        return any(not progress.work.done() for progress in self.active)

    def missing(self) -> list[int]:
        """The slots without a gradient in this pass so far, in launch order."""
        return [slot for progress in self.active for slot in sorted(progress.missing)]

    def update_notify_after(self, index: int) -> None:
        """Notify the reducer when the bucket at ``index`` may be full, or the next one if that is full now."""
        if self.batched:
            counts = (len(progress.missing) for progress in self.buckets[index:] if progress.missing)
            self.notify_after = next(counts, sys.maxsize)

    def completed_by(self, params: list[Tensor], table: SlotTable, of_slot: Sequence[int]) -> BucketProgress | None:
        """The bucket whose missing gradients are those of these parameters, if they are its last ones in order."""
        slot = table.slot_of_index.get(table.index_of[id(params[0])]) if params else None
        if slot is None:
            return None
        progress, count = self.buckets[of_slot[slot]], len(params)
        bucket, missing = progress.bucket, progress.missing
        if progress.launched or len(missing) != count or not missing.issuperset(bucket.slots[-count:]):
            return None
        in_order = all(map(is_, params, bucket.params[-count:]))
        with attributes_only():
            return progress if in_order and all(map(REQUIRES_GRAD, params)) else None
