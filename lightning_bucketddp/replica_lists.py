"""Lists that a step appends to, such as ``self.validation_step_outputs``: as one device would have left them."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_bucketddp.merging import batched, merge
from lightning_bucketddp.nested import move_to, tensors_in

_Path = tuple[Any, ...]
"""The attribute with a list, or the attribute with a dict or list of lists, and the key or index of a list in it."""


class AppendedLists:
    """The lists among a LightningModule's attributes, and in its dicts and lists of lists, during one step.

    A replica's attributes are the module's own, so all threads would append to the same lists, each to the next
    one in an order of its own. Here the other replicas have copies; in the end, what all appended is merged
    item by item, or comes one replica after the other where it cannot be.

    Args:
        module: The LightningModule, which is the first replica.
        replicas: All replicas; the others' attributes are replaced.
    """

    def __init__(self, module: nn.Module, replicas: Sequence[nn.Module]) -> None:
        self._attributes = [vars(module), *(vars(replica) for replica in replicas[1:])]
        for attributes in self._attributes[1:]:
            _copy_lists(attributes)
        self._before = [
            {path: (found, list(found)) for path, found in _lists_in(attributes)} for attributes in self._attributes
        ]

    def merge(self, sizes: Sequence[int], home: torch.device) -> None:
        """Merges what the replicas appended into the module's lists.

        Args:
            sizes: How many samples each replica had.
            home: The module's device.
        """
        now = [dict(_lists_in(attributes)) for attributes in self._attributes]
        merged: set[int] = set()  # as a list may have two names
        for path in dict.fromkeys(path for lists in now for path in lists):
            if id(now[0].get(path)) in merged:
                continue
            appended = [self._appended(path, replica, lists.get(path)) for replica, lists in enumerate(now)]
            if not any(appended) or any(items is None for items in appended):
                continue
            mine = now[0].get(path)
            if mine is None:  # a key of a dict that the others alone have added
                mine = self._attributes[0][path[0]][path[1]] = []
            start = len(mine) - len(appended[0] or ())
            merged.add(id(mine))
            mine[start:] = _merged([items or [] for items in appended], path, sizes, home)

    def _appended(self, path: _Path, replica: int, found: list[Any] | None) -> list[Any] | None:
        """What a replica appended to a list; None if that is another list than before."""
        before, items = self._before[replica].get(path, (None, []))
        if found is before and found is not None:
            return found[_kept(items, found) :]
        may_be_new = before is None and isinstance(self._attributes[replica].get(path[0]), dict)
        return found or [] if may_be_new else None


def _kept(before: list[Any], now: list[Any]) -> int:
    """How many items at a list's start it had before; items at either end may have been taken away since."""
    for start in range(max(0, len(before) - len(now)), len(before)):
        if all(map(operator.is_, before[start:], now)):
            return len(before) - start
    pairs = list(zip(before, now, strict=False))
    return next((index for index, (old, new) in enumerate(pairs) if old is not new), len(pairs))


def _merged(appended: Sequence[list[Any]], path: _Path, sizes: Sequence[int], home: torch.device) -> list[Any]:
    if len({len(items) for items in appended}) == 1 and not _per_sample(appended, sizes):
        what = f"what was appended to {path[0]!r}"
        try:
            return [merge(column, sizes, home, what) for column in zip(*appended, strict=True)]
        except ValueError:  # one replica after the other does as well
            pass
    apart = len({tensor.device for tensor in tensors_in(list(appended))}) > 1  # else where the step has put them
    return [move_to(item, home) if apart else item for items in appended for item in items]


def _per_sample(appended: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Whether lists got one item of each sample, which are all of one type."""
    one_type = len({type(item) for items in appended for item in items}) == 1
    return one_type and [len(items) for items in appended] == list(sizes) and not batched(appended, sizes)


def _holds_lists(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    makes_lists = isinstance(value, defaultdict) and value.default_factory is list
    return makes_lists or any(type(item) is list for item in value.values())


def _is_nested(value: Any) -> bool:
    """Whether a value is a list of lists, such as one for each dataloader."""
    return type(value) is list and bool(value) and all(type(item) is list for item in value)


def _lists_in(attributes: dict[str, Any]) -> list[tuple[_Path, list[Any]]]:
    found: list[tuple[_Path, list[Any]]] = []
    for name, value in attributes.items():
        if type(value) is list:
            found.append(((name,), value))
            if _is_nested(value):
                found += [((name, index), item) for index, item in enumerate(value)]
        elif _holds_lists(value):
            found += [((name, key), item) for key, item in value.items() if type(item) is list]
    return found


def _copy_lists(attributes: dict[str, Any]) -> None:
    copies: dict[int, list[Any]] = {}  # a list under two names stays one
    for name, value in attributes.items():
        if type(value) is list:
            if id(value) not in copies and _is_nested(value):
                copies[id(value)] = [copies.setdefault(id(item), list(item)) for item in value]
            attributes[name] = copies.setdefault(id(value), list(value))
        elif _holds_lists(value):
            attributes[name] = copied = copy.copy(value)  # of its own class, which dict.copy() may not keep
            for key, item in value.items():
                if type(item) is list:
                    copied[key] = copies.setdefault(id(item), list(item))
