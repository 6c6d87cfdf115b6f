"""Gradients in contiguous buffers. Each gradient exists once, and ``.grad`` is its view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_bucketddp.comm.lane import Streams, used_here
from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.grads.slots import SlotTable, attributes_only
from lightning_bucketddp.grads.storage import Storage, Taken, take_from
from lightning_bucketddp.layout.plan import Layout


class Contiguous(Storage):
    """The storage of buckets that tile contiguous buffers.

    Args:
        table: The slots.
        buckets: The buckets, which get their memory here.
        layout: The place of each slot.
        streams: The streams on which gradients are made.
        main_grads: Whether parameters whose gradients have another dtype get a ``main_grad``.
        all_main_grads: Whether all parameters get one then.

    Attributes:
        layout: The present layout.
        buffers: The flat tensors and the views.
    """

    def __init__(
        self,
        table: SlotTable,
        buckets: Buckets,
        layout: Layout,
        streams: Streams,
        main_grads: bool = True,
        all_main_grads: bool = False,
    ) -> None:
        self._table, self._buckets, self.layout, self._streams = table, buckets, layout, streams
        self._main_grads, self._all_main_grads = main_grads, all_main_grads
        self._pending_before: set[int] = set()  # as this pass began
        # Gradients from before the pass that are not pending; with a clone of the value if it lies in the view.
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.buffers = GradBuffers(layout)
        self._make_buckets()

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot."""
        return self.buffers.views

    # -- layout --------------------------------------------------------------------------------------

    def _make_buckets(self) -> None:
        buckets, buffers = self.layout.buckets, self.buffers
        with_control = {at: buffers.with_room(bucket) for at, bucket in enumerate(buckets) if bucket.room}
        self._buckets.lay_out(self.layout, [buffers.bucket_flat(bucket) for bucket in buckets], with_control)
        specs = self._table.specs if self._main_grads else []
        self._with_main_grad = frozenset(
            slot for slot, spec in enumerate(specs) if self._all_main_grads or spec.param_dtype is not None
        )
        self.bind_main_grads(True)

    def bind_main_grads(self, bound: bool) -> None:
        """Give parameters their ``main_grad``, or take it away."""
        for slot in self._with_main_grad:
            if bound:
                self._table.params[slot].main_grad = self.views[slot]  # type: ignore[attr-defined]
            else:
                self._table.params[slot].__dict__.pop("main_grad", None)

    def lay_out(self, layout: Layout) -> None:
        """Move to another layout. If no gradient is in the buffers, their memory is given back first."""
        self.bind_main_grads(False)
        self._buckets.forget()
        if layout != self.layout:
            moving, old = self._held(range(len(self.views))), self.buffers
            used_here(*old.flats)  # they were made on another stream
            if not moving:
                old.release()
            self.layout = layout
            self.buffers = GradBuffers(layout)
            for slot in moving:
                self._table.params[slot].grad = self.views[slot].copy_(old.views[slot])
        self._make_buckets()

    def _held(self, slots: Iterable[int]) -> list[int]:
        """The slots whose ``.grad`` lies in the buffers."""
        params, holds = self._table.params, self.buffers.holds
        return [slot for slot in slots if (grad := params[slot].grad) is not None and holds(slot, grad)]

    def release(self) -> None:
        """Turn gradients into plain tensors, and give the buffers' memory back."""
        for slot in self._held(range(len(self.views))):
            param = self._table.params[slot]
            param.grad = self.views[slot].to(param.grad_dtype, copy=True)  # `.data` may have another dtype by now
        self.bind_main_grads(False)
        self._buckets.forget()
        self._kept.clear()
        self.buffers.release()

    # -- gradients come ------------------------------------------------------------------------------

    def open(self) -> None:
        """Remember the gradients that are pending already."""
        self._pending_before = self._table.pending_slots().copy()

    def gradient_ready(self, slot: int) -> None:
        """Pack the gradient at once: gradients may pile up out of order."""
        self.pack_and_bind([slot])

    def pack_and_bind(self, slots: Sequence[int]) -> None:
        """Pack gradients before their bucket is launched, and bind their views."""
        params, pending, buffers = self._table.params, self._table.pending, self.buffers
        fresh = {
            slot: grad
            for slot in slots
            if slot in pending and (grad := params[slot].grad) is not None and not buffers.holds(slot, grad)
        }
        self._streams.wait_for(fresh.values())
        buffers.pack(list(fresh), list(fresh.values()))
        for slot in fresh:
            buffers.bind(slot, params[slot])

    def take(self, bucket: Bucket) -> Taken:
        """Take a bucket's gradients. Its parameters have no ``.grad`` until it is published.

        The loops run for every parameter in every pass.
        """
        pending, taken = self._table.pending, take_from(bucket)
        self._streams.wait_for(taken.grads)
        if not pending.issuperset(taken.slots):  # keep the others, should no rank have a gradient for them
            for slot, grad in zip(taken.slots, taken.grads, strict=True):
                if slot not in pending:
                    self._kept[slot] = (grad, grad.detach().clone() if self.buffers.holds(slot, grad) else None)
        with attributes_only():
            for param in bucket.params:
                param.grad = None
        pending.difference_update(taken.absent)
        return taken

    def pack(self, bucket: Bucket, taken: Taken, scale: float | None, memory: Tensor | None = None) -> None:
        """Bring gradients into the buffer."""
        if memory is not None:
            self.buffers.pack_into(memory, self.layout.buckets[bucket.index], taken.slots, taken.grads)
            return
        self.buffers.pack(taken.slots, taken.grads, scale, bucket.flat)
        if taken.absent:
            torch._foreach_zero_([self.buffers.view(slot) for slot in taken.absent])

    # -- gradients are there -------------------------------------------------------------------------

    def publish(self, bucket: Bucket) -> None:
        """Bind the views of slots with a gradient on this rank."""
        views, pending = self.views, self._table.pending
        try:
            for slot, param in zip(bucket.slots, bucket.params, strict=True):
                if slot in pending:
                    view = views[slot]
                    if slot in self._with_main_grad and param.grad_dtype is not view.dtype:
                        self.buffers.bind(slot, param)
                    else:
                        param.grad = view
        except RuntimeError:  # the parameter has got another shape or device since it was wrapped
            self.buffers.require_fits(bucket.slots, [param.detach() for param in bucket.params])
            raise

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """Bind the mean if another rank had a gradient, else put the old gradient back."""
        if used_elsewhere:
            self.buffers.bind(slot, self._table.params[slot])
        elif slot in self._kept:
            grad, value = self._kept[slot]
            if value is not None:
                grad.copy_(value)
                used_here(value)
            self._table.params[slot].grad = grad

    def end(self, synchronised: bool) -> None:
        """End a pass. A local one leaves all its gradients in the buffers."""
        if not synchronised:
            # With main_grad all of them: the user may read it after zero_grad() has dropped the gradient.
            pending = self._table.pending_slots()
            self.pack_and_bind(sorted(pending if self._with_main_grad else pending - self._pending_before))
        self._kept.clear()
        self._streams.forget()

    def zero(self) -> None:
        """Set all gradients to zero, with one fill per buffer."""
        for flat in self.buffers.flats:
            flat.zero_()
        for slot, param in enumerate(self._table.params):
            if param.requires_grad:
                self.buffers.bind(slot, param)
            elif param.grad is not None:
                param.grad.zero_()
