"""What replicas return and log, put together: ``self.log`` is kept while they run, and made once afterwards."""

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
_REDUCTIONS: dict[str, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


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


class _Logged(NamedTuple):
    name: str
    value: Any
    options: dict[str, Any]


class LogBook:
    """What the replicas of one step log.

    Args:
        sizes: How many samples each replica has.
        home: Where merged values go.
        step: What the replicas run, for messages.
        originals: The LightningModule's own metric for a replica's, by the id of the latter.
    """

    def __init__(self, sizes: Sequence[int], home: torch.device, step: str, originals: Mapping[int, Metric]) -> None:
        self._sizes = sizes
        self._home = home
        self._step = step
        self._originals = originals
        self._calls: list[list[_Logged]] = [[] for _ in sizes]

    def log(self, replica: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Keeps what a replica gives to ``self.log``."""
        options = dict(zip(_OPTIONS, args, strict=False)) | kwargs
        if isinstance(value, Tensor):  # which the step may change once it is logged
            value = value.clone() if options.get("enable_graph") else value.detach().clone()
        self._calls[replica].append(_Logged(name, self._originals.get(id(value), value), options))

    def replay(self, log: Callable[..., None]) -> None:
        """Logs once what all replicas have logged.

        Args:
            log: The LightningModule's method.

        Raises:
            ValueError: If replicas log other names, or values that cannot be merged; says which.
        """
        for calls in zip_longest(*self._calls):
            names = [None if call is None else call.name for call in calls]
            if len(set(names)) > 1:
                raise ValueError(
                    f"expected all replicas to log the same names in the same order in {self._step}, found {names}; "
                    "log in every replica, or in a hook such as on_train_batch_end"
                )
            self._log_once(log, calls)

    def _log_once(self, log: Callable[..., None], calls: Sequence[_Logged]) -> None:
        first = calls[0]
        if isinstance(first.value, Metric):
            log(first.name, first.value, **first.options)
            return
        given = [call.options.get("batch_size") for call in calls]
        weights = [size if own is None else own for size, own in zip(self._sizes, given, strict=True)]
        value = self._merged(first, [call.value for call in calls], weights)
        log(first.name, value, **{**first.options, "batch_size": sum(weights)})

    def _merged(self, first: _Logged, values: Sequence[Any], weights: Sequence[int]) -> Any:
        reduce_fx = first.options.get("reduce_fx", "mean")  # a name, or a function of torch of that name
        kind = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
        scalars = [value.to(self._home).reshape(()) if _has_one_element(value) else value for value in values]
        if kind in _REDUCTIONS and all(_is_number(value) for value in scalars):
            return _REDUCTIONS[kind](torch.stack([torch.as_tensor(value, device=self._home) for value in scalars]), 0)
        if all(map(is_floating_scalar, scalars)):
            return weighted_mean(scalars, weights, self._home)
        found = ", ".join(str(value) for value in values)
        raise ValueError(
            f"expected floating-point scalars or metrics for self.log({first.name!r}) in {self._step}, whose mean over "
            f"the replicas is taken, found {found}; log float(value), or say how numbers are merged by reduce_fx="
            '"sum", "min" or "max"'
        )


def _has_one_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or _has_one_element(value)
