"""Attributes and module buffers that keep the first replica's share of what a step counts: found, and said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_bucketddp.trainer.dp.checks import OF_MODULES, may_count
from lightning_bucketddp.trainer.dp.lists import is_counter

_REMEDY = (
    'To count or add up, use a metric such as SumMetric, a list that is appended to, or self.log(..., reduce_fx="sum")'
)


class _Values(NamedTuple):
    """The values of one replica that have names, as attributes or keys, and those of the first replica."""

    path: str
    in_dict: bool
    kept: Mapping[Any, Any]
    now: Mapping[Any, Any]
    before: Mapping[Any, Any]
    size: int

    def name_of(self, key: Any) -> str:
        if self.in_dict:
            return f"{self.path}[{key!r}]"
        return f"{self.path}.{key}" if self.path else key


class _Version(NamedTuple):
    """A module buffer, in the first replica and in another, to notice changes in place; its number, if it is one."""

    tensors: tuple[Tensor, Tensor]
    versions: tuple[int, ...]
    number: Tensor | None


class Counters:
    """What attributes of the LightningModule and its modules, and dicts among these, keep of the first replica alone.

    These are numbers, tensors that a step extends by its samples, and module buffers.

    Args:
        module: The LightningModule.
        others: The other replicas, before their step, with dicts of their own.
        sizes: How many samples each replica has.
        hook: The step's name, for messages.
        warned: What has been warned of before, and need not be again.
    """

    def __init__(
        self, module: nn.Module, others: Sequence[nn.Module], sizes: Sequence[int], hook: str, warned: set[str]
    ) -> None:
        pairs = [
            (name, kept, part, size)
            for other, size in zip(others, sizes[1:], strict=True)
            for (name, kept), part in zip(module.named_modules(), other.modules(), strict=True)
            if may_count(part)
        ]
        self._values = [values for pair in pairs for values in _values_of(*pair)]
        self._buffers = [
            _Values(name, False, kept._buffers, part._buffers, _versions(kept, part), size)
            for name, kept, part, size in pairs
            if part._buffers
        ]
        self._hook = hook
        self._warned = warned

    def check(self) -> None:
        """Warns if the share of another replica is lost: if it has set another value, or added that of its samples."""
        for values in self._values:
            for key, value in values.now.items():
                was = values.before.get(key)
                if value is was:
                    continue
                if _is_number(value) and _is_number(was):
                    if _is_lost(values.kept.get(key), value, was, values.size):
                        self._warn(values.name_of(key), f"to the same number {_IN_ALL}. {_REMEDY}")
                elif _has_grown(value, was):
                    self._warn(
                        values.name_of(key),
                        f"to the same tensor {_IN_ALL}. To extend it by samples, use a list that is appended to, or a "
                        "metric such as CatMetric",
                    )
        for buffers in self._buffers:
            for key, before in buffers.before.items():
                kept, value = buffers.kept.get(key), buffers.now.get(key)
                if (
                    isinstance(kept, Tensor)
                    and isinstance(value, Tensor)
                    and _differ(kept, value, before, buffers.size)
                ):
                    self._warn(buffers.name_of(key), f"to the same values {_IN_ALL}. {_REMEDY}")

    def _warn(self, name: str, what: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            rank_zero_warn(f"expected {self._hook} to set self.{name} {what}")


_IN_ALL = (
    "in all replicas, and not to one that depends on their samples; the first replica's stays, whose samples are a "
    "part of the batch"
)


def _values_of(name: str, kept: nn.Module, part: nn.Module, size: int) -> Iterator[_Values]:
    yield _Values(name, False, vars(kept), vars(part), dict(vars(part)), size)
    for key, value in vars(part).items():
        first = vars(kept).get(key)
        if isinstance(value, dict) and isinstance(first, dict) and key not in OF_MODULES and not is_counter(value):
            yield _Values(f"{name}.{key}" if name else key, True, first, value, dict(value), size)


def _versions(kept: nn.Module, part: nn.Module) -> dict[str, _Version]:
    return {
        key: _Version((first, value), _version_of(first, value), value.clone() if value.numel() == 1 else None)
        for key, value in part._buffers.items()
        if value is not None and (first := kept._buffers.get(key)) is not None and first is not value
    }


def _version_of(*tensors: Tensor) -> tuple[int, ...]:
    # Private, as there is no public way to see that a tensor was changed in place; inference tensors have none.
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _differ(kept: Tensor, value: Tensor, before: _Version, size: int) -> bool:
    same = kept is before.tensors[0] and value is before.tensors[1]
    if same and _version_of(kept, value) == before.versions:
        return False
    if kept.shape != value.shape:
        return True
    if before.number is not None:
        return _is_lost(kept.reshape(()), value.reshape(()), before.number.reshape(()), size)
    return not bool((kept == value.to(kept.device)).all())


def _is_lost(kept: Any, value: Any, was: Any, size: int) -> bool:
    plain = _plain(value)
    if not _is_number(kept) or _plain(kept) != plain:
        return True
    return size > 1 and plain - _plain(was) == size


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _has_grown(value: Any, was: Any) -> bool:
    """Whether a tensor or array is another one with rows added."""
    if type(value) is not type(was) or not (isinstance(value, Tensor) or type(value).__module__ == "numpy"):
        return False
    if not value.ndim or not was.ndim or len(value) <= len(was):
        return False
    if isinstance(was, Tensor):
        was = was.to(value.device)
    return len(was) == 0 or (value.shape[1:] == was.shape[1:] and bool((value[: len(was)] == was).all()))
