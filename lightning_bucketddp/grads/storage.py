"""The interface between the reducer and the memory of gradients, and code that all implementations share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.plan import Layout


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
        """Note that a gradient is ready, on the current stream."""
        return

    def one_stream(self) -> bool:
        """Whether all gradients are made on one stream, as far as is known. False if nothing is known."""
        return True

    def hold(self, slots: Sequence[int]) -> None:
        """Pack gradients before their bucket is launched, and bind their views: then no gradient exists twice."""
        return

    def pack_early(self, slot: int, scale: float | None) -> None:
        """Pack a gradient that is ready before its bucket is launched, and hide it, if that saves time.

        Args:
            slot: The slot.
            scale: As for :meth:`packing`.
        """
        return

    def require_memory(self) -> None:
        """Make the memory of buckets, if there is none."""
        return

    def packing(self, bucket: Bucket, scale: float | None, into: Tensor | None = None) -> Callable[[], None]:
        """Hide a bucket's gradients until they are published.

        Args:
            bucket: The bucket.
            scale: A factor; None for none.
            into: Memory to bring them into instead: 1-D, at least as long as the bucket. Without a factor.

        Returns:
            The function that brings them into the bucket's memory, scaled. Another thread may call it.

        Raises:
            RuntimeError: If a gradient does not fit into its view. The function may raise it too.
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

    def drop(self) -> None:
        """Discard the pending gradients of a failed pass.

        Other gradients keep their values, outside of buffers whose collectives are under way or will be.
        """

    def zero(self) -> None:
        """Set all gradients to zero, in place."""

    def bind_main_grads(self, bound: bool) -> None:
        """Give parameters their ``main_grad``, or take it away."""
        return

    def release(self) -> None:
        """Turn gradients into plain tensors, and give the buffers' memory back."""


def gradients_of(bucket: Bucket) -> tuple[Sequence[int], list[Tensor], set[int]]:
    """The bucket's slots with a gradient, these gradients, and its slots without one."""
    grads = [param.grad for param in bucket.params]
    absent = {slot for slot, grad in zip(bucket.slots, grads, strict=True) if grad is None}
    slots = [slot for slot in bucket.slots if slot not in absent] if absent else bucket.slots
    return slots, [grad for grad in grads if grad is not None], absent


def leaving_out(
    absent: Collection[int], views: Callable[[int], Tensor], buckets: Buckets, pack: Callable[[], None]
) -> Callable[[], None]:
    """Let slots without a gradient contribute zeros, after ``pack``.

    If one is pending, ``zero_grad()`` has dropped its gradient.
    """
    if not absent:
        return pack
    buckets.pending.difference_update(absent)
    empty = [*map(views, absent)]

    def pack_and_clear() -> None:
        pack()
        torch._foreach_zero_(empty)

    return pack_and_clear
