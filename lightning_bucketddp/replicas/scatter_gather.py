"""Split batches over devices, and join the outputs of several devices. Gradients flow through both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_bucketddp.replicas.nested import items_of, joined, leaves, rebuilt, require_same

Device = torch.device | str | int


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerators, None if it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def accelerators() -> list[torch.device]:
    """List this machine's accelerators."""
    kind = accelerator_type()
    return [] if kind is None else [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def as_device(device: Device, argument: str = "devices") -> torch.device:
    """Return the device of a tensor that is made there: for ``"cuda"`` the current CUDA device, with its index.

    Args:
        device: A device, its name, or the index of an accelerator.
        argument: The caller's name for it, for messages.

    Raises:
        TypeError: If it is none of these.
        ValueError: If this machine has no such device.
    """
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise TypeError(f"expected {argument} to name devices, found {device!r}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ValueError) as error:  # AssertionError: torch was built without such devices
        raise ValueError(f"expected {argument} to name devices, found {device!r}: {error}") from None


def as_devices(devices: Sequence[Device]) -> tuple[torch.device, ...]:
    """Return each device as :func:`as_device` does.

    Raises:
        ValueError: If there is none.
    """
    if not devices:
        raise ValueError("expected at least one device, found none; pass some, for example ['cpu', 'cpu']")
    return tuple(as_device(device) for device in devices)


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> list[Any]:
    """Split every tensor in ``inputs`` along ``dim`` as :func:`torch.chunk` does, and put the chunks on ``devices``.

    Tuples, lists, dicts, named tuples and dataclasses are rebuilt around the chunks. Every device gets all that is not
    a tensor, and tensors of no dimension. Gradients flow back into the tensors that were split.

    Args:
        inputs: Tensors in nested containers.
        devices: Where the chunks go. The same device may come several times.
        dim: The dimension of the batch.

    Returns:
        One part per device. There are fewer parts than devices where a batch makes fewer chunks (5 samples on 4
        devices: 2, 2 and 1). Without a tensor to split there are as many as devices.

    Raises:
        ValueError: If tensors make different numbers of chunks (samples would be lost), if a tensor has no dimension
            ``dim``, or for packed sequences.
    """
    targets = as_devices(devices)
    by_count: dict[int, Tensor] = {}
    for leaf in leaves(inputs):
        if isinstance(leaf, PackedSequence):
            raise ValueError(
                "expected tensors in containers, found a PackedSequence, whose samples lie interleaved and cannot be "
                "split; pass the padded sequences with their lengths and pack them in forward"
            )
        if isinstance(leaf, Tensor) and leaf.dim() and _size(leaf, dim):  # one without samples splits into any number
            by_count.setdefault(len(leaf.chunk(len(targets), dim)), leaf)
    if len(by_count) > 1:
        (few, first), (many, second) = sorted(by_count.items())[:2]
        raise ValueError(
            f"expected tensors with one number of samples along dimension {dim}, found shapes {tuple(first.shape)} and "
            f"{tuple(second.shape)}, which make {few} and {many} chunks for {len(targets)} devices; pad them, or pass "
            "what is not split by sample as something other than a tensor"
        )
    return _scatter(inputs, targets[: next(iter(by_count), len(targets))], dim)


def _size(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"expected tensors with a dimension {dim}, found one of shape {tuple(tensor.shape)}")
    return tensor.size(dim)


def _scatter(value: Any, targets: Sequence[torch.device], dim: int) -> list[Any]:
    if isinstance(value, Tensor):
        # A replica may change its part in place. Scalars are cloned for that.
        chunks = value.chunk(len(targets), dim) if value.dim() else [value, *(value.clone() for _ in targets[1:])]
        return [_moved(chunk, device) for chunk, device in zip(chunks, targets, strict=True)]
    items = items_of(value)
    if items is None:
        return [value] * len(targets)
    parts = [_scatter(item, targets, dim) for item in items.values()]
    return [rebuilt(value, [part[index] for part in parts]) for index in range(len(targets))]


def _moved(chunk: Tensor, device: torch.device) -> Tensor:
    if chunk.device == device and not chunk.requires_grad:
        return chunk.data  # chunks share a version counter: a change of one would invalidate the graphs of the others
    return chunk.to(device, non_blocking=device.type != "cpu")


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Join the outputs of several replicas on one device: the reverse of :func:`scatter`.

    Tensors are concatenated along ``dim``. Tensors of no dimension, such as losses, make a vector with one element per
    replica. Containers are rebuilt around the results. Other values must be the same in all outputs.

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
    """Return the shape with -1 for dimension ``dim``."""
    shape = list(tensor.shape)
    if shape:
        _size(tensor, dim)
        shape[dim] = -1
    return tuple(shape)
