"""Merge the outputs and logs of replicas. ``self.log`` is recorded while they run, and called once afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bucketddp.replicas.nested import joined
from lightning_bucketddp.replicas.scatter_gather import gather

_OPTIONS = list(inspect.signature(pl.LightningModule.log).parameters)[3:]
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "min": torch.min, "max": torch.max}


def merge(outputs: Sequence[Any], sizes: Sequence[int], home: torch.device, step: str) -> Any:
    """Merge the replicas' outputs, by the contract of :class:`BucketDPStrategy`.

    Args:
        outputs: One per replica.
        sizes: How many samples each replica had.
        home: Where tensors go that are on several devices.
        step: The step that returned them, for messages.

    Raises:
        ValueError: If an output is of a kind that cannot be merged, or replicas differ. The message says where.
    """

    def leaf(values: Sequence[Any], path: str) -> Any:
        if all(value is None for value in values):
            return None
        places = {value.device for value in values if isinstance(value, Tensor)}
        target = places.pop() if len(places) == 1 else home  # predictions that a step has moved to the CPU stay there
        if all(map(_is_floating_scalar, values)):
            return _weighted_mean(values, sizes, target)
        rows = [value.size(0) if isinstance(value, Tensor) and value.dim() else None for value in values]
        if rows == list(sizes):
            return gather(values, target)
        found = ", ".join(f"{_described(value)} in replica {replica}" for replica, value in enumerate(values))
        raise ValueError(
            f"cannot merge {path} of the replicas: expected floating-point scalars, tensors with one row per sample "
            f"({', '.join(map(str, sizes))}) or None, found {found}; leave it out of what the step returns, log it, "
            "or give it to a metric"
        )

    return joined(outputs, f"what {step} returned", leaf)


def _weighted_mean(values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    """Take the weighted mean of scalars; differentiable.

    Args:
        values: Floats and tensors of no dimension.
        weights: Of any sum. A weight of zero leaves a value out, even NaN. If all are zero, all count the same.
        device: Where tensors go.
    """
    total = sum(weights)
    if not total:
        weights, total = [1] * len(values), len(values)
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in values]
    return sum(value * (weight / total) for value, weight in zip(moved, weights, strict=True) if weight)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())


def _is_floating_scalar(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and not value.dim() and value.is_floating_point())


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


class _Logged(NamedTuple):
    name: str
    value: Any
    options: dict[str, Any]


class LogBook:
    """The calls of ``self.log`` in the replicas of one step.

    Args:
        sizes: How many samples each replica has.
        home: Where merged values go.
        step: What the replicas run, for messages.
        originals: The LightningModule's own metric by the id of a replica's.
    """

    def __init__(self, sizes: Sequence[int], home: torch.device, step: str, originals: Mapping[int, Metric]) -> None:
        self._sizes, self._home, self._step, self._originals = sizes, home, step, originals
        self._calls: list[list[_Logged]] = [[] for _ in sizes]

    def log(self, replica: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record a replica's call."""
        options = dict(zip(_OPTIONS, args, strict=False)) | kwargs
        if isinstance(value, Tensor):  # the step may change it afterwards
            value = value.clone() if options.get("enable_graph") else value.detach().clone()
        self._calls[replica].append(_Logged(name, self._originals.get(id(value), value), options))

    def replay(self, log: Callable[..., None]) -> None:
        """Log each value once, merged over the replicas.

        Args:
            log: The LightningModule's method.

        Raises:
            ValueError: If the replicas log different names, or values that cannot be merged. The message names them.
        """
        for calls in zip_longest(*self._calls):
            names = [None if call is None else call.name for call in calls]
            if len(set(names)) > 1:
                raise ValueError(
                    f"expected all replicas to log the same names in the same order in {self._step}, found {names}; "
                    "log in every replica, or in a hook such as on_train_batch_end"
                )
            first = calls[0]
            if isinstance(first.value, Metric):
                log(first.name, first.value, **first.options)
                continue
            given = [call.options.get("batch_size") for call in calls]
            sizes = [size if own is None else own for size, own in zip(self._sizes, given, strict=True)]
            value = self._merged(first, [call.value for call in calls], sizes)
            log(first.name, value, **{**first.options, "batch_size": sum(sizes)})

    def _merged(self, first: _Logged, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        reduce_fx = first.options.get("reduce_fx", "mean")  # a name, or torch's function of that name
        kind = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
        scalars = [value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value for value in values]
        if kind in _REDUCTIONS and all(map(_is_number, scalars)):
            return _REDUCTIONS[kind](torch.stack([torch.as_tensor(value, device=self._home) for value in scalars]))
        if all(map(_is_floating_scalar, scalars)):
            return _weighted_mean(scalars, sizes, self._home)
        raise ValueError(
            f"expected floating-point scalars or metrics for self.log({first.name!r}) in {self._step}, to take their "
            f"mean over the replicas, found {', '.join(map(str, values))}; log float(value), or say by reduce_fx="
            '"sum", "min" or "max" how to merge numbers'
        )
