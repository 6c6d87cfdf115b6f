"""Batches split over devices, and outputs of several devices put together again; differentiable both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_bucketddp.replicas.nested import items_of, joined, rebuilt, require_same

Device = torch.device | str | int


def accelerator_type() -> str | None:
    """The type of this machine's accelerators; None if it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def accelerators() -> list[torch.device]:
    """This machine's accelerators."""
    kind = accelerator_type()
    return [] if kind is None else [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def as_device(device: Device) -> torch.device:
    """``device`` with its index, so that it compares equal to a tensor's: ``"cuda"`` is the current CUDA device.

    Args:
        device: A device, its name, or the index of an accelerator.

    Raises:
        ValueError: If an index is given and there is no accelerator.
    """
    kind = accelerator_type()
    if isinstance(device, int):
        if kind is None:
            raise ValueError(
                f"expected a device by name or as torch.device, as this machine has no accelerator, found the index "
                f"{device}; the CPU is torch.device('cpu')"
            )
        return torch.device(kind, device)
    found = torch.device(device)
    if found.type in ("cpu", "meta"):
        return torch.device(found.type)
    if found.index is None:
        return torch.device(found.type, torch.accelerator.current_device_index() if found.type == kind else 0)
    return found


def as_devices(devices: Sequence[Device]) -> tuple[torch.device, ...]:
    """``devices``, each as :func:`as_device`.

    Raises:
        ValueError: If there is none.
    """
    if not devices:
        raise ValueError("expected at least one device, found none")
    return tuple(as_device(device) for device in devices)


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> list[Any]:
    """Splits every tensor in ``inputs`` along ``dim`` and puts the chunks on ``devices``, as :func:`torch.chunk` does.

    Tuples, lists, dicts, named tuples and dataclasses are rebuilt around the chunks. What is not a tensor, and tensors
    of no dimension, go to every device. Gradients flow back into the tensors that were split.

    Args:
        inputs: Tensors in nested containers.
        devices: Where the chunks go; the same one may come several times.
        dim: The dimension of the batch.

    Returns:
        What each device gets. Fewer than devices where a batch makes fewer chunks (5 samples on 4 devices: 2, 2 and 1);
        as many as devices where there is no tensor to split. Tensors without samples make as many chunks as the rest.

    Raises:
        ValueError: If tensors make different numbers of chunks, as samples of the others would be dropped; if a tensor
            has no dimension ``dim``; for packed sequences.
    """
    targets = as_devices(devices)
    counts: dict[int, Tensor] = {}
    _count_chunks(inputs, len(targets), dim, counts)
    if len(counts) > 1:
        (few, first), (many, second) = sorted(counts.items())[:2]
        raise ValueError(
            f"expected tensors with one number of samples along dimension {dim}, found shapes {tuple(first.shape)} and "
            f"{tuple(second.shape)}, which make {few} and {many} chunks for {len(targets)} devices; pad them, or pass "
            "what is not split by sample as something other than a tensor"
        )
    count = next(iter(counts), len(targets))
    return _scatter(inputs, targets[:count], dim)


def _count_chunks(value: Any, most: int, dim: int, counts: dict[int, Tensor]) -> None:
    """Notes in ``counts`` into how many chunks each tensor with samples splits, with one such tensor."""
    if isinstance(value, Tensor):
        if value.dim() and _size(value, dim):
            counts.setdefault(-(-_size(value, dim) // -(-_size(value, dim) // most)), value)
    elif isinstance(value, PackedSequence):
        raise ValueError(
            "expected tensors in containers, found a PackedSequence, whose samples lie interleaved and cannot be "
            "split; pass the padded sequences with their lengths and pack them in forward"
        )
    else:
        for item in (items_of(value) or {}).values():
            _count_chunks(item, most, dim, counts)


def _size(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"expected tensors with a dimension {dim}, found one of shape {tuple(tensor.shape)}")
    return tensor.size(dim)


def _scatter(value: Any, targets: Sequence[torch.device], dim: int) -> list[Any]:
    if isinstance(value, Tensor):
        # of no dimension: each has its own, as each has its own part of others, to change in place
        chunks = value.chunk(len(targets), dim) if value.dim() else [value, *(value.clone() for _ in targets[1:])]
        return [_moved(chunk, device) for chunk, device in zip(chunks, targets, strict=True)]
    items = items_of(value)
    if items is None:
        return [value] * len(targets)
    parts = [_scatter(item, targets, dim) for item in items.values()]
    return [rebuilt(value, [part[index] for part in parts]) for index in range(len(targets))]


def _moved(chunk: Tensor, device: torch.device) -> Tensor:
    if chunk.device == device and not chunk.requires_grad:
        return chunk.data  # as all chunks count in-place changes together, and each replica's graph its own alone
    return chunk.to(device, non_blocking=device.type != "cpu")


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Puts the outputs of several replicas together on one device; the reverse of :func:`scatter`.

    Tensors are concatenated along ``dim``; those of no dimension, as losses are, make a vector with one element per
    replica (without the warning that torch gives: it is what is wanted, and it is said here). Containers are rebuilt
    around the results. Other values must be the same in all outputs.

    Args:
        outputs: One output per replica.
        device: Where the result goes.
        dim: The dimension of the batch.

    Raises:
        ValueError: If the outputs differ in their structure, or in values that are not tensors.
    """
    if not outputs:
        raise ValueError("expected at least one output to gather, found none")
    target = as_device(device)
    return joined(outputs, "output", lambda values, path: _gathered(values, path, target, dim))


def _gathered(values: Sequence[Any], path: str, target: torch.device, dim: int) -> Any:
    first = values[0]
    require_same(values, path, "type", lambda value: Tensor if isinstance(value, Tensor) else type(value))
    if not isinstance(first, Tensor):
        require_same(values, path, "value", lambda value: value)
        return first
    require_same(values, path, "dtype", lambda tensor: tensor.dtype)
    require_same(values, path, f"shape but for dimension {dim}", lambda tensor: _shape_without(tensor, dim))
    moved = [tensor.to(target, non_blocking=target.type != "cpu") for tensor in values]
    return torch.cat(moved, dim) if first.dim() else torch.stack(moved)


def _shape_without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    if not tensor.dim():
        return ()
    _size(tensor, dim)
    shape = list(tensor.shape)
    shape[dim] = -1
    return tuple(shape)
