"""The flat tensors that hold the gradients, and each parameter's view into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bucketddp.layout.plan import Bucket, Layout

LARGE_BYTES = 16 * 1024
"""Where gradients have this size on average, they are copied one by one and scaled on the way; smaller ones are copied
together, and then scaled together."""


class GradBuffers:
    """One flat tensor per (device, dtype), with a view per slot.

    Args:
        layout: Where each slot lies.
        tail: Elements behind the last bucket, which are not gradients.

    Attributes:
        layout: The layout that the views follow now.
        flats: The flat tensors, as ``layout.buffers``.
        views: One per slot, with the parameter's shape and strides. A view is one object for as long
            as the layout stands, so ``param.grad is view`` tells a gradient that lies in the buffer.
        made_elsewhere: Whether gradients may have been made on other streams than the one that copies them.
    """

    def __init__(self, layout: Layout, tail: int = 0) -> None:
        self.layout = layout
        self._make_flats(tail)
        self.views = self._make_views()
        self.made_elsewhere = False

    def _make_flats(self, tail: int) -> None:
        last = self.layout.buckets[-1].buffer if tail else -1
        self.flats = [
            torch.zeros(spec.numel + (tail if index == last else 0), dtype=spec.dtype, device=spec.device)
            for index, spec in enumerate(self.layout.buffers)
        ]

    def _make_views(self) -> list[Tensor]:
        views = [self._view(slot) for slot in range(len(self.layout.slots))]
        self._addresses = [view.data_ptr() for view in views]
        self._fits: list[_Fit] = [
            (slot.spec.shape, (slot.spec.dtype, slot.spec.param_dtype), self.flats[slot.buffer].device)
            for slot in self.layout.slots
        ]
        return views

    def _view(self, index: int) -> Tensor:
        slot = self.layout.slots[index]
        return self.flats[slot.buffer].as_strided(slot.spec.shape, slot.spec.strides, slot.offset)

    def holds(self, slot: int, grad: Tensor) -> bool:
        """Whether ``grad`` is the slot's view, and lies in the buffer still.

        ``param.grad.data = other``, which ``module.to(dtype)`` does too, keeps the object and moves it elsewhere.
        """
        return grad is self.views[slot] and grad.data_ptr() == self._addresses[slot]

    def renew(self, slot: int, grad: Tensor) -> None:
        """Gives the slot a view of its own again if ``grad``, which was it, was moved elsewhere."""
        if grad is self.views[slot]:
            self.views[slot] = self._view(slot)

    def bucket_flat(self, bucket: Bucket) -> Tensor:
        """The contiguous 1-D tensor of one bucket, padding included."""
        return self.flats[bucket.buffer][bucket.start : bucket.stop]

    def put_away(self) -> None:
        """Gives the memory back until :meth:`take_out`; views must not be touched in between."""
        for flat in self.flats:
            flat.untyped_storage().resize_(0)

    def take_out(self) -> None:
        """Gets memory again, of zeros, after :meth:`put_away`; the tensors are those that they were."""
        for flat in self.flats:
            flat.untyped_storage().resize_(flat.nbytes)
            flat.zero_()
        self._addresses = [view.data_ptr() for view in self.views]

    def release(self) -> None:
        """Gives the memory back, as far as no ``.grad`` holds on to it."""
        self.views.clear()
        self.flats.clear()

    def relayout(self, layout: Layout, params: Sequence[Tensor], tail: int = 0) -> None:
        """Moves to another layout of the same slots, possibly with more slots appended.

        Gradients that are views (``param.grad is view``) move along and are bound to their new views.
        When there are none, which is the case after ``zero_grad(set_to_none=True)``, the memory is
        given back before the new buffers are made, so that gradients never exist twice.

        Args:
            layout: The new layout; its first ``len(self.views)`` slots are the present ones.
            params: The parameters of all slots of ``layout``.
            tail: Elements behind the last bucket.
        """
        if layout == self.layout:
            return
        old = list(self.views)
        live = [slot for slot in range(len(old)) if (g := params[slot].grad) is not None and self.holds(slot, g)]
        if not live:
            old.clear()
            self.release()
        self.layout = layout
        self._make_flats(tail)
        self.views = self._make_views()
        for slot in live:
            self.views[slot].copy_(old[slot])
            params[slot].grad = self.views[slot]

    @torch.no_grad()
    def pack(
        self, slots: Sequence[int], grads: Sequence[Tensor], scale: float | None = None, flat: Tensor | None = None
    ) -> None:
        """Bring gradients into the views of their slots, scaled.

        Args:
            slots: The slots.
            grads: Their gradients: the views, or tensors that lie elsewhere.
            scale: What they are multiplied by; None for no scaling.
            flat: With a scale, the bucket that the slots are all of; what else is in it is scaled or not.

        Raises:
            RuntimeError: If a gradient cannot live in its view: it requires grad itself
                (``create_graph=True``), is sparse (not declared so), or has another shape, dtype or device.
                Nothing has been copied then.
        """
        outside = [(slot, grad) for slot, grad in zip(slots, grads, strict=True) if not self.holds(slot, grad)]
        for slot, grad in outside:
            if not _fits(grad, self._fits[slot]):
                raise RuntimeError(self._refusal(slot, grad))
            self.renew(slot, grad)
        views = self.views
        if scale is not None and flat is not None and flat.nbytes >= LARGE_BYTES * len(slots):
            for slot, grad in zip(slots, grads, strict=True):
                view = views[slot]
                torch.mul(grad if grad.dtype is view.dtype else view.copy_(grad), scale, out=view)
        else:
            if outside:
                torch._foreach_copy_([views[slot] for slot, _ in outside], [grad for _, grad in outside])
            if scale is not None and flat is not None:
                flat.mul_(scale)
        if self.made_elsewhere:  # their memory must not be used again before they have been copied
            for _, grad in outside:
                grad.record_stream(torch.accelerator.current_stream(grad.device))

    def bind(self, slot: int, param: Tensor, view: Tensor | None = None) -> None:
        """Makes the slot's view, or ``view`` if given, the parameter's ``.grad``."""
        dtype = self.views[slot].dtype
        if param.grad_dtype not in (dtype, None):  # lost where a parameter's data was replaced or copied
            param.grad = None
            param.grad_dtype = dtype
        param.grad = self.views[slot] if view is None else view

    def _refusal(self, slot: int, grad: Tensor) -> str:
        spec = self.layout.slots[slot].spec
        if grad.requires_grad:
            return (
                f"the gradient of parameter {spec.name!r} requires grad, as backward(create_graph=True) leaves it; "
                "`.grad` is a view into a buffer that is reduced in place and cannot be differentiated. "
                "Use torch.autograd.grad(..., create_graph=True) for the inner gradient and a plain backward() "
                "for the loss"
            )
        if grad.layout is not torch.strided:
            return (
                f"the gradient of parameter {spec.name!r} is {grad.layout}, and the parameter was not declared sparse "
                f"when the module was wrapped; pass sparse_parameters=[{spec.name!r}] to BucketDDP"
            )
        return (
            f"the gradient of parameter {spec.name!r} cannot be reduced: expected a dense gradient of shape "
            f"{spec.shape}, {spec.dtype} on {spec.device}, found {grad.layout} of shape {tuple(grad.shape)}, "
            f"{grad.dtype} on {grad.device}. A module is moved to another device before it is wrapped"
        )


_Fit = tuple[tuple[int, ...], tuple[torch.dtype | None, ...], torch.device]


def _fits(grad: Tensor, fit: _Fit) -> bool:
    shape, dtypes, device = fit
    return not (
        grad.requires_grad
        or grad.layout is not torch.strided
        or grad.shape != shape
        or grad.dtype not in dtypes
        or grad.device != device
    )
