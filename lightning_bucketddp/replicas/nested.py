"""Tensors inside nested containers: what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def rebuilt(value: Any, items: Iterable[Any]) -> Any:
    """A container like ``value`` around other items, in the same order: a list, tuple, mapping or dataclass."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, list | tuple):
        return type(value)(items)
    result = copy.copy(value)
    if isinstance(value, Mapping):
        for key, item in zip(value, items, strict=True):
            result[key] = item
        return result
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    for name, item in zip(names, items, strict=True):
        object.__setattr__(result, name, item)
    return result


def move_to(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``; containers are rebuilt, tensors that are there already are shared."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(device)  # type: ignore[arg-type]  # which takes what Tensor.to() does
        return leaf.to(device, non_blocking=device.type != "cpu")  # copies to the CPU end when nobody is told

    return _mapped(value, moved)


def cloned(value: Any) -> Any:
    """``value`` with copies of its tensors, whose graphs go on unless gradients are off; containers are rebuilt."""
    return _mapped(value, lambda leaf: leaf.to(leaf.data.device, copy=True))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with its tensors and packed sequences changed; containers are rebuilt."""
    if isinstance(value, Tensor | PackedSequence):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, Mapping):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = _mapped(item, change)  # type: ignore[index]
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)  # type: ignore[arg-type]
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(result, field.name, _mapped(getattr(value, field.name), change))
        return result
    return value
