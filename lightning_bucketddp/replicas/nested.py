"""Tensors inside nested containers: what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def items_of(value: Any) -> dict[str, Any] | None:
    """The items of a list, tuple, mapping or dataclass, by their place in messages; None for anything else."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {f".{name}": getattr(value, name) for name in names}
    return None


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


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    items = list(value) if isinstance(value, set | frozenset) else (items_of(value) or {}).values()
    for item in items:
        yield from tensors_in(item)


def move_to(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``; containers are rebuilt, tensors that are there already are shared."""
    if isinstance(value, PackedSequence):
        return value.to(device)  # type: ignore[arg-type]  # which takes what Tensor.to() does
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != "cpu")  # copies to the CPU end when nobody is told
    if isinstance(value, set | frozenset):
        return type(value)(move_to(item, device) for item in value)
    items = items_of(value)
    return value if items is None else rebuilt(value, [move_to(item, device) for item in items.values()])


def joined(values: Sequence[Any], path: str, leaf: Callable[[Sequence[Any], str], Any]) -> Any:
    """Makes one value of the replicas' values: containers item by item.

    Args:
        values: One per replica.
        path: What the values are, for messages.
        leaf: Makes one value of values that are no containers, which are in the given place.

    Raises:
        ValueError: If the containers differ.
    """
    found = [items_of(value) for value in values]
    first = found[0]
    if first is None:
        return leaf(values, path)
    require_same(values, path, "type", type)
    if isinstance(values[0], Mapping):
        require_same(values, path, "set of keys", set)
    else:
        require_same(found, path, "length", lambda items: len(items or ()))
    return rebuilt(values[0], [joined([(items or {})[at] for items in found], path + at, leaf) for at in first])


def require_same(values: Sequence[Any], path: str, what: str, of: Callable[[Any], Any]) -> None:
    """Requires that something is the same of every replica's value.

    Raises:
        ValueError: If it is not; names both.
    """
    expected = of(values[0])
    for replica, value in enumerate(values):
        found = of(value)
        if found is not expected and not _equal(found, expected):
            raise ValueError(
                f"cannot join {path}: expected the same {what} from every replica, found {expected!r} in replica 0 "
                f"and {found!r} in replica {replica}"
            )


def _equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):  # arrays of any kind compare element by element
        return False
