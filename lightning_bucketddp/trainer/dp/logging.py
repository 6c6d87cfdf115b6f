"""``self.log`` in replicas: kept while they run, and logged once as one device would have logged it."""

from __future__ import annotations

import inspect
import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_bucketddp.trainer.dp.doubts import StepMemory
from lightning_bucketddp.trainer.dp.merging import is_count, weighted_mean
from lightning_bucketddp.trainer.dp.metrics import original_of

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LOG = inspect.signature(pl.LightningModule.log)
_LOG_DICT = inspect.signature(pl.LightningModule.log_dict)


@dataclass(frozen=True)
class Logged:
    """What one replica logged under a name.

    Attributes:
        value: The value; tensors are copies.
        options: The other arguments of ``self.log``, as they were given.
        batch_size: The argument of that name.
        is_dict: Whether it was a collection of metrics, given to ``self.log_dict``.
    """

    value: Any
    options: dict[str, Any]
    batch_size: int | None
    is_dict: bool = False


class LogBook:
    """What the replicas of one step log.

    Args:
        sizes: How many samples each replica has.
        home: Where merged values go.
        step: What the replicas run, for messages.
        log: The ``log`` of the LightningModule's class, which may take arguments of its own.
        memory: What is known from the steps before.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        home: torch.device,
        step: str,
        log: Callable[..., None] = pl.LightningModule.log,
        memory: StepMemory | None = None,
    ) -> None:
        self._sizes = sizes
        self._home = home
        self._step = step
        self._log = inspect.signature(log)
        self._memory = StepMemory() if memory is None else memory
        self._books: list[dict[tuple[Any, int], Logged]] = [{} for _ in sizes]
        self._times: list[Counter[Any]] = [Counter() for _ in sizes]

    def log(self, replica: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Keeps what a replica gives to ``self.log``."""
        if args:
            kwargs = self._named(name, value, *args, **kwargs)
        batch_size = kwargs.pop("batch_size", None)
        if isinstance(value, Tensor):  # which the step may change once it is logged
            value = value.clone() if kwargs.get("enable_graph") else value.detach().clone()
        self._keep(replica, name, Logged(original_of(value), kwargs, batch_size))

    def _named(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of ``self.log`` after the value, by name."""
        kinds = {name: parameter.kind for name, parameter in self._log.parameters.items()}
        own = inspect.Parameter.VAR_POSITIONAL not in kinds.values()
        bound = (self._log if own else _LOG).bind(None, *args, **kwargs).arguments
        named: dict[str, Any] = {}
        for name, option in list(bound.items())[3:]:
            named.update(option if own and kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: option})
        return named

    def log_collection(self, replica: int, collection: MetricCollection, *args: Any, **kwargs: Any) -> None:
        """Keeps a collection of metrics that a replica gives to ``self.log_dict``."""
        bound = _LOG_DICT.bind(None, collection, *args, **kwargs).arguments
        options = {key: option for key, option in bound.items() if key not in ("self", "dictionary", "batch_size")}
        original = original_of(collection)
        self._keep(replica, id(original), Logged(original, options, None, is_dict=True))

    def _keep(self, replica: int, name: Any, logged: Logged) -> None:
        self._times[replica][name] += 1
        self._books[replica][name, self._times[replica][name]] = logged

    def replay(self, log: Callable[..., None], log_dict: Callable[..., None]) -> None:
        """Logs what the replicas logged, once.

        What several replicas logged under one name is merged by its ``reduce_fx``: the mean is weighted by batch sizes.
        Integers whose mean is asked for are counts, and added up, if they differ, or did in a step before, or are the
        replicas' numbers of samples, unless these have a name that says otherwise, as ``batch_idx`` does.

        Args:
            log: The LightningModule's method.
            log_dict: The LightningModule's method.

        Raises:
            ValueError: If replicas log under one name with different arguments.
        """
        for key in dict.fromkeys(key for book in self._books for key in book):
            found = [(replica, book[key]) for replica, book in enumerate(self._books) if key in book]
            first = found[0][1]
            for replica, logged in found:
                if logged.options != first.options:
                    raise ValueError(
                        f"expected the replicas to log {key[0]!r} with the same arguments in {self._step}, found "
                        f"{first.options} in replica {found[0][0]} and {logged.options} in replica {replica}"
                    )
            if first.is_dict:
                log_dict(first.value, **first.options)
            else:
                value, batch_size = self._merged(key[0], found)
                log(key[0], value, **first.options, **({} if batch_size is None else {"batch_size": batch_size}))

    def _merged(self, name: str, found: Sequence[tuple[int, Logged]]) -> tuple[Any, int | None]:
        values = [logged.value for _, logged in found]
        reduce_fx = found[0][1].options.get("reduce_fx", "mean")
        if _is_mean(reduce_fx) and self._are_counts(name, values, [self._sizes[replica] for replica, _ in found]):
            reduce_fx = "sum"
        sizes = [self._sizes[replica] if logged.batch_size is None else logged.batch_size for replica, logged in found]
        by_all = len(found) == len(self._sizes) and all(logged.batch_size is not None for _, logged in found)
        if by_all and len(set(sizes)) == 1 and self._is_of_batch(name, sizes[0]):
            return self._value(values, self._sizes, reduce_fx), sizes[0]
        given = any(logged.batch_size is not None for _, logged in found) or len(found) < len(self._sizes)
        return self._value(values, sizes, reduce_fx), sum(sizes) if given else None

    def _are_counts(self, name: str, values: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Whether values are integers that say how much of something replicas have, not what is the same in all."""
        if not all(_is_integer(value) for value in values):
            return False
        found = [int(value) for value in values]
        key = f"{name!r} in {self._step}"
        if len(set(found)) > 1:
            self._memory.of_samples.add(key)  # and may be the same by chance in another step
        return key in self._memory.of_samples or (found == list(sizes) and is_count(name))

    def _is_of_batch(self, name: str, batch_size: int) -> bool:
        """Whether a batch size that all replicas gave is the whole batch's.

        It is if a larger batch had that many samples, and it was given for that one too; or if no replica has as many,
        or a multiple of them.
        """
        key = self._step, name, batch_size
        if batch_size == sum(self._sizes):
            self._memory.batch_sizes.add(key)
        if key in self._memory.batch_sizes:
            return True
        multiple = len(set(self._sizes)) == 1 and batch_size % self._sizes[0] == 0
        return batch_size not in self._sizes and not multiple

    def _value(self, values: Sequence[Any], sizes: Sequence[int], reduce_fx: Any) -> Any:
        if all(isinstance(value, Tensor | numbers.Number) for value in values):
            return _reduced(values, sizes, reduce_fx, self._home)
        return values[0]  # such as a dict, which Lightning refuses in its own words


def _kind(reduce_fx: Any) -> str:
    return getattr(reduce_fx, "__name__", str(reduce_fx)).lower()


def _is_mean(reduce_fx: Any) -> bool:
    return _kind(reduce_fx) not in ("sum", "max", "min")


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype in _INTEGERS
    return type(value) is int


def _reduced(values: Sequence[Any], sizes: Sequence[int], reduce_fx: Any, home: torch.device) -> Any:
    kind = _kind(reduce_fx)
    tensors = [value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64) for value in values]
    if any(isinstance(value, Tensor) for value in values):
        tensors = [tensor.to(home) for tensor in tensors]
    if not _is_mean(reduce_fx):
        stacked = torch.stack([tensor.to(tensors[0].dtype) for tensor in tensors])
        merged = getattr(torch, f"a{kind}" if kind != "sum" else kind)(stacked, 0)
    else:
        merged = weighted_mean(tensors, sizes, tensors[0].device)
    return merged if any(isinstance(value, Tensor) for value in values) else merged.item()
