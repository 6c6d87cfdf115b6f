"""Nested containers of tensors, as modules take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def items_of(value: Any) -> dict[str, Any] | None:
    """Return the items of a list, tuple, mapping or dataclass by place (``[0]``, ``['key']``, ``.name``), else None."""
    if isinstance(value, PackedSequence):  # a named tuple, but its fields have no batch dimension in common
        return None
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {f".{name}": getattr(value, name) for name in names}
    return None


def rebuilt(value: Any, items: Iterable[Any]) -> Any:
    """Make a container like ``value`` that holds other items, in the order of :func:`items_of`."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, list | tuple):
        return type(value)(items)
    result = copy.copy(value)
    if isinstance(value, Mapping):
        for key, item in zip(value, items, strict=True):
            result[key] = item
        return result
    for place, item in zip(items_of(value) or (), items, strict=True):
        object.__setattr__(result, place[1:], item)  # also where the dataclass is frozen
    return result


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in nested containers that is not itself a list, tuple, mapping or dataclass."""
    items = items_of(value)
    if items is None:
        yield value
        return
    for item in items.values():
        yield from leaves(item)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and packed sequences."""
    for leaf in [value] if isinstance(value, Tensor) else leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, PackedSequence):
            yield leaf.data


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``. Tensors that are already there are not copied."""
    if isinstance(value, Tensor | PackedSequence):
        # Nobody would wait for a copy to the CPU.
        return value.to(device, non_blocking=device.type != "cpu")  # type: ignore[arg-type]  # of PackedSequence.to
    items = items_of(value)
    return value if items is None else rebuilt(value, [move_to(item, device) for item in items.values()])


def joined(values: Sequence[Any], path: str, leaf: Callable[[Sequence[Any], str], Any]) -> Any:
    """Make one value of the replicas' values, item by item where they are containers.

    Args:
        values: One per replica.
        path: What the values are, for messages.
        leaf: Makes one value of values that are not containers. It gets them and their place.

    Raises:
        ValueError: If the replicas' containers differ.
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
    """Require that ``of(value)`` is the same for every replica's value.

    Raises:
        ValueError: If it is not. The message has both.
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
    except (TypeError, ValueError, RuntimeError):  # arrays compare item by item
        return False
