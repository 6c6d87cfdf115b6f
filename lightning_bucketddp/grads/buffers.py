"""The flat tensors that hold the gradients, and each parameter's view into them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from lightning_bucketddp.layout.plan import Bucket, Layout

LARGE_BYTES = 64 * 1024
"""Gradients from this size on are copied, and divided on the way, one by one; smaller ones together, in two steps."""


class GradBuffers:
    """One flat tensor per (device, dtype), with a view per slot.

    Args:
        layout: Where each slot lies.

    Attributes:
        layout: The layout that the views follow now.
        flats: The flat tensors, as ``layout.buffers``.
        views: One per slot, with the parameter's shape and strides. A view is one object for as long
            as the layout stands, so ``param.grad is view`` tells a captured gradient.
        made_elsewhere: Whether gradients may have been made on other streams than the one that copies them.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flats = [torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device) for spec in layout.buffers]
        self.views = self._make_views()
        self.made_elsewhere = False

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
        live = [slot for slot in range(len(old)) if (g := params[slot].grad) is not None and self.holds(slot, g)]
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
                (``create_graph=True``), is sparse (not declared so), or has another shape, dtype or device.
        """
        fresh: list[int] = []
        grads: list[Tensor] = []
        for slot in slots:
            grad = params[slot].grad
            if grad is not None and not self.holds(slot, grad):
                fresh.append(slot)
                grads.append(grad)
        self.take(fresh, grads)
        for slot in fresh:
            self.bind(slot, params[slot])

    @torch.no_grad()
    def take(self, slots: Sequence[int], grads: list[Tensor]) -> None:
        """Copies gradients that lie elsewhere into the views of ``slots``, in one multi-tensor copy.

        Raises:
            RuntimeError: As :meth:`capture`; nothing has been copied then.
        """
        if not slots:
            return
        views, fits = self.views, self._fits
        for slot, grad in zip(slots, grads, strict=True):  # nothing is copied before everything has been looked at
            if not _fits(grad, fits[slot]):
                raise RuntimeError(self._refusal(slot, grad))
            if grad is views[slot]:
                self.renew(slot, grad)
        torch._foreach_copy_([views[slot] for slot in slots], grads)
        if self.made_elsewhere:  # their memory must not be used again before they have been copied
            for grad in grads:
                grad.record_stream(torch.accelerator.current_stream(grad.device))

    def take_divided(self, slots: Sequence[int], grads: list[Tensor], divisor: int) -> list[int]:
        """As :meth:`take`, large ones divided by a number on the way.

        Returns:
            The slots whose gradients have not been divided.
        """
        small: list[int] = []
        small_grads: list[Tensor] = []
        for slot, grad in zip(slots, grads, strict=True):
            if grad.nbytes < LARGE_BYTES or not self.divide_into(slot, grad, divisor):
                small.append(slot)
                small_grads.append(grad)
        self.take(small, small_grads)
        return small

    @torch.no_grad()
    def divide_into(self, slot: int, grad: Tensor, divisor: int, add: bool = False) -> bool:
        """Writes a gradient that lies elsewhere, divided by a number, into its slot.

        Args:
            slot: The slot.
            grad: Its gradient.
            divisor: The number.
            add: Whether to add it to what is in the slot.

        Returns:
            Whether that was possible; gradients of another dtype have to be converted.

        Raises:
            RuntimeError: As :meth:`capture`; nothing has been written then.
        """
        view = self.views[slot]
        if grad is view or grad.dtype is not view.dtype:
            return False
        self.require_fit(slot, grad)
        if add:
            view.add_(grad, alpha=1.0 / divisor)
        else:
            torch.mul(grad, 1.0 / divisor, out=view)
        return True

    def divide(self, slots: Sequence[int], chosen: AbstractSet[int], divisor: int) -> None:
        """Divides what is in some slots by a number; by stretches of memory, as one by one takes several times as long.

        Args:
            slots: All slots of one bucket, by offset.
            chosen: Those to be divided.
            divisor: The number.
        """
        stretches: list[list[int]] = []  # the first and the last slot of each
        follows = False
        for slot in slots:
            if slot not in chosen:
                follows = False
            elif follows:
                stretches[-1][1] = slot
            else:
                stretches.append([slot, slot])
                follows = True
        for first, last in stretches:
            begin, end = self.layout.slots[first], self.layout.slots[last]
            self.flats[begin.buffer][begin.offset : end.offset + end.spec.numel].mul_(1.0 / divisor)

    def bind(self, slot: int, param: Tensor, view: Tensor | None = None) -> None:
        """Makes the slot's view, or ``view`` if given, the parameter's ``.grad``."""
        dtype = self.views[slot].dtype
        if param.grad_dtype not in (dtype, None):  # lost where a parameter's data was replaced or copied
            param.grad = None
            param.grad_dtype = dtype
        param.grad = self.views[slot] if view is None else view

    def require_fit(self, slot: int, grad: Tensor) -> None:
        """Requires that ``grad`` can live in the slot's view.

        Raises:
            RuntimeError: As :meth:`capture`.
        """
        if not _fits(grad, self._fits[slot]):
            raise RuntimeError(self._refusal(slot, grad))

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
