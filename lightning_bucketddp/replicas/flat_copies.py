"""Copies of tensors on other devices that move in one piece, and whose gradients come home in one piece."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.layout.plan import ALIGNMENT_BYTES, contiguous_strides, is_dense
from lightning_bucketddp.replicas.scatter_gather import accelerator_type

_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors hold on to a storage. Private; without it copies get new memory each time."""

BEFORE_ALL_OTHERS = 2**63 - 1
"""The engine runs, of the nodes that are ready, the one with the largest number, which otherwise is the youngest. Nodes
that are made before forward would run after all of backward, and no gradient would come home before. Setting the number
is private; without it all is right, and late."""


@dataclass(frozen=True)
class FlatLayout:
    """Where tensors of one dtype lie in a flat tensor, each with its own shape and strides.

    Attributes:
        dtype: Their dtype.
        names: What they are called in errors.
        shapes: Their shapes.
        strides: Their strides, if they are dense, and contiguous ones otherwise.
        offsets: Where each begins, in elements; a multiple of 64 bytes.
        numel: Elements of the flat tensor, padding included.
    """

    dtype: torch.dtype
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: Sequence[str]) -> FlatLayout:
        """The layout of ``tensors``, all of one dtype, in their order."""
        dtype = tensors[0].dtype
        unit = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += math.ceil(tensor.numel() / unit) * unit
        strides = [
            tensor.stride() if is_dense(tensor.shape, tensor.stride()) else contiguous_strides(tensor.shape)
            for tensor in tensors
        ]
        shapes = tuple(tensor.shape for tensor in tensors)
        return cls(dtype, tuple(names), shapes, tuple(map(tuple, strides)), tuple(offsets), end)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Every tensor's part of a flat tensor."""
        return [flat.as_strided(*where) for where in zip(self.shapes, self.strides, self.offsets, strict=True)]


class _FlatCopy:
    """One copy of all tensors of a layout, whose memory serves again for the next values once nobody needs the last."""

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self._layout = layout
        self.device = device
        self.flat = torch.empty(0)
        self._own_users = -1  # how many tensors hold on to the memory if nobody else does; none is made yet

    def writable(self) -> None:
        """Takes new memory if a graph or anybody else still holds on to the values that are in it."""
        if _storage_use_count is not None and self._users() == self._own_users:
            return
        with torch.inference_mode(False):  # memory made in inference mode could not be trained on later
            self.flat = torch.zeros(self._layout.numel, dtype=self._layout.dtype, device=self.device)
            self.views = self._layout.views(self.flat)
        self._own_users = self._users()

    def _users(self) -> int:
        return -1 if _storage_use_count is None else _storage_use_count(self.flat.untyped_storage()._cdata)


class FlatCopies:
    """Copies, for several replicas, of tensors of one dtype on one device.

    Args:
        tensors: The tensors.
        names: What they are called in errors.
        devices: Where each replica's copies are.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str], devices: Sequence[torch.device]) -> None:
        self._names = list(names)
        self._home = tensors[0].device
        self._layout = FlatLayout.of(tensors, names)
        self._copies = [_FlatCopy(self._layout, device) for device in devices]
        self._staged = _FlatCopy(self._layout, self._home)
        self._summed_in: list[torch.dtype | None] = []
        self._edges: list[tuple[list[int], FlatLayout, torch.dtype]] = []

    @torch.no_grad()
    def write(self, tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
        """Copies the present values of ``tensors`` for the first ``count`` replicas.

        What :meth:`write` returned before must not be held on to by whoever called, for its memory to be used again.

        Returns:
            For each replica its tensors, without gradient edges.
        """
        source = list(tensors)
        copies = self._copies[:count]
        away = [copy for copy in copies if copy.device != self._home]
        here = [copy for copy in copies if copy.device == self._home] + [self._staged] * bool(away)
        for copy in here:
            copy.writable()
            torch._foreach_copy_(copy.views, source)
        for copy in away:
            copy.writable()
            copy.flat.copy_(self._staged.flat, non_blocking=copy.device.type != "cpu")  # which nobody waits for
        # As new objects that count the changes made to them each on its own.
        return [[view.data for view in copy.views] for copy in copies]

    def with_edges(self, tensors: Sequence[Tensor], written: list[list[Tensor]]) -> None:
        """Replaces those of ``written`` whose original requires grad by ones with a gradient edge to it."""
        summed_in = [_summed_in(tensor) for tensor in tensors]
        if summed_in != self._summed_in:
            self._summed_in = summed_in
            groups: dict[torch.dtype, list[int]] = {}
            for index, dtype in enumerate(summed_in):
                if dtype is not None:
                    groups.setdefault(dtype, []).append(index)
            self._edges = []
            for dtype, group in groups.items():
                layout = FlatLayout.of([tensors[i] for i in group], [self._names[i] for i in group])
                self._edges.append((group, layout, dtype))
        for group, layout, dtype in self._edges:
            copies = [replica[index] for replica in written for index in group]
            outputs = iter(_Copied.apply(layout, self._home, dtype, copies, *(tensors[index] for index in group)))
            for replica in written:
                for index in group:
                    replica[index] = next(outputs)


def _summed_in(tensor: Tensor) -> torch.dtype | None:
    """The dtype in which gradients of copies are added up, which is that of the gradient; None if it gets none."""
    if not tensor.requires_grad:
        return None
    return (tensor.grad_dtype if tensor.is_leaf else None) or tensor.dtype


class _Copied(torch.autograd.Function):
    """The identity from tensors to copies of them; its backward adds the copies' gradients up."""

    @staticmethod
    def forward(
        ctx: Any, layout: FlatLayout, home: torch.device, dtype: torch.dtype, copies: list[Tensor], *tensors: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.home, ctx.dtype = layout, home, dtype
        # Of the streams of several devices the engine restores one in the thread that runs this node's backward.
        ctx.streams = _current_streams({*(copy.device for copy in copies[:: len(tensors)]), home})
        if hasattr(ctx, "_set_sequence_nr"):
            ctx._set_sequence_nr(BEFORE_ALL_OTHERS)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled() and any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError(
                f"the gradients of the replicas of {_some(ctx.layout.names)} are to be added up in a way that can be "
                "differentiated again, which is not possible; call backward without create_graph=True, or compute what "
                "needs second derivatives on the module itself rather than on replicas"
            )
        count = len(ctx.layout.names)
        by_replica = [grads[start : start + count] for start in range(0, len(grads), count)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for stream in ctx.streams:
                stack.enter_context(stream)
            return None, None, None, None, *reduce_add(by_replica, ctx.layout, ctx.home, ctx.dtype)


def _current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    kind = accelerator_type()
    return [torch.accelerator.current_stream(device) for device in devices if device.type == kind]


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def reduce_add(
    grads: Sequence[Sequence[Tensor | None]], layout: FlatLayout, home: torch.device, dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """The sums of the replicas' gradients, on ``home``; those of other devices come in one piece each.

    Args:
        grads: For each replica, the gradients of the tensors of ``layout``; None for those that it did not use.
        layout: What the gradients belong to.
        home: Where the sums go.
        dtype: Of the sums; that of ``layout``, in which gradients travel, if None.

    Returns:
        For each tensor the sum, None if no replica used it. Sparse if all its gradients are.
    """
    dtype = layout.dtype if dtype is None else dtype
    dense = [[None if grad is None or _is_sparse(grad) else grad for grad in replica] for replica in grads]
    rows = [row for row in dense if any(grad is not None for grad in row)]
    sums: list[Tensor | None] = [None] * len(layout.names)
    if rows:
        total = _moved_home(rows[0], layout, home).to(dtype)
        for row in rows[1:]:
            total.add_(_moved_home(row, layout, home))
        used = [any(grad is not None for grad in column) for column in zip(*rows, strict=True)]
        sums = [view if is_used else None for view, is_used in zip(layout.views(total), used, strict=True)]
    for replica in grads:
        for index, grad in enumerate(replica):
            if grad is not None and _is_sparse(grad):
                there, grad = sums[index], grad.to(home, dtype)
                sums[index] = grad if there is None else there + grad
    return sums


def _is_sparse(grad: Tensor) -> bool:
    return grad.layout is not torch.strided


def _moved_home(row: Sequence[Tensor | None], layout: FlatLayout, home: torch.device) -> Tensor:
    """One replica's gradients, zeros where there is none, in one flat tensor on ``home``."""
    here = [grad for grad in row if grad is not None]
    make = torch.empty if len(here) == len(row) else torch.zeros
    flat = make(layout.numel, dtype=layout.dtype, device=here[0].device)
    parts = [part for part, grad in zip(layout.views(flat), row, strict=True) if grad is not None]
    torch._foreach_copy_(parts, here)
    return flat.to(home)
