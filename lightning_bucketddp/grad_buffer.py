"""The flat tensors that hold the gradients, and each parameter's view into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bucketddp.layout import Bucket, Layout


class GradBuffers:
    """One flat tensor per (device, dtype), with a view per slot.

    Args:
        layout: Where each slot lies.

    Attributes:
        layout: The layout that the views follow now.
        flats: The flat tensors, as ``layout.buffers``.
        views: One per slot, with the parameter's shape and strides. A view is one object for as long
            as the layout stands, so ``param.grad is view`` tells a captured gradient.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flats = [torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device) for spec in layout.buffers]
        self.views = self._make_views()

    def _make_views(self) -> list[Tensor]:
        return [
            self.flats[slot.buffer].as_strided(slot.spec.shape, slot.spec.strides, slot.offset)
            for slot in self.layout.slots
        ]

    @property
    def nbytes(self) -> int:
        """Bytes held by the flat tensors."""
        return self.layout.nbytes

    def bucket_flat(self, bucket: Bucket) -> Tensor:
        """The contiguous 1-D tensor of one bucket, padding included."""
        return self.flats[bucket.buffer][bucket.start : bucket.stop]

    def release(self) -> None:
        """Gives the memory back, as far as no ``.grad`` holds on to it."""
        self.views.clear()
        self.flats.clear()

    def relayout(self, layout: Layout, params: Sequence[Tensor]) -> None:
        """Moves to another layout of the same slots, possibly with more slots appended.

        Gradients that are views (``param.grad is view``) move along and are bound to their new views.
        When there are none, which is the case after ``zero_grad(set_to_none=True)``, the memory is
        given back before the new buffers are made, so that gradients never exist twice.

        Args:
            layout: The new layout; its first ``len(self.views)`` slots are the present ones.
            params: The parameters of all slots of ``layout``.
        """
        if layout == self.layout:
            return
        old = list(self.views)
        live = [slot for slot, view in enumerate(old) if params[slot].grad is view]
        if not live:
            old.clear()
            self.release()
        self.layout = layout
        self.flats = [torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device) for spec in layout.buffers]
        self.views = self._make_views()
        for slot in live:
            self.views[slot].copy_(old[slot])
            params[slot].grad = self.views[slot]

    @torch.no_grad()
    def capture(self, slots: Sequence[int], params: Sequence[Tensor]) -> None:
        """Brings freshly accumulated gradients of ``slots`` into their views and binds them.

        One multi-tensor copy for all of them. Slots whose gradient is None or the view already are left alone.

        Args:
            slots: The slots to look at.
            params: The parameters of all slots.

        Raises:
            RuntimeError: If a gradient cannot live in its view: it requires grad itself
                (``create_graph=True``), is sparse, or has another shape, dtype or device.
        """
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for slot in slots:
            param, view = params[slot], self.views[slot]
            grad = param.grad
            if grad is None or grad is view:
                continue
            if grad.requires_grad or grad.layout is not torch.strided or grad.shape != view.shape:
                raise RuntimeError(self._refusal(slot, grad))
            if grad.dtype is not view.dtype or grad.device != view.device:
                raise RuntimeError(self._refusal(slot, grad))
            sources.append(grad)
            targets.append(view)
            param.grad = view
        if sources:
            torch._foreach_copy_(targets, sources)

    def _refusal(self, slot: int, grad: Tensor) -> str:
        spec = self.layout.slots[slot].spec
        if grad.requires_grad:
            return (
                f"the gradient of parameter {spec.name!r} requires grad, as backward(create_graph=True) leaves it; "
                "`.grad` is a view into a buffer that is reduced in place and cannot be differentiated. "
                "Use torch.autograd.grad(..., create_graph=True) for the inner gradient and a plain backward() "
                "for the loss"
            )
        return (
            f"the gradient of parameter {spec.name!r} cannot be reduced: expected a dense gradient of shape "
            f"{spec.shape}, {spec.dtype} on {spec.device}, found {grad.layout} of shape {tuple(grad.shape)}, "
            f"{grad.dtype} on {grad.device}"
        )
