"""What replicas return and log, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.replicas.nested import joined
from lightning_bucketddp.replicas.scatter_gather import gather


def weighted_mean(values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    """The mean of floats or tensors of one shape, weighted, on ``device``; differentiable.

    Args:
        values: The values.
        weights: Of any sum; a weight of zero leaves a value out, NaN too. All zero is as all one.
        device: Where the result goes.
    """
    total = sum(weights)
    if not total:
        weights, total = [1] * len(values), len(values)
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in values]
    return sum(value * (weight / total) for value, weight in zip(moved, weights, strict=True) if weight)


def merge(outputs: Sequence[Any], sizes: Sequence[int], home: torch.device, step: str) -> Any:
    """Merges the replicas' outputs: the contract of :class:`BucketDPStrategy`.

    Args:
        outputs: One per replica.
        sizes: How many samples each replica had.
        home: Where tensors go that are on several devices.
        step: What returned them, for messages.

    Raises:
        ValueError: If an output is of a kind that cannot be merged, or replicas differ; says where.
    """

    def leaf(values: Sequence[Any], path: str) -> Any:
        if all(value is None for value in values):
            return None
        if all(map(is_floating_scalar, values)):
            return weighted_mean(values, sizes, _device_of(values, home))
        rows = [value.size(0) if isinstance(value, Tensor) and value.dim() else None for value in values]
        if rows == list(sizes):
            return gather(values, _device_of(values, home))
        found = ", ".join(f"{_described(value)} in replica {replica}" for replica, value in enumerate(values))
        raise ValueError(
            f"cannot merge {path} of the replicas: expected floating-point scalars, tensors with one row per sample "
            f"({', '.join(map(str, sizes))}) or None, found {found}; leave it out of what the step returns, log it, "
            "or give it to a metric"
        )

    return joined(outputs, f"what {step} returned", leaf)


def is_floating_scalar(value: Any) -> bool:
    """Whether a value is a float, or a tensor of one and of no dimension."""
    return isinstance(value, float) or (isinstance(value, Tensor) and not value.dim() and value.is_floating_point())


def _device_of(values: Sequence[Any], home: torch.device) -> torch.device:
    """``home``, or where all are: predictions that a step has moved to the CPU stay there."""
    places = {value.device for value in values if isinstance(value, Tensor)}
    return places.pop() if len(places) == 1 else home


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"
