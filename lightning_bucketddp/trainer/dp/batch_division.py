"""A batch divided among devices by samples, or the reason why it cannot be."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_bucketddp.replicas.nested import move_to, rebuilt, tensors_in
from lightning_bucketddp.replicas.scatter_gather import scatter

_ATOMS = (str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, torch.Size, torch.Generator, type(None))
_REMEDY = "pass BucketDPStrategy(scatter_batch=...), a function that divides a batch, for batches of another kind"

ScatterBatch = Callable[[Any, int], Sequence[tuple[Any, int]]]
"""Divides a batch among a number of devices: into at most as many pairs of a shard and its number of samples."""


@dataclass(frozen=True)
class Division:
    """A divided batch.

    Attributes:
        shards: What each device gets; fewer than devices if there are fewer samples.
        sizes: How many samples that is, for each shard.
    """

    shards: list[Any]
    sizes: list[int]


def divide(batch: Any, devices: Sequence[torch.device], scatter_batch: ScatterBatch | None = None) -> Division:
    """Divides a batch's samples among devices.

    Samples lie along the first dimension of all tensors; lists and tuples with one item per sample, and no tensor
    in them, are divided along with them. Batches that consist of several batches with a size of their own, as those
    of several loaders, are divided one by one. Anything else goes to every device: tensors of no dimension, numbers,
    strings. A batch without samples to divide goes to the first device, whole.

    Args:
        batch: Tensors in nested containers.
        devices: The devices.
        scatter_batch: Divides the batch instead; the shards' tensors are moved here.

    Raises:
        ValueError: If tensors differ in their first dimension, or the batch holds objects of a kind that could
            hold samples too; says where.
    """
    if scatter_batch is not None:
        return _divided_by(scatter_batch, batch, devices)
    parts = _parts(batch)
    divided = [_divide_part(part, path, devices) for path, part in parts]
    if not any(sizes for _, sizes in divided):
        return Division([batch], [1])
    sizes = next(sizes for _, sizes in divided if sizes)
    for (path, _), (_, other) in zip(parts, divided, strict=True):
        if other and [size * sum(sizes) for size in other] != [size * sum(other) for size in sizes]:
            raise ValueError(
                f"expected batches of several loaders to be divided in the same proportion, found {sizes} samples per "
                f"device in one and {other} in {path}; choose batch sizes that are multiples of {len(devices)}, with "
                f"drop_last=True, or {_REMEDY}"
            )
    if len(parts) == 1 and parts[0][1] is batch:
        return Division(divided[0][0], sizes)
    columns = [shards if own else shards * len(sizes) for shards, own in divided]
    return Division([rebuilt(batch, [column[index] for column in columns]) for index in range(len(sizes))], sizes)


def _parts(batch: Any) -> list[tuple[str, Any]]:
    """The batches in a batch that have a size of their own; the batch itself if it has but one size."""
    if isinstance(batch, Mapping):
        named = [(f"batch[{key!r}]", item) for key, item in batch.items()]
    elif isinstance(batch, list | tuple):
        named = [(f"batch[{index}]", item) for index, item in enumerate(batch)]
    else:
        named = []
    # None is what a CombinedLoader gives for a loader that is exhausted
    containers = all(item is None or isinstance(item, list | tuple | Mapping) for _, item in named)
    return named if named and containers and len(set(_first_dims(batch))) > 1 else [("batch", batch)]


def _first_dims(value: Any) -> list[int]:
    return [tensor.size(0) for tensor in tensors_in(value) if tensor.dim()]


def _divide_part(part: Any, path: str, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
    """A part's shards and their sizes; the part and no sizes if nothing can be divided."""
    first_dims = _first_dims(part)
    if not first_dims or not first_dims[0]:
        return [part], []
    if len(set(first_dims)) > 1:
        other = next(size for size in first_dims if size != first_dims[0])
        raise ValueError(
            f"expected all tensors of a batch to have the samples along their first dimension, found {first_dims[0]} "
            f"and {other} in {path}; return what is not divided by samples as something else than a tensor of a "
            f"batch, or {_REMEDY}"
        )
    samples = torch.empty(first_dims[0], 0)  # whose division everything else follows
    sizes = [len(chunk) for chunk in samples.chunk(len(devices))]
    return _divide(part, path, sizes, devices), sizes


def _divide(value: Any, path: str, sizes: list[int], devices: Sequence[torch.device]) -> list[Any]:
    if isinstance(value, Tensor):
        return scatter(value, devices)
    plain = type(value) in (list, tuple) and next(tensors_in(value), None) is None
    if plain and len(value) == sum(sizes):
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    if isinstance(value, PackedSequence):
        raise _of_unknown_kind(value, path)
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        items = [(f"{path}.{name}", getattr(value, name)) for name in names]
    elif isinstance(value, _ATOMS):
        return [value] * len(sizes)
    else:
        raise _of_unknown_kind(value, path)
    columns = [_divide(item, name, sizes, devices) for name, item in items]
    return [rebuilt(value, [column[index] for column in columns]) for index in range(len(sizes))]


def _of_unknown_kind(value: Any, path: str) -> ValueError:
    return ValueError(
        f"expected batches of tensors in lists, tuples, dicts and dataclasses, found a {type(value).__qualname__} in "
        f"{path}, of which it cannot be known how its samples are divided; {_REMEDY}"
    )


def _divided_by(scatter_batch: ScatterBatch, batch: Any, devices: Sequence[torch.device]) -> Division:
    found = list(scatter_batch(batch, len(devices)))
    pairs = all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int) for pair in found)
    if not 0 < len(found) <= len(devices) or not pairs or any(size < 1 for _, size in found):
        what = [(type(pair[0]).__name__, *pair[1:]) if isinstance(pair, tuple) and pair else pair for pair in found]
        raise ValueError(
            f"expected scatter_batch to return 1 to {len(devices)} pairs of a shard and its number of samples, at "
            f"least one, found {what!r}"
        )
    shards = [move_to(shard, device) for (shard, _), device in zip(found, devices, strict=False)]
    return Division(shards, [size for _, size in found])
