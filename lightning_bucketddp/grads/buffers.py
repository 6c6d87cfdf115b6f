"""The flat tensors that hold the gradients, and each parameter's view into them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from lightning_bucketddp.comm.lane import used_here
from lightning_bucketddp.grads.slots import REQUIRES_GRAD
from lightning_bucketddp.layout.plan import Layout, PlannedBucket

LARGE_BYTES = 16 * 1024
"""Gradients of this size on average are copied and scaled one by one. Smaller ones are copied together, then scaled."""


class GradBuffers:
    """One flat tensor per (device, dtype), with a view per slot.

    Args:
        layout: The place of each slot.

    Attributes:
        flats: The flat tensors, as ``layout.buffers``.
        views: One per slot, with the parameter's shape and strides. A gradient that lies in its buffer is this very
            object: ``param.grad is view``.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.flats = [torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device) for spec in layout.buffers]
        self.views = [self._view(slot) for slot in range(len(layout.slots))]
        self._addresses = [view.data_ptr() for view in self.views]

    def _view(self, index: int) -> Tensor:
        slot = self._layout.slots[index]
        return self.flats[slot.buffer].as_strided(slot.spec.shape, slot.spec.strides, slot.offset)

    def holds(self, slot: int, grad: Tensor) -> bool:
        """Whether ``grad`` is the slot's view, and still lies in the buffer.

        ``param.grad.data = other`` keeps the object and moves it elsewhere. ``module.to(dtype)`` does that too.
        """
        return grad is self.views[slot] and grad.data_ptr() == self._addresses[slot]

    def view(self, slot: int) -> Tensor:
        """The view of a slot. It is made anew if the old one was moved elsewhere."""
        if self.views[slot].data_ptr() != self._addresses[slot]:
            self.views[slot] = self._view(slot)
        return self.views[slot]

    def bucket_flat(self, bucket: PlannedBucket) -> Tensor:
        """The contiguous 1-D tensor of one bucket, padding included."""
        return self.flats[bucket.buffer][bucket.start : bucket.stop]

    def with_room(self, bucket: PlannedBucket) -> Tensor:
        """The contiguous 1-D tensor of one bucket and of the room behind it."""
        return self.flats[bucket.buffer][bucket.start : bucket.stop + bucket.room]

    def free_storage(self) -> None:
        """Give the memory back until :meth:`alloc_storage`. Nobody may touch views in between."""
        used_here(*self.flats)  # it was made on the stream of the root
        for flat in self.flats:
            flat.untyped_storage().resize_(0)

    def alloc_storage(self) -> None:
        """Get memory again after :meth:`free_storage`, filled with zeros. The tensors stay the same objects."""
        for flat in self.flats:
            flat.untyped_storage().resize_(flat.nbytes)
            flat.zero_()
        self._addresses = [view.data_ptr() for view in self.views]

    def release(self) -> None:
        """Give the memory back, except for gradients that are still in ``.grad``."""
        self.views.clear()
        self.flats.clear()

    def pack(
        self, slots: Sequence[int], grads: Sequence[Tensor], scale: float | None = None, flat: Tensor | None = None
    ) -> None:
        """Bring gradients into the views of their slots, scaled.

        Args:
            slots: The slots.
            grads: Their gradients: the views, or tensors that lie elsewhere.
            scale: A factor; None for no scaling.
            flat: The bucket that holds these slots; all of it is scaled.

        Raises:
            RuntimeError: If a gradient does not fit into its view.
        """
        if scale is not None and flat is not None and flat.nbytes >= LARGE_BYTES * len(slots):
            self.require_fits(slots, grads)
            for slot, grad in zip(slots, grads, strict=True):
                view = self.view(slot)
                torch.mul(grad if grad.dtype is view.dtype else view.copy_(grad), scale, out=view)
            return
        targets, sources = self._outside(slots, grads)
        if targets:
            try:
                torch._foreach_copy_(targets, sources)
            except RuntimeError:
                self.require_fits(slots, grads)
                raise
        if scale is not None:
            assert flat is not None
            flat.mul_(scale)

    def pack_into(self, memory: Tensor, bucket: PlannedBucket, slots: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Bring gradients into other memory of another dtype, as they lie in their bucket; zeros where there is none.

        Args:
            memory: The memory, 1-D, at least as long as the bucket.
            bucket: The bucket.
            slots: Its slots with a gradient.
            grads: Their gradients.

        Raises:
            RuntimeError: If a gradient does not fit.
        """
        self.require_fits(slots, grads)
        for slot in slots:
            self.view(slot)  # is published later
        if sum(grad.numel() for grad in grads) < memory.numel():
            memory.zero_()
        places = [self._layout.slots[slot] for slot in slots]
        begin = memory.storage_offset() - bucket.start
        views = [memory.as_strided(at.spec.shape, at.spec.strides, begin + at.offset) for at in places]
        if views:
            torch._foreach_copy_(views, list(grads))

    def _outside(self, slots: Sequence[int], grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The views of slots whose gradients lie elsewhere, and these gradients. Raises if one requires grad.

        Looks at nothing else, as that takes time for every parameter in every pass. Autograd makes gradients like their
        parameters, and torch compares parameters and views when gradients are published.
        """
        if any(map(REQUIRES_GRAD, grads)):
            self.require_fits(slots, grads)
        views = [*map(self.views.__getitem__, slots)]
        if [*map(Tensor.data_ptr, views)] != [*map(self._addresses.__getitem__, slots)]:
            views = [*map(self.view, slots)]
        if any(map(is_, grads, views)):
            outside = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not view]
            return [view for view, _ in outside], [grad for _, grad in outside]
        return views, list(grads)

    def bind(self, slot: int, param: Tensor, view: Tensor | None = None) -> None:
        """Make the slot's view, or ``view`` if given, the parameter's ``.grad``."""
        own = self.view(slot)
        if param.grad_dtype not in (own.dtype, None):  # lost where the parameter's data was replaced or copied
            param.grad = None
            param.grad_dtype = own.dtype
        param.grad = own if view is None else view

    def require_fits(self, slots: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Require that gradients fit into their views.

        Raises:
            RuntimeError: If one does not. It names the parameter.
        """
        for slot, grad in zip(slots, grads, strict=True):
            spec, view = self._layout.slots[slot].spec, self.views[slot]
            if grad.requires_grad:
                raise RuntimeError(
                    f"the gradient of parameter {spec.name!r} requires grad, because of backward(create_graph=True). "
                    "`.grad` is a view into a buffer that is reduced in place and cannot be differentiated. Use "
                    "torch.autograd.grad(..., create_graph=True) for the inner gradient and a plain backward() for "
                    "the loss"
                )
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of parameter {spec.name!r} is {grad.layout}, but the parameter was not declared "
                    f"sparse when the module was wrapped; pass sparse_parameters=[{spec.name!r}] to BucketDDP"
                )
            if grad.shape != view.shape or grad.device != view.device:
                raise RuntimeError(
                    f"the gradient of parameter {spec.name!r} cannot be reduced: expected a dense gradient of shape "
                    f"{spec.shape}, {spec.dtype} on {view.device}, found {grad.layout} of shape {tuple(grad.shape)}, "
                    f"{grad.dtype} on {grad.device}. Move a module to another device before it is wrapped"
                )
