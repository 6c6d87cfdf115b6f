"""What replicas have returned, put together as one device would have returned it for the whole batch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.nested import move_to, rebuilt, tensors_in
from lightning_bucketddp.scattering import gather

_INDEX = re.compile("idx|index|indices", re.IGNORECASE)
"""In the names of integers that say where something is, not how much of it there is."""


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float], device: torch.device) -> Tensor:
    """The mean of tensors of one shape, weighted, on ``device``; differentiable.

    Args:
        values: The tensors.
        weights: Of any sum; all zero is as all one. Else those that are zero leave their values out, NaN too.
        device: Where the result goes.
    """
    total = sum(weights)
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight or not total]
    shares = [weight / total if total else 1 / len(counted) for _, weight in counted]
    moved = [value.to(device) for value, _ in counted]
    result = moved[0] * shares[0]
    for value, share in zip(moved[1:], shares[1:], strict=True):
        result = result + value * share
    return result


def merge(values: Sequence[Any], sizes: Sequence[int], device: torch.device, path: str = "the output") -> Any:
    """Merges one value per replica, as far as values tell how one device would have made it.

    - Tensors are concatenated along their first dimension. Of floating-point tensors without dimensions, and of
      floats, the mean is taken, weighted by the number of samples; integers, and integer tensors without dimensions,
      are added up. Integers whose name has idx or index in it, as ``batch_idx``, have to be the same in every replica.
    - Containers and dataclasses are merged item by item, but lists with one item per sample (which are not all
      tensors with one row per sample), lists without tensors, and lists of dicts whose tensors have other numbers of
      rows, are concatenated. So are tuples without tensors that have one item per sample. NumPy arrays are as tensors.
    - What a replica of one sample has squeezed gets its first dimension back, if others have it.
    - Anything else has to be the same in every replica.

    Args:
        values: The values, in the replicas' order.
        sizes: How many samples each replica had.
        device: Where tensors go, unless all are in one other place.
        path: What the values are, for messages.

    Raises:
        ValueError: If the values cannot be merged; says which and why.
    """
    first = values[0]
    if isinstance(first, Tensor):
        _require(all(isinstance(value, Tensor) for value in values), path, "a tensor of each", _kinds(values))
        return _merge_tensors(list(values), sizes, device, path)
    same_kind = all(type(value) is type(first) for value in values)
    _require(same_kind, path, "values of one type", _kinds(values))
    if type(first) in (list, tuple):
        return _merge_sequences(values, sizes, device, path)
    if isinstance(first, Mapping):
        keys = all(value.keys() == first.keys() for value in values)
        _require(keys, path, "the same keys", [list(value) for value in values])
        return rebuilt(first, [merge([v[key] for v in values], sizes, device, f"{path}[{key!r}]") for key in first])
    if isinstance(first, tuple):  # a named one
        columns = enumerate(zip(*values, strict=True))
        return rebuilt(first, [merge(column, sizes, device, f"{path}[{index}]") for index, column in columns])
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if hasattr(first, field.name)]
        items = [merge([getattr(v, name) for v in values], sizes, device, f"{path}.{name}") for name in names]
        return rebuilt(first, items)
    if isinstance(first, float):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    if type(first) is int and not _INDEX.search(path):
        return sum(values)
    if _is_array(first):
        arrays = [torch.as_tensor(value) for value in values]
        return _merge_tensors(arrays, sizes, torch.device("cpu"), path).numpy()
    _require(all(value is first or bool(value == first) for value in values), path, "the same value", list(values))
    return first


def merge_loss(losses: Sequence[Tensor], sizes: Sequence[int], device: torch.device, call: str) -> Tensor:
    """The mean of the replicas' losses, weighted by samples, which is that of the whole batch.

    Args:
        losses: One per replica.
        sizes: How many samples each replica had.
        device: Where the mean goes.
        call: What the losses were returned by or passed to, for messages.

    Raises:
        ValueError: If a loss has several elements, as the loss of the whole batch would be another tensor.
    """
    for replica, loss in enumerate(losses):
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.dim() != losses[0].dim():
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(
                f"expected losses with one element for {call}, as their mean over the replicas is taken, found "
                f"{found} in replica {replica}; reduce the loss with .mean() first"
            )
    return weighted_mean(losses, sizes, device)


def batched(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether sequences hold as many tensors or NumPy arrays each, all with the samples along the first dimension."""
    return len({len(value) for value in values}) == 1 and all(
        _is_array(item) and item.ndim > 0 and item.shape[0] == size
        for value, size in zip(values, sizes, strict=True)
        for item in value
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "__array__"))


def _merge_tensors(values: list[Tensor], sizes: Sequence[int], device: torch.device, path: str) -> Tensor:
    if all(value.device == values[0].device for value in values):
        device = values[0].device  # predictions that a step has moved to the CPU stay there
    if any(value.dim() for value in values):
        most = max(value.dim() for value in values)
        values = [  # squeezed, of one sample
            value.unsqueeze(0) if value.dim() == most - 1 and size == 1 else value
            for value, size in zip(values, sizes, strict=True)
        ]
        _require(
            len({(value.dim(), value.shape[1:], value.dtype) for value in values}) == 1,
            path,
            "tensors of one dtype and shape but for the first dimension",
            [f"{tuple(value.shape)} of {value.dtype}" for value in values],
        )
        return gather(values, device)
    if values[0].is_floating_point() or values[0].is_complex():
        return weighted_mean(values, sizes, device)
    moved = [value.to(device) for value in values]
    if values[0].dtype is torch.bool:
        _require(len({bool(value) for value in moved}) == 1, path, "the same value", [bool(value) for value in moved])
        return moved[0]
    return torch.stack(moved).sum(0, dtype=moved[0].dtype)


def _merge_sequences(values: Sequence[Any], sizes: Sequence[int], device: torch.device, path: str) -> Any:
    kind = type(values[0])
    lengths = [len(value) for value in values]
    tensors = [tensor for value in values for tensor in tensors_in(value)]
    per_sample = lengths == list(sizes) and not batched(values, sizes) and (kind is list or not tensors)
    if per_sample or (kind is list and (not tensors or _are_records(values, sizes))):
        apart = len({tensor.device for tensor in tensors}) > 1
        return kind(move_to(item, device) if apart else item for value in values for item in value)
    _require(len(set(lengths)) == 1, path, "as many items in each", lengths)
    columns = enumerate(zip(*values, strict=True))
    return kind(merge(column, sizes, device, f"{path}[{index}]") for index, column in columns)


def _are_records(values: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Whether lists hold dicts of one sample each, which may be of some samples only, and not of all samples."""
    return all(isinstance(item, Mapping) for value in values for item in value) and not all(
        tensor.dim() and tensor.size(0) == size
        for value, size in zip(values, sizes, strict=True)
        for tensor in tensors_in(value)
    )


def _kinds(values: Sequence[Any]) -> list[str]:
    return [type(value).__name__ for value in values]


def _require(holds: bool, path: str, expected: str, found: Sequence[Any]) -> None:
    if not holds:
        raise ValueError(
            f"cannot merge {path} of the replicas: expected {expected}, found {', '.join(map(str, found))}"
        )
