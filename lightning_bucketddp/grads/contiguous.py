"""Gradients in contiguous buffers. Each gradient exists once, and ``.grad`` is its view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage, gradients_of, leaving_out
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.control import HEADER


class Contiguous(Storage):
    """The storage of buckets that tile contiguous buffers.

    Args:
        table: The slots.
        buckets: The buckets, which get their memory here.
        layout: The place of each slot.
        main_grads: Whether parameters whose gradients have another dtype get a ``main_grad``.
        all_main_grads: Whether all parameters get one then.
        largest_carrier: The last bucket has room for the control vector if it has fewer bytes than this, and its dtype
            is exact enough.

    Attributes:
        layout: The present layout.
        buffers: The flat tensors and the views.
    """

    def __init__(
        self,
        table: SlotTable,
        buckets: Buckets,
        layout: Layout,
        main_grads: bool = True,
        all_main_grads: bool = False,
        largest_carrier: float = 0,
    ) -> None:
        self._table, self._buckets, self.layout = table, buckets, layout
        self._main_grads, self._all_main_grads, self._largest_carrier = main_grads, all_main_grads, largest_carrier
        on_cpu = all(param.device.type == "cpu" for param in table.all_params)
        self._streams: set[torch.Stream] | None = None if on_cpu else set()  # on which gradients were made
        self._pending_before: set[int] = set()  # as this pass began
        # Gradients from before the pass that are not pending; with a clone of the value if it lies in the view.
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._packed: set[int] = set()  # early, in this pass
        self._make_buffers()
        self._make_buckets()

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot."""
        return self.buffers.views

    # -- layout --------------------------------------------------------------------------------------

    def _make_buffers(self) -> None:
        """Make buffers with room for the control vector behind the last bucket, on all ranks alike."""
        self._tail = 0
        if self._streams is None and self.layout.buckets:
            last = self.layout.buckets[-1]
            exact = self.layout.buffers[last.buffer].dtype in (torch.float32, torch.float64)
            if exact and self.layout.bucket_nbytes(last) < self._largest_carrier:
                self._tail = HEADER + len(self.layout.slots)
        self.buffers = GradBuffers(self.layout, self._tail)

    def _make_buckets(self) -> None:
        buckets, buffers = self.layout.buckets, self.buffers
        with_tail = buffers.flats[buckets[-1].buffer][buckets[-1].start :] if self._tail else None
        self._buckets.lay_out(self.layout, [buffers.bucket_flat(bucket) for bucket in buckets], with_tail)
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
            if not moving:
                old.release()
            self.layout = layout
            self._make_buffers()
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
        self._pending_before = self._buckets.pending.copy()
        self._packed.clear()

    def gradient_ready(self, slot: int) -> None:
        """Remember the gradient's stream. Pack it at once if gradients may pile up out of order."""
        if self._streams is not None:
            self._streams.add(torch.accelerator.current_stream(self._table.params[slot].device))
        if not self._buckets.in_order:
            self.hold([slot])

    def one_stream(self) -> bool:
        """Whether all gradients are made on one stream, as far as is known. False if nothing is known."""
        return self._streams is None or len(self._streams) == 1

    def _wait_for_streams(self, grads: Sequence[Tensor]) -> None:
        """Let the current stream read gradients that were made on other streams."""
        for stream in self._streams or ():
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
                for grad in grads:  # their memory must not be used again before they have been copied
                    grad.record_stream(torch.accelerator.current_stream(grad.device))

    def hold(self, slots: Sequence[int]) -> None:
        """Pack gradients before their bucket is launched, and bind their views."""
        params, pending, buffers = self._table.params, self._buckets.pending, self.buffers
        fresh = {
            slot: grad
            for slot in slots
            if slot in pending and (grad := params[slot].grad) is not None and not buffers.holds(slot, grad)
        }
        self._wait_for_streams(list(fresh.values()))
        buffers.packing(list(fresh), list(fresh.values()))()
        for slot in fresh:
            buffers.bind(slot, params[slot])

    def pack_early(self, slot: int, scale: float | None) -> None:
        """Bring a gradient into its view. A second one in the same pass is added."""
        param = self._table.params[slot]
        grad = param.grad
        if grad is None or slot not in self._buckets.pending:
            return
        if slot in self._packed:
            self.views[slot].add_(grad.detach(), alpha=1.0 if scale is None else scale)
        else:
            self.buffers.packing([slot], [grad], scale)()
            self._packed.add(slot)
        param.grad = None

    def packing(self, bucket: Bucket, scale: float | None, into: Tensor | None = None) -> Callable[[], None]:
        """Take a bucket's gradients. Its parameters have no ``.grad`` until it is published.

        The loops run for every parameter in every pass.
        """
        pending = self._buckets.pending
        early = self._packed.intersection(bucket.slots) if self._packed else ()
        slots, grads, absent = gradients_of(bucket)
        absent.difference_update(early)
        self._wait_for_streams(grads)
        if not pending.issuperset(slots):  # keep the others, should no rank have a gradient for them
            for slot, grad in zip(slots, grads, strict=True):
                if slot not in pending:
                    self._kept[slot] = (grad, grad.detach().clone() if self.buffers.holds(slot, grad) else None)
        if into is None:
            pack = self.buffers.packing(slots, grads, scale, None if early else bucket.flat)
        else:
            pack = self.buffers.packing_into(into, self.layout.buckets[bucket.index], slots, grads)
        for param in bucket.params:
            param.grad = None
        return leaving_out(absent, self.buffers.view, self._buckets, pack)

    # -- gradients are there -------------------------------------------------------------------------

    def publish(self, bucket: Bucket) -> None:
        """Bind the views of slots with a gradient on this rank."""
        views, pending = self.views, self._buckets.pending
        try:
            for slot, param in zip(bucket.slots, bucket.params, strict=True):
                if slot in pending:
                    if slot in self._with_main_grad:
                        self.buffers.bind(slot, param)
                    else:
                        param.grad = views[slot]
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
            self._table.params[slot].grad = grad

    def end(self, synchronised: bool) -> None:
        """End a pass. A local one leaves all its gradients in the buffers."""
        if not synchronised:
            # With main_grad all of them: the user may read it after zero_grad() has dropped the gradient.
            pending = self._buckets.pending
            self.hold(sorted(pending if self._with_main_grad else pending - self._pending_before))
        self._kept.clear()

    def drop(self) -> None:
        """Discard the pending gradients of a failed pass. Others keep their values, outside of buffers in use."""
        params, buckets = self._table.params, self._buckets
        for slot in buckets.pending:
            params[slot].grad = None
        for slot, (kept, value) in self._kept.items():
            params[slot].grad = kept if value is None else value
        self._kept.clear()
        for bucket in buckets.active[buckets.launched :]:
            for slot in self._held(bucket.slots):
                params[slot].grad = self.views[slot].clone()

    def zero(self) -> None:
        """Set all gradients to zero, with one fill per buffer."""
        for flat in self.buffers.flats:
            flat.zero_()
        for slot, param in enumerate(self._table.params):
            if param.requires_grad:
                self.buffers.bind(slot, param)
            elif param.grad is not None:
                param.grad.zero_()
