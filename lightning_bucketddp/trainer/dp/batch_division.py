"""A batch divided among devices by samples, or the reason why it cannot be."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_bucketddp.replicas.nested import items_of, move_to, rebuilt, tensors_in
from lightning_bucketddp.replicas.scatter_gather import scatter

_CONSTANTS = (str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, torch.Size, torch.Generator, type(None))

ScatterBatch = Callable[[Any, int], Sequence[tuple[Any, int]]]
"""Divides a batch among a number of devices: into at most as many pairs of a shard and its number of samples."""


class Division(NamedTuple):
    """A divided batch.

    Attributes:
        shards: What each device gets; fewer than devices if there are fewer samples.
        sizes: How many samples that is, for each shard.
    """

    shards: list[Any]
    sizes: list[int]


def divide(batch: Any, devices: Sequence[torch.device], scatter_batch: ScatterBatch | None = None) -> Division:
    """Divides a batch's samples among devices.

    Tensors are divided along their first dimension, and lists and tuples without tensors that have one item per
    sample. Tensors of no dimension, numbers, strings and None go to every device. A batch without samples goes to the
    first device, whole.

    Args:
        batch: Tensors in lists, tuples, dicts and dataclasses.
        devices: The devices.
        scatter_batch: Divides the batch instead; the shards' tensors are moved here.

    Raises:
        ValueError: If tensors or lists have other numbers of samples, or the batch holds other objects; says where.
    """
    if scatter_batch is not None:
        return _divided_by(scatter_batch, batch, devices)
    count = next((tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()), 0)
    if not count:
        return Division([batch], [1])
    sizes = [len(chunk) for chunk in torch.empty(count, 0).chunk(len(devices))]
    return Division(_divided(batch, "batch", sizes, devices[: len(sizes)]), sizes)


def _divided(value: Any, path: str, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[Any]:
    if isinstance(value, Tensor):
        if value.dim():
            _require_samples(value, path, sizes)
        return scatter(value, devices)
    if isinstance(value, _CONSTANTS):
        return [value] * len(sizes)
    items = None if isinstance(value, PackedSequence) else items_of(value)
    if items is None:
        raise _not_divisible(f"tensors in lists, tuples, dicts and dataclasses, found a {type(value).__name__}", path)
    if type(value) in (list, tuple) and value and not any(True for _ in tensors_in(value)):
        _require_samples(value, path, sizes)
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    columns = [_divided(item, path + place, sizes, devices) for place, item in items.items()]
    return [rebuilt(value, [column[index] for column in columns]) for index in range(len(sizes))]


def _require_samples(value: Any, path: str, sizes: Sequence[int]) -> None:
    if len(value) != sum(sizes):
        raise _not_divisible(f"one row or item for each of the {sum(sizes)} samples, found {len(value)}", path)


def _not_divisible(expected_and_found: str, path: str) -> ValueError:
    return ValueError(
        f"cannot divide the batch among devices: expected {expected_and_found} in {path}; pass "
        "BucketDPStrategy(scatter_batch=...), a function that divides such a batch"
    )


def _divided_by(scatter_batch: ScatterBatch, batch: Any, devices: Sequence[torch.device]) -> Division:
    found = list(scatter_batch(batch, len(devices)))
    if not 0 < len(found) <= len(devices) or any(size < 1 for _, size in found):
        raise ValueError(
            f"expected scatter_batch to return 1 to {len(devices)} pairs of a shard and its number of samples, at "
            f"least one, found {len(found)} with {[size for _, size in found]} samples"
        )
    shards = [move_to(shard, device) for (shard, _), device in zip(found, devices, strict=False)]
    return Division(shards, [size for _, size in found])
