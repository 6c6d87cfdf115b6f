"""``self.log`` in replicas: kept while they run, and logged once afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bucketddp.trainer.dp.merging import is_floating_scalar, weighted_mean

_OPTIONS = list(inspect.signature(pl.LightningModule.log).parameters)[3:]
_REDUCTIONS: dict[str, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


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
