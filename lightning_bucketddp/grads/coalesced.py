"""Buckets without memory of their own: gradients stay where autograd put them, and are coalesced after backward."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage, gradients_of, leave_out
from lightning_bucketddp.layout.plan import Layout


class Coalesced(Storage):
    """The storage of buckets whose memory exists from the end of backward to the end of the pass.

    ``.grad`` stays the tensor that it is. In exchange gradients are there twice during the reduction, are copied
    twice, and nothing is reduced while backward runs.

    Args:
        table: The slots.
        buckets: The buckets.
        layout: Where each slot lies during a reduction.
    """

    def __init__(self, table: SlotTable, buckets: Buckets, layout: Layout) -> None:
        self._table, self._buckets = table, buckets
        self._nothing = torch.empty(0, device=table.all_params[0].device)
        self._buffers: GradBuffers | None = None
        self._layout = layout
        self.lay_out(layout)

    @property
    def layout(self) -> Layout:
        """Where the gradients lie during a reduction."""
        return self._layout

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot, during a reduction."""
        return [] if self._buffers is None else self._buffers.views

    def lay_out(self, layout: Layout) -> bool:
        """Move to another layout; see the protocol."""
        self._buckets.forget()
        self._layout = layout
        self._buckets.lay_out(layout, [self._nothing] * len(layout.buckets))
        return True

    def require_memory(self) -> None:
        """Make the memory of buckets, if there is none."""
        if self._buffers is None:
            self._buffers = GradBuffers(self._layout)
            for it, place in zip(self._buckets.all, self._layout.buckets, strict=True):
                it.flat = self._buffers.bucket_flat(place)

    def pack(self, bucket: Bucket, scale: float | None) -> None:
        """Copy a bucket's gradients together, scaled."""
        self.require_memory()
        assert self._buffers is not None
        slots, grads, absent = gradients_of(bucket, self._table)
        self._buffers.pack(slots, grads, scale, bucket.flat)
        leave_out(absent, self._buffers.views, self._buckets)

    def publish(self, bucket: Bucket) -> None:
        """Write reduced gradients of a bucket back."""
        slots, grads, _ = gradients_of(bucket, self._table)
        pending, views = self._buckets.pending, self.views
        pairs = [(grad, views[slot]) for slot, grad in zip(slots, grads, strict=True) if slot in pending]
        if pairs:
            torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """Write the mean if another rank had a gradient; else leave what is there."""
        param = self._table.params[slot]
        if not used_elsewhere:
            return
        if param.grad is None:
            param.grad = self.views[slot].clone()
        else:
            param.grad.copy_(self.views[slot])

    def published_grad(self, slot: int) -> Tensor | None:
        """The gradient of a slot."""
        return self._table.params[slot].grad

    def end(self, synchronised: bool) -> None:
        """A pass has ended: its memory is free."""
        if self._buffers is None:
            return
        for bucket in self._buckets.all:
            bucket.flat = self._nothing
        self._buffers = None

    def drop(self) -> None:
        """Drop pending gradients."""
        for slot in self._buckets.pending:
            self._table.params[slot].grad = None

    def zero(self) -> None:
        """Set all gradients that are there to zero."""
        grads = [param.grad for param in self._table.params if param.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def release(self) -> None:
        """Free the memory of a pass that was not ended."""
        self.end(synchronised=True)
        self._buckets.forget()
