"""Split a batch by samples among devices."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.replicas.nested import items_of, move_to, rebuilt, tensors_in
from lightning_bucketddp.replicas.scatter_gather import scatter

_CONSTANTS = (str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, torch.Size, torch.Generator, type(None))

Shards = Sequence[tuple[Any, int]]
"""A split batch: for each device a shard and its number of samples. A small batch has fewer shards than devices."""

ScatterBatch = Callable[[Any, int], Shards]
"""Splits a batch among a number of devices."""


def divide(batch: Any, devices: Sequence[torch.device], scatter_batch: ScatterBatch | None = None) -> Shards:
    """Split a batch's samples among devices.

    Tensors are split along their first dimension. Lists and tuples without tensors that have one item per sample are
    split too. Every device gets tensors of no dimension, numbers, strings and None. A batch without samples goes to the
    first device, whole.

    Args:
        batch: Tensors in lists, tuples, dicts and dataclasses.
        devices: The devices.
        scatter_batch: Splits the batch instead. Its shards are then moved to the devices.

    Raises:
        ValueError: If tensors or lists have different numbers of samples, or the batch holds other objects. The message
            says where.
    """
    if scatter_batch is not None:
        return _divided_by(scatter_batch, batch, devices)
    count = next((tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()), 0)
    if not count:
        return [(batch, 1)]
    sizes = [len(chunk) for chunk in torch.empty(count).chunk(len(devices))]
    return list(zip(_divided(batch, "batch", sizes, devices[: len(sizes)]), sizes, strict=True))


def _divided(value: Any, path: str, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[Any]:
    if isinstance(value, Tensor):
        if value.dim():
            _require_samples(value, path, sizes)
        return scatter(value, devices)
    if isinstance(value, _CONSTANTS):
        return [value] * len(sizes)
    items = items_of(value)
    if items is None:
        raise _not_divisible(f"tensors in lists, tuples, dicts and dataclasses, found a {type(value).__name__}", path)
    if type(value) in (list, tuple) and value and not any(True for _ in tensors_in(value)):
        _require_samples(value, path, sizes)
        return [value[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    columns = [_divided(item, path + place, sizes, devices) for place, item in items.items()]
    return [rebuilt(value, [column[index] for column in columns]) for index in range(len(sizes))]


def _require_samples(value: Any, path: str, sizes: Sequence[int]) -> None:
    if len(value) != sum(sizes):
        raise _not_divisible(f"one row or item for each of the {sum(sizes)} samples, found {len(value)}", path)


def _not_divisible(expected_and_found: str, path: str) -> ValueError:
    return ValueError(
        f"cannot split the batch among devices: expected {expected_and_found} in {path}; pass "
        "BucketDPStrategy(scatter_batch=...), a function that splits such a batch"
    )


def _divided_by(scatter_batch: ScatterBatch, batch: Any, devices: Sequence[torch.device]) -> Shards:
    found = list(scatter_batch(batch, len(devices)))
    if not 0 < len(found) <= len(devices) or any(size < 1 for _, size in found):
        raise ValueError(
            f"expected scatter_batch to return 1 to {len(devices)} pairs of a shard and its number of samples, at "
            f"least one, found {len(found)} with {[size for _, size in found]} samples"
        )
    return [(move_to(shard, device), size) for (shard, size), device in zip(found, devices, strict=False)]
