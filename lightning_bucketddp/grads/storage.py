"""The interface between the reducer and the memory of gradients, and code that all implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.grads.slots import SlotTable, attributes_only
from lightning_bucketddp.layout.plan import Layout


class Taken(NamedTuple):
    """What a bucket's parameters held when it was launched.

    Attributes:
        slots: The slots with a gradient.
        grads: These gradients.
        absent: The slots without one. They contribute zeros.
    """

    slots: Sequence[int]
    grads: list[Tensor]
    absent: list[int]


class Storage(Protocol):
    """The memory of buckets.

    A slot contributes to a reduction its pending value, else its ``.grad``, else zeros. Old content of a buffer is
    never sent.

    Attributes:
        layout: The present layout.
    """

    layout: Layout
    _table: SlotTable

    def lay_out(self, layout: Layout) -> None:
        """Move to another layout of the same slots, or of more slots behind them. Gradients move along."""

    def open(self) -> None:
        """Prepare for a backward, before it adds to ``.grad``."""
        return

    def require_untouched(self, slot: int) -> None:
        """Require that nothing was added to the slot's ``.grad`` before :meth:`open`, if that matters."""
        return

    def gradient_ready(self, slot: int) -> None:
        """Note that a gradient is ready, in a pass in which gradients are not expected bucket by bucket."""
        return

    def pack_and_bind(self, slots: Sequence[int]) -> None:
        """Pack gradients before their bucket is launched, and bind their views: then no gradient exists twice."""
        return

    def take(self, bucket: Bucket) -> Taken:
        """Take a bucket's gradients out of ``.grad``, until they are published."""

    def pack(self, bucket: Bucket, taken: Taken, scale: float | None, memory: Tensor | None = None) -> None:
        """Bring what was taken into the bucket's memory, scaled. Another thread may call this.

        Args:
            bucket: The bucket.
            taken: What :meth:`take` has returned.
            scale: A factor; None for none.
            memory: Memory to bring it into instead: 1-D, at least as long as the bucket. Without a factor.

        Raises:
            RuntimeError: If a gradient does not fit into its view.
        """

    def publish(self, bucket: Bucket) -> None:
        """Bind a bucket's reduced gradients to the parameters with a gradient on this rank."""

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """Publish a slot without a gradient on this rank: the mean if another rank had one, else the old ``.grad``."""

    def end(self, synchronised: bool) -> None:
        """End a pass, or a backward that brought no gradient."""

    def abandon(self) -> None:
        """End a backward that raised and reduces nothing."""
        return

    def zero(self) -> None:
        """Set all gradients to zero, in place."""

    def bind_main_grads(self, bound: bool) -> None:
        """Give parameters their ``main_grad``, or take it away."""
        return

    def release(self) -> None:
        """Turn gradients into plain tensors, and give the buffers' memory back."""


def take_from(bucket: Bucket) -> Taken:
    """The present gradients of a bucket. ``zero_grad()`` may have dropped a pending one."""
    with attributes_only():
        grads = [param.grad for param in bucket.params]
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(grads):
        return Taken(bucket.slots, present, [])
    found = list(zip(bucket.slots, grads, strict=True))
    slots = [slot for slot, grad in found if grad is not None]
    return Taken(slots, present, [slot for slot, grad in found if grad is None])
