"""Where gradients lie: what the reducer knows of it, and what its implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.plan import Layout


class Storage(Protocol):
    """The memory of buckets. What a slot contributes to a reduction: its pending value, else its ``.grad``, else zeros.

    Stale content of a buffer never reaches the wire.
    """

    def abandon(self) -> None:
        """A backward has raised that reduces nothing, after :meth:`open`."""
        return

    @property
    def layout(self) -> Layout:
        """Where the gradients lie now."""

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot."""

    def lay_out(self, layout: Layout) -> bool:
        """Move to another layout of the same slots, possibly with more slots appended; gradients move along.

        Returns:
            Whether the storage has moved. False if it has to wait until gradients are cleared.
        """

    def open(self) -> None:
        """A backward is about to add to what is in ``.grad``."""
        return

    def require_untouched(self, slot: int) -> None:
        """Require that nothing was added to a gradient before :meth:`open`, where that matters."""
        return

    def arrived(self, slot: int) -> None:
        """A gradient has been made, on the current stream."""
        return

    def one_stream(self) -> bool:
        """Whether all gradients are made on one stream, which is known."""
        return True

    def hold(self, slots: Sequence[int]) -> None:
        """Pack gradients that do not travel yet and bind their views: they exist once, and autograd adds to them."""
        return

    def require_memory(self) -> None:
        """Make the memory of buckets, if there is none."""
        return

    def pack(self, bucket: Bucket, scale: float | None) -> None:
        """Bring a bucket's gradients into its memory, scaled, and hide them until they are published."""

    def publish(self, bucket: Bucket) -> None:
        """Bind the reduced gradients of a bucket to the parameters that had one on this rank."""

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """A slot without a gradient here: bind the mean if another rank had one, else what was there before."""

    def end(self, synchronised: bool) -> None:
        """A pass has ended, or a backward without a gradient."""

    def drop(self) -> None:
        """Let the gradients of a pass that failed be of no use.

        Pending ones are gone. Others stay what they were, outside of buffers with collectives under way or yet to come.
        """

    def zero(self) -> None:
        """Set all gradients to zero, in place."""

    def published_grad(self, slot: int) -> Tensor | None:
        """What lies in ``.grad``, as far as this rank holds it."""

    def bind_main_grads(self, bound: bool) -> None:
        """Give parameters their ``main_grad``, or take it away."""
        return

    def release(self) -> None:
        """Give gradients back as plain tensors, and the memory to the allocator."""


def gradients_of(bucket: Bucket, table: SlotTable) -> tuple[list[int], list[Tensor], list[int]]:
    """The slots of a bucket with a gradient, those gradients, and the slots without one."""
    params = table.params
    slots: list[int] = []
    grads: list[Tensor] = []
    absent: list[int] = []
    for slot in bucket.slots:
        grad = params[slot].grad
        if grad is None:
            absent.append(slot)
        else:
            slots.append(slot)
            grads.append(grad)
    return slots, grads, absent


def leave_out(absent: Sequence[int], views: Sequence[Tensor], buckets: Buckets) -> None:
    """Let slots without a gradient contribute zeros; if they had one, ``zero_grad()`` has dropped it."""
    if absent:
        buckets.pending.difference_update(absent)
        torch._foreach_zero_([views[slot] for slot in absent])


def first_uncleared(storage: Storage, table: SlotTable, buckets: Buckets) -> str | None:
    """The first parameter whose ``.grad`` is not zero and not what accumulated since the last reduction."""
    old = [
        (slot, grad)
        for slot in range(len(table))
        if slot not in buckets.pending and (grad := storage.published_grad(slot)) is not None and grad.numel()
    ]
    if not old:
        return None
    norms = torch.stack([norm.double() for norm in torch._foreach_norm([grad for _, grad in old])])
    for (slot, _), norm in zip(old, norms.tolist(), strict=True):
        if norm:
            return table.specs[slot].name
    return None
