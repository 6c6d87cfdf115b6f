"""Gradients in contiguous buffers: each exists once, and ``.grad`` is its view."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage, gradients_of, leave_out
from lightning_bucketddp.layout.plan import MIB, Layout
from lightning_bucketddp.peers.control import HEADER

OUTSIDE_BYTES = 16 * MIB
"""Gradients that lie outside of the buffers at most, where buckets do not limit them."""

MAX_CARRIER_BYTES = MIB
"""The control vector does not travel in a larger bucket: what the collective of its own costs is small beside that."""


class Contiguous(Storage):
    """The storage of buckets that tile contiguous buffers.

    Args:
        table: The slots.
        buckets: The buckets, which get their memory here.
        layout: Where each slot lies.
        main_grads: Whether parameters whose gradients have another dtype get a ``main_grad``.
        carries_control: Whether the last bucket has room for the control vector, if that bucket is small.

    Attributes:
        buffers: The flat tensors and the views.
    """

    def __init__(
        self,
        table: SlotTable,
        buckets: Buckets,
        layout: Layout,
        main_grads: bool = True,
        carries_control: bool = False,
    ) -> None:
        self._table, self._buckets = table, buckets
        self._carries_control = carries_control
        on_cpu = all(param.device.type == "cpu" for param in table.all_params)
        self._streams: set[torch.Stream] | None = None if on_cpu else set()  # on which gradients were made
        self.buffers = GradBuffers(layout, self._tail(layout))
        self._main_grads: bool | None = False if main_grads else None  # whether they are bound; None: never
        self._outside: list[int] = []  # slots whose gradients lie where autograd put them
        self._outside_bytes = 0
        self._pending_before: set[int] = set()  # this local pass
        # Gradients that were there before the pass and are not pending; the clone if `.grad` is the view.
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._make_buckets()

    @property
    def layout(self) -> Layout:
        """Where the gradients lie now."""
        return self.buffers.layout

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot."""
        return self.buffers.views

    # -- layout --------------------------------------------------------------------------------------

    def _tail(self, layout: Layout) -> int:
        """Elements behind the last bucket for the control vector. Where it lies is the same on all ranks."""
        if not (self._carries_control and layout.buckets and self._streams is None):
            return 0
        last = layout.buckets[-1]
        buffer = layout.buffers[last.buffer]
        exact = buffer.dtype in (torch.float32, torch.float64)
        fits = exact and last.stop == buffer.numel and layout.bucket_nbytes(last) <= MAX_CARRIER_BYTES
        return HEADER + len(layout.slots) if fits else 0

    def _make_buckets(self) -> None:
        layout = self.layout
        self._buckets.lay_out(layout, [self.buffers.bucket_flat(bucket) for bucket in layout.buckets])
        if self._tail(layout):
            last = self._buckets.all[-1]
            last.with_tail = self.buffers.flats[layout.buckets[-1].buffer][layout.buckets[-1].start :]
            last.held_back = True  # what the control vector says is final only when backward has ended
        self._outside_limit = min(OUTSIDE_BYTES, max((layout.bucket_nbytes(it) for it in layout.buckets), default=0))
        specs = [] if self._main_grads is None else self._table.specs
        self._with_main_grad = frozenset(slot for slot, spec in enumerate(specs) if spec.param_dtype is not None)
        self.bind_main_grads(True)

    def bind_main_grads(self, bound: bool) -> None:
        """Give parameters their ``main_grad``, or take it away."""
        if self._main_grads is None or bound is self._main_grads:
            return
        self._main_grads = bound
        for slot in self._with_main_grad:
            if bound:
                self._table.params[slot].main_grad = self.views[slot]  # type: ignore[attr-defined]
            else:
                self._table.params[slot].__dict__.pop("main_grad", None)

    def lay_out(self, layout: Layout) -> bool:
        """Move to another layout; see the protocol."""
        self.bind_main_grads(False)
        self._buckets.forget()  # they hold the flat tensors, which the buffers may want to give back first
        self.buffers.relayout(layout, self._table.params, self._tail(layout))
        self._make_buckets()
        return True

    def release(self) -> None:
        """Give gradients back as plain tensors, and the buffers to the allocator."""
        for param, view in zip(self._table.params, self.views, strict=False):
            if param.grad is view:
                param.grad = view.clone()
        self.bind_main_grads(False)
        self._buckets.forget()
        self._kept.clear()
        self.buffers.release()

    # -- gradients come ------------------------------------------------------------------------------

    def open(self) -> None:
        """Remember which gradients lie in the buffers already."""
        self._pending_before = self._buckets.pending.copy()

    def arrived(self, slot: int) -> None:
        """Remember the stream on which a gradient was made. Pack those that come out of order when they are many."""
        if self._streams is not None:
            self._streams.add(torch.accelerator.current_stream(self._table.params[slot].device))
        if self._buckets.in_order:
            return
        self._outside.append(slot)
        self._outside_bytes += self._table.specs[slot].nbytes
        if self._outside_bytes >= self._outside_limit:
            self.hold(self._outside)
            self._forget_outside()

    def _forget_outside(self) -> None:
        self._outside, self._outside_bytes = [], 0

    def one_stream(self) -> bool:
        """Whether all gradients are made on one stream, which is known."""
        return self._streams is None or len(self._streams) == 1

    def _wait_for_streams(self) -> None:
        """Let what is done next see the gradients that were made on other streams."""
        for stream in self._streams or ():
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
                self.buffers.made_elsewhere = True

    def hold(self, slots: Sequence[int]) -> None:
        """Pack gradients that do not travel yet and bind their views."""
        self._wait_for_streams()
        params, pending, buffers = self._table.params, self._buckets.pending, self.buffers
        fresh: list[int] = []
        grads: list[Tensor] = []
        for slot in slots:
            grad = params[slot].grad
            if grad is not None and slot in pending and not buffers.holds(slot, grad):
                fresh.append(slot)
                grads.append(grad)
        buffers.pack(fresh, grads)
        for slot in fresh:
            buffers.bind(slot, params[slot])

    def pack(self, bucket: Bucket, scale: float | None) -> None:
        """Bring a bucket's gradients into its memory, scaled; until it is published its parameters have no ``.grad``.

        The loops run for every parameter in every pass.
        """
        self._wait_for_streams()
        params, pending = self._table.params, self._buckets.pending
        slots, grads, absent = gradients_of(bucket, self._table)
        if not pending.issuperset(slots):
            self._keep([(slot, grad) for slot, grad in zip(slots, grads, strict=True) if slot not in pending])
        self.buffers.pack(slots, grads, scale, bucket.flat)
        leave_out(absent, self.views, self._buckets)
        for slot in slots:
            params[slot].grad = None

    def _keep(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Remember gradients that are not pending, should no rank have anything new for them."""
        for slot, grad in gradients:
            self._kept[slot] = (grad, grad.detach().clone() if self.buffers.holds(slot, grad) else None)

    # -- gradients are there -------------------------------------------------------------------------

    def publish(self, bucket: Bucket) -> None:
        """Bind the views of slots that had a gradient on this rank."""
        params, views, pending = self._table.params, self.views, self._buckets.pending
        for slot in bucket.slots:
            if slot in pending:
                if slot in self._with_main_grad:
                    self.buffers.bind(slot, params[slot])
                else:
                    params[slot].grad = views[slot]

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """Bind the mean if another rank had a gradient, else put back what was there before."""
        if used_elsewhere:
            self.buffers.bind(slot, self._table.params[slot])
        elif slot in self._kept:
            grad, value = self._kept[slot]
            if value is not None:
                grad.copy_(value)
            self._table.params[slot].grad = grad

    def published_grad(self, slot: int) -> Tensor | None:
        """The gradient of a slot."""
        return self._table.params[slot].grad

    def end(self, synchronised: bool) -> None:
        """A pass has ended: a local one leaves all its gradients in the buffers."""
        if not synchronised:
            # Somebody may look at a main_grad, whatever zero_grad() has dropped.
            pending = self._buckets.pending
            self.hold(sorted(pending if self._with_main_grad else pending - self._pending_before))
        self._kept.clear()
        self._forget_outside()

    def drop(self) -> None:
        """Let the gradients of a pass that failed be of no use; see the protocol."""
        params, buckets = self._table.params, self._buckets
        for slot in buckets.pending:
            params[slot].grad = None
        for slot, (kept, value) in self._kept.items():
            params[slot].grad = kept if value is None else value
        self._kept.clear()
        self._forget_outside()
        for bucket in buckets.active[buckets.launched :]:
            for slot in bucket.slots:
                grad = params[slot].grad
                if grad is not None and self.buffers.holds(slot, grad):
                    params[slot].grad = grad.clone()

    def zero(self) -> None:
        """Set all gradients to zero, in the buffers: one fill for each of them."""
        for flat in self.buffers.flats:
            flat.zero_()
        for slot, param in enumerate(self._table.params):
            if param.requires_grad:
                self.buffers.bind(slot, param)
            elif param.grad is not None:
                param.grad.zero_()
