"""What is saved of large flat tensors: the views that are asked for, not the memory around them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SPARE = 1 / 8
"""How much of a storage may be written without being asked for. Padding is less, and cloned only for small models."""


def without_spare_memory(value: Any) -> Any:
    """The same nested dicts, lists and tuples, with clones of tensors where too little of their memory is asked for.

    ``torch.save`` writes the whole storage behind a view. Where most of it is saved anyway, as views of its other
    parts, tensors are left as they are: a large model is not to be in memory twice for being saved.

    Args:
        value: What is about to be saved; stays as it is.
    """
    asked_for: dict[int, dict[tuple[int, int], int]] = {}  # by storage: bytes, by where a view begins and ends
    sizes: dict[int, int] = {}
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        views = asked_for.setdefault(storage.data_ptr(), {})
        views[_extent(tensor)] = tensor.numel() * tensor.element_size()
        sizes[storage.data_ptr()] = storage.nbytes()
    wasteful = {key for key, views in asked_for.items() if sizes[key] - sum(views.values()) > _SPARE * sizes[key]}
    return _Clones(wasteful).mapped(value) if wasteful else value


def _has_storage(value: Any) -> bool:
    """Whether it is a tensor in memory of its own or others'; other classes may be anything."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.device.type != "meta"


def _tensors(value: Any) -> Iterator[Tensor]:
    if _has_storage(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the storage that a tensor looks at, and the one after the last."""
    start, length = int(tensor.storage_offset()), 0
    if tensor.numel():
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + length) * tensor.element_size()


class _Clones:
    """Replaces tensors by clones, the same view by the same clone: tied weights stay so.

    Args:
        wasteful: The storages of which too little is asked for.
    """

    def __init__(self, wasteful: set[int]) -> None:
        self._wasteful = wasteful
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def mapped(self, value: Any) -> Any:
        if _has_storage(value):
            return self._clone(value) if value.untyped_storage().data_ptr() in self._wasteful else value
        if isinstance(value, dict):
            changed = {key: new for key, item in value.items() if (new := self.mapped(item)) is not item}
            if not changed:
                return value
            copied = copy.copy(value)  # of its class, with its attributes: state dicts have versions in one
            copied.update(changed)
            return copied
        if isinstance(value, list | tuple):
            items = [self.mapped(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _clone(self, tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, type(tensor))
        if key not in self._made:
            clone = tensor.detach().clone()
            is_param = isinstance(tensor, nn.Parameter)
            self._made[key] = nn.Parameter(clone, tensor.requires_grad) if is_param else clone
        return self._made[key]
