"""What replicas have returned, put together as one device would have returned it for the whole batch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.replicas.nested import move_to, rebuilt, tensors_in
from lightning_bucketddp.replicas.scatter_gather import gather
from lightning_bucketddp.trainer.dp.doubts import Doubts

_NO_COUNT = re.compile(r"idx|index|indices|(?<![a-z])(epoch|step|seed|dim|classes)(?![a-z])", re.IGNORECASE)
"""In the names of integers that say where or what something is, not how much of it there is."""

_NAME = re.compile(r"'([^']*)'|\.(\w+)")
"""A name in a path, which also has words in it that are no names, such as training_step."""


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


def is_count(name: str) -> bool:
    """Whether integers of a name are added up over replicas, and do not say where or what something is."""
    return not _NO_COUNT.search(name)


def merge(
    values: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    path: str = "the output",
    doubts: Doubts | None = None,
) -> Any:
    """Merges one value per replica, as far as values tell how one device would have made it.

    - Tensors are concatenated along their first dimension. Of floating-point tensors without dimensions, and of
      floats, the mean is taken, weighted by the number of samples; integers, and integer tensors without dimensions,
      are added up. Integers whose name says that they are no count, as ``batch_idx``, ``epoch`` or ``num_classes``,
      have to be the same in every replica.
    - Containers and dataclasses are merged item by item, but lists of samples are concatenated. Lists are of samples
      if they have one item per sample, and those are not all tensors with one row per sample; if there are no tensors
      in them; and if they hold dicts whose tensors have other numbers of rows. Lists of numbers may be something else,
      such as a loss and an accuracy. Of tensors without dimensions, one per sample in replicas of as many samples, and
      of floats, as many in all replicas but not one per sample, they are taken to be that, with a warning.
    - Tuples hold a fixed number of values, and are merged item by item. They are concatenated if they have one item
      per sample, all of one type that is not merged itself, such as file names. NumPy arrays are as tensors.
    - What a replica of one sample has squeezed gets its first dimension back, if others have it.
    - Anything else has to be the same in every replica.

    Args:
        values: The values, in the replicas' order.
        sizes: How many samples each replica had.
        device: Where tensors go, unless all are in one other place.
        path: What the values are, for messages.
        doubts: Warns of what may have been meant otherwise; of nothing by default.

    Raises:
        ValueError: If the values cannot be merged; says which and why.
    """

    def of_items(columns: Iterable[Sequence[Any]], paths: Iterable[str]) -> list[Any]:
        return [merge(column, sizes, device, at, doubts) for column, at in zip(columns, paths, strict=True)]

    first = values[0]
    if isinstance(first, Tensor):
        _require(all(isinstance(value, Tensor) for value in values), path, "a tensor of each", _kinds(values))
        return _merge_tensors(list(values), sizes, device, path, doubts)
    same_kind = all(type(value) is type(first) for value in values)
    _require(same_kind, path, "values of one type", _kinds(values))
    if type(first) in (list, tuple):
        if _are_of_samples(values, sizes, path, doubts):
            apart = len({tensor.device for tensor in tensors_in(list(values))}) > 1  # else where the step has put them
            return type(first)(move_to(item, device) if apart else item for value in values for item in value)
        lengths = [len(value) for value in values]
        _require(len(set(lengths)) == 1, path, "as many items in each", lengths)
        return type(first)(of_items(zip(*values, strict=True), (f"{path}[{index}]" for index in range(lengths[0]))))
    if isinstance(first, Mapping):
        keys = all(value.keys() == first.keys() for value in values)
        _require(keys, path, "the same keys", [list(value) for value in values])
        return rebuilt(first, of_items([[v[key] for v in values] for key in first], [f"{path}[{k!r}]" for k in first]))
    if isinstance(first, tuple):  # a named one
        names = first._fields if hasattr(first, "_fields") else range(len(first))
        return rebuilt(first, of_items(zip(*values, strict=True), [f"{path}.{name}" for name in names]))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if hasattr(first, field.name)]
        columns = [[getattr(value, name) for value in values] for name in names]
        return rebuilt(first, of_items(columns, [f"{path}.{name}" for name in names]))
    if isinstance(first, float):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    if type(first) is int and _is_count(path):
        if doubts is not None:
            doubts.integers(values, sizes, path)
        return sum(values)
    if _is_array(first):
        arrays = [torch.as_tensor(value) for value in values]
        return _merge_tensors(arrays, sizes, torch.device("cpu"), path, doubts).numpy()
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


def _is_count(path: str) -> bool:
    return all(map(is_count, ("".join(found.groups("")) for found in _NAME.finditer(path))))


def _merge_tensors(
    values: list[Tensor], sizes: Sequence[int], device: torch.device, path: str, doubts: Doubts | None
) -> Tensor:
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
        if doubts is not None:
            doubts.rows([value.size(0) for value in values], sizes, path)
        return gather(values, device)
    if values[0].is_floating_point() or values[0].is_complex():
        return weighted_mean(values, sizes, device)
    moved = [value.to(device) for value in values]
    if values[0].dtype is torch.bool or not _is_count(path):
        found = [value.item() for value in moved]
        _require(len(set(found)) == 1, path, "the same value", found)
        return moved[0]
    return torch.stack(moved).sum(0, dtype=moved[0].dtype)


def _are_of_samples(values: Sequence[Any], sizes: Sequence[int], path: str, doubts: Doubts | None) -> bool:
    """Whether lists or tuples hold items of samples, which are concatenated, and not values, which are merged."""
    lengths = [len(value) for value in values]
    items = [item for value in values for item in value]
    one_each = lengths == list(sizes)
    if type(values[0]) is tuple:
        kinds = {type(item) for item in items}
        return one_each and len(kinds) == 1 and not any(map(_is_merged, items))
    with_tensors = any(True for _ in tensors_in(items))
    if not all(map(_is_number, items)) or not (with_tensors or any(map(_is_float, items))):
        return not with_tensors or _are_records(values, sizes) or (one_each and not batched(values, sizes))
    is_fixed = doubts is not None and doubts.is_fixed(lengths, sizes, path)
    if with_tensors:
        of_samples = one_each and len(set(sizes)) > 1
        doubtful = one_each and not of_samples and not is_fixed
    else:
        of_samples = len(set(lengths)) > 1 or (one_each and not is_fixed)
        doubtful = not of_samples and not one_each
    if doubtful and doubts is not None:
        doubts.numbers(lengths, sizes, path)
    return of_samples


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or (_is_array(value) and value.ndim == 0)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (_is_array(value) and torch.as_tensor(value).is_floating_point())


def _is_merged(value: Any) -> bool:
    """Whether a value is merged with other replicas', and does not have to be the same."""
    container = isinstance(value, list | tuple | Mapping) or dataclasses.is_dataclass(value)
    return container or value is None or isinstance(value, int | float | complex) or _is_array(value)


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
