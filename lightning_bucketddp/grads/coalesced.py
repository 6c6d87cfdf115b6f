"""``use_contiguous_buffers=False``: gradients stay where autograd put them, and are coalesced after backward."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage, Taken, take_from
from lightning_bucketddp.layout.plan import Layout


class Coalesced(Storage):
    """The storage of buckets that have memory only from the end of backward to the end of the pass.

    ``.grad`` stays the same tensor. The price: during the reduction gradients exist twice, they are copied twice, and
    nothing is reduced while backward runs.

    Args:
        table: The slots.
        buckets: The buckets.
        layout: The place of each slot during a reduction.

    Attributes:
        layout: The present layout.
    """

    def __init__(self, table: SlotTable, buckets: Buckets, layout: Layout) -> None:
        self._table, self._buckets = table, buckets
        self._nothing = torch.empty(0, device=table.all_params[0].device)
        self._buffers: GradBuffers | None = None
        self.lay_out(layout)

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot; none outside of a reduction."""
        return [] if self._buffers is None else self._buffers.views

    def lay_out(self, layout: Layout) -> None:
        """Move to another layout."""
        self.layout = layout
        self._buckets.forget()
        self._buckets.lay_out(layout, [self._nothing] * len(layout.buckets))

    def take(self, bucket: Bucket) -> Taken:
        """Look which gradients there are; they stay where they are."""
        if self._buffers is None:
            self._buffers = GradBuffers(self.layout)
            self._buckets.use([self._buffers.bucket_flat(bucket) for bucket in self.layout.buckets])
        taken = take_from(bucket)
        self._table.pending.difference_update(taken.absent)
        return taken

    def pack(self, bucket: Bucket, taken: Taken, scale: float | None, memory: Tensor | None = None) -> None:
        """Copy the gradients."""
        assert self._buffers is not None
        if memory is not None:
            self._buffers.pack_into(memory, self.layout.buckets[bucket.index], taken.slots, taken.grads)
            return
        self._buffers.pack(taken.slots, taken.grads, scale, bucket.flat)
        if taken.absent:
            torch._foreach_zero_([self.views[slot] for slot in taken.absent])

    def publish(self, bucket: Bucket) -> None:
        """Copy the reduced gradients of a bucket back."""
        slots, grads, _ = take_from(bucket)
        used = [(slot, grad) for slot, grad in zip(slots, grads, strict=True) if slot in self._table.pending]
        if used:
            torch._foreach_copy_([grad for _, grad in used], [self.views[slot] for slot, _ in used])

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """Copy the mean if another rank had a gradient, else leave ``.grad`` alone."""
        if used_elsewhere:
            param = self._table.params[slot]
            param.grad = self.views[slot].clone() if param.grad is None else param.grad.copy_(self.views[slot])

    def end(self, synchronised: bool) -> None:
        """End a pass, and free its memory."""
        self._buffers = None
        self._buckets.use([self._nothing] * len(self._buckets.all))

    def zero(self) -> None:
        """Set all gradients to zero, in place."""
        grads = [param.grad for param in self._table.params if param.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def release(self) -> None:
        """Free the memory of a pass that was not ended."""
        self._buffers = None
        self._buckets.forget()
