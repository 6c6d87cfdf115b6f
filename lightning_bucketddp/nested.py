"""Tensors inside nested containers: what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
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
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != "cpu")  # copies to the CPU end when nobody is told
    if isinstance(value, PackedSequence):
        return value.to(device)  # type: ignore[arg-type]  # which takes what Tensor.to() does
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_to(item, device) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(move_to(item, device) for item in value)
    if isinstance(value, Mapping):
        moved = copy.copy(value)
        for key, item in value.items():
            moved[key] = move_to(item, device)  # type: ignore[index]
        return moved
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)  # type: ignore[arg-type]
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(moved, field.name, move_to(getattr(value, field.name), device))
        return moved
    return value
