"""Lists and dicts that a step changes, such as ``self.validation_step_outputs``: as one device would have left them."""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_bucketddp.replicas.nested import move_to, tensors_in
from lightning_bucketddp.trainer.dp.doubts import Doubts
from lightning_bucketddp.trainer.dp.merging import batched, merge

_Path = tuple[Any, ...]
"""The number of a module, its attribute with a list or dict, and the keys or indices of one inside it."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has, which are no step's to change."""


class AppendedLists:
    """The lists, deques and dicts among the attributes of a LightningModule and its modules, during one step.

    A replica's attributes are the module's own, so all threads would change the same objects, each at the next
    place in an order of its own, and find there what another has left. Here the other replicas have copies, also of
    lists and dicts in dicts, and of lists in a list of lists. In the end, what all appended is merged item by item, or
    comes one replica after the other where it cannot be; keys that the first replica has not set are added; the shares
    of a ``Counter``, or of a ``defaultdict`` of numbers, are added up.

    Args:
        module: The LightningModule, which is the first replica.
        replicas: All replicas; the others' attributes are replaced.
    """

    def __init__(self, module: nn.Module, replicas: Sequence[nn.Module]) -> None:
        self._attributes = [
            [vars(part) for part in replica.modules()] for replica in (module, *replicas[1:])
        ]  # by replica and number of the module
        self._roots = [
            (number, name)
            for number, part in enumerate(module.modules())
            if not isinstance(part, Metric | MetricCollection)  # which have means of their own
            for name, value in vars(part).items()
            if name not in _OF_MODULES and _is_kept(value)
        ]
        for attributes in self._attributes[1:]:
            copies: dict[int, Any] = {}  # a list under two names stays one
            for number, name in self._roots:
                if name in attributes[number]:
                    attributes[number][name] = _copied(attributes[number][name], copies)
        self._before = [
            {path: (found, copy.copy(found)) for path, found in self._found_in(replica).items()}
            for replica in range(len(self._attributes))
        ]

    def _found_in(self, replica: int) -> dict[_Path, Any]:
        """The present lists and dicts of a replica, outer ones first; one that has two names by the first of them."""
        seen: set[int] = set()
        return {
            path: value
            for number, name in self._roots
            for path, value in _walk((number, name), self._attributes[replica][number].get(name), seen)
        }

    def merge(self, sizes: Sequence[int], home: torch.device, doubts: Doubts | None = None) -> None:
        """Merges what the replicas changed into the module's lists and dicts.

        Args:
            sizes: How many samples each replica had.
            home: The module's device.
            doubts: Warns of items that may have been meant otherwise; of nothing by default.
        """
        now = [self._found_in(replica) for replica in range(len(self._attributes))]
        for path in dict.fromkeys(path for found in now for path in found):
            if path not in now[0] and not self._add_empty(path, now):
                continue
            if isinstance(now[0][path], dict):
                self._merge_dicts(path, now, home)
            else:
                self._merge_lists(path, now, sizes, home, doubts)

    def _add_empty(self, path: _Path, now: Sequence[dict[_Path, Any]]) -> bool:
        """Gives the module a list or dict where a dict has one that the others alone have added."""
        parent = now[0].get(path[:-1])
        if not isinstance(parent, dict) or path in self._before[0] or path[-1] in parent:
            return False
        now[0][path] = parent[path[-1]] = copy.copy(next(found[path] for found in now if path in found))
        parent[path[-1]].clear()
        return True

    def _merge_dicts(self, path: _Path, now: Sequence[dict[_Path, Any]], home: torch.device) -> None:
        mine = now[0][path]
        known = self._before[0].get(path, (None, {}))[1]
        for found, before in zip(now[1:], self._before[1:], strict=True):
            theirs = found.get(path)
            if not isinstance(theirs, dict) or not isinstance(known, dict):
                continue
            for key, value in theirs.items():
                if is_counter(mine) and isinstance(value, int | float) and path in before:
                    mine[key] = mine.get(key, 0) + value - before[path][1].get(key, 0)
                elif key not in mine and key not in known and not _is_kept(value):
                    apart = any(tensor.device.type == home.type for tensor in tensors_in(value))
                    mine[key] = move_to(value, home) if apart else value

    def _merge_lists(
        self,
        path: _Path,
        now: Sequence[dict[_Path, Any]],
        sizes: Sequence[int],
        home: torch.device,
        doubts: Doubts | None,
    ) -> None:
        pairs = zip(self._before, now, strict=True)
        if len({before[path][0] is found.get(path) for before, found in pairs if path in before}) > 1:
            return  # some replicas have set another list
        appended = [self._appended(path, replica, found) for replica, found in enumerate(now)]
        lists = [items for items in appended if items is not None]
        if not any(lists) or len(lists) < len(appended):
            return
        mine = now[0][path]
        kept = list(mine)[: len(mine) - len(lists[0])]
        merged = _merged(lists, path, sizes, home, doubts)
        mine.clear()
        mine.extend(kept + merged)

    def _appended(self, path: _Path, replica: int, now: dict[_Path, Any]) -> list[Any] | None:
        """What a replica appended to a list; None if that is another list than before."""
        before, items = self._before[replica].get(path, (None, None))
        found = now.get(path)
        if found is None:
            return [] if before is None else None
        if before is None:
            return list(found) if isinstance(now.get(path[:-1]), dict) else None
        if found is before:
            return list(found)[_kept(list(items), list(found)) :]
        starts_as_before = len(found) > len(items) and all(map(operator.is_, items, found))
        return list(found)[len(items) :] if starts_as_before else None


def _is_kept(value: Any) -> bool:
    return type(value) in (list, deque) or isinstance(value, dict)


def is_counter(value: Any) -> bool:
    """Whether a value is a dict that is there to count or add up."""
    return isinstance(value, Counter) or (isinstance(value, defaultdict) and value.default_factory in (int, float))


def _is_nested(value: Any) -> bool:
    """Whether a value is a list of lists, such as one for each dataloader."""
    return type(value) is list and bool(value) and all(type(item) is list for item in value)


def _inside(value: Any) -> list[tuple[Any, Any]]:
    """The lists and dicts directly in a dict or a list of lists, with their keys or indices."""
    if isinstance(value, dict):
        return [(key, item) for key, item in value.items() if _is_kept(item)]
    return list(enumerate(value)) if _is_nested(value) else []


def _walk(path: _Path, value: Any, seen: set[int]) -> Iterator[tuple[_Path, Any]]:
    if _is_kept(value) and id(value) not in seen:
        seen.add(id(value))
        yield path, value
        for key, item in _inside(value):
            yield from _walk((*path, key), item, seen)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if not _is_kept(value) or id(value) in copies:
        return copies.get(id(value), value)
    copies[id(value)] = copied = copy.copy(value)  # of its own class, which dict.copy() may not keep
    for key, item in _inside(value):
        copied[key] = _copied(item, copies)
    return copied


def _kept(before: list[Any], now: list[Any]) -> int:
    """How many items at a list's start it had before; items at either end may have been taken away since."""
    for start in range(max(0, len(before) - len(now)), len(before)):
        if all(map(operator.is_, before[start:], now)):
            return len(before) - start
    pairs = list(zip(before, now, strict=False))
    return next((index for index, (old, new) in enumerate(pairs) if old is not new), len(pairs))


def _merged(
    appended: Sequence[list[Any]], path: _Path, sizes: Sequence[int], home: torch.device, doubts: Doubts | None
) -> list[Any]:
    what = f"what was appended to {path[1]!r}" + "".join(f"[{key!r}]" for key in path[2:])
    counts = [len(items) for items in appended]
    is_fixed = doubts is not None and doubts.is_fixed(counts, sizes, what)
    if len(set(counts)) == 1 and (is_fixed or not _per_sample(appended, sizes)):
        try:
            return [merge(column, sizes, home, what, doubts) for column in zip(*appended, strict=True)]
        except ValueError:  # one replica after the other does as well
            pass
    apart = len({tensor.device for tensor in tensors_in(list(appended))}) > 1  # else where the step has put them
    return [move_to(item, home) if apart else item for items in appended for item in items]


def _per_sample(appended: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Whether lists got one item of each sample, which are all of one type."""
    one_type = len({type(item) for items in appended for item in items}) == 1
    return one_type and [len(items) for items in appended] == list(sizes) and not batched(appended, sizes)
