"""The states of a reducer, and the facts of a pass that are known when it opens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from lightning_bucketddp.grads.slots import TrainableSet


class PassState(Enum):
    """Where a reducer is. ``TRANSITIONS`` lists what may follow."""

    IDLE = auto()
    """No backward is running."""
    LOCAL = auto()
    """A backward inside ``no_sync``: gradients accumulate, nothing is sent."""
    SYNCHRONISED = auto()
    """A backward whose gradients are reduced."""
    BROKEN = auto()
    """Backward raised on this rank in a synchronised pass. No collective has told the other ranks yet."""
    FAILED = auto()
    """The ranks cannot continue together. Every use raises."""
    CLOSED = auto()
    """The hooks are removed. Nothing is reduced any more."""


_ENDS = {PassState.FAILED, PassState.CLOSED}

TRANSITIONS = {
    PassState.IDLE: {PassState.IDLE, PassState.LOCAL, PassState.SYNCHRONISED} | _ENDS,
    PassState.LOCAL: {PassState.IDLE} | _ENDS,
    PassState.SYNCHRONISED: {PassState.IDLE, PassState.BROKEN} | _ENDS,
    PassState.BROKEN: {PassState.IDLE} | _ENDS,
    PassState.FAILED: _ENDS,
    PassState.CLOSED: _ENDS,
}


class Origin(Enum):
    """Who opens a pass."""

    GRADIENT = auto()
    """The first gradient of a plain backward that reached no output of ``forward``."""
    ROOT = auto()
    """A plain backward reached an output of ``forward``."""
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


@dataclass(frozen=True)
class Pass:
    """A pass, as known when it opens.

    Attributes:
        number: How many synchronised passes came before.
        synchronised: Whether its gradients are reduced.
        trainable: The parameters that were trainable since the last reduction, this pass included.
        origin: Who opened it.
        role: What this rank does in it.
        contributes: Whether it reduces gradients of this rank's own batches.
        sends_zeros: Whether this rank sends zeros in place of its gradients: the mean is that of the other ranks.
    """

    number: int
    synchronised: bool
    trainable: TrainableSet
    origin: Origin
    role: Role
    contributes: bool
    sends_zeros: bool = False
