"""Parameters whose new values are still on their way: whoever uses one waits for it, whatever way it is used.

Until a parameter has arrived it is of a class that torch asks before any of its functions gets to see the parameter
(``__torch_function__``, torch's public way to extend tensors). It waits and becomes what it was, and nothing remains
that would cost time. So functional reads (``nn.MultiheadAttention``), tied weights, parametrizations, references
kept elsewhere (``nn.LSTM``, optimizers, averaged models), ``state_dict`` and copies see new values, whatever the order
in which modules are called. What does not go by torch's functions is beyond that: compiled and scripted code, captured
CUDA graphs, pointers that were asked for earlier. :func:`reads_past_python` tells of such modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import nn

from lightning_bucketddp.grads.sharded_grad import ABOUT_A_TENSOR

_waits: dict[int, Callable[[], None]] = {}
"""By id of the parameter: waits for it, and for those that come with it, and makes them what they were."""


_SIZES = {"size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "storage_offset", "__len__"}
_KINDS = {"is_floating_point", "is_complex", "is_contiguous", "is_same_size", "get_device"}
_CALLS_ABOUT = _SIZES | _KINDS | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
"""Methods that tell nothing of a tensor's values."""


class GatheredLater(nn.Parameter):
    """A parameter that has not arrived."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A parameter that has: others, made like this one (``type(param)(data)``), do not wait for anything."""
        _arrive(args, kwargs)
        kind = next(it for it in cls.__mro__ if issubclass(it, nn.Parameter) and not issubclass(it, GatheredLater))
        return kind(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Waits for what is used, and runs ``func``."""
        kwargs = kwargs or {}
        if _is_about(func):
            with torch._C.DisableTorchFunctionSubclass():  # torch's documentation names it, for this
                return func(*args, **kwargs)
        _arrive(args, kwargs)
        return func(*args, **kwargs)

    # A parameter makes its copy of its own class before torch asks anybody.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Waits; the copy has arrived."""
        _arrive(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Waits; what is pickled has arrived."""
        _arrive(self)
        return self.__reduce_ex__(protocol)


def _is_about(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in ABOUT_A_TENSOR
    return name in _CALLS_ABOUT


def _arrive(*values: Any) -> None:
    """Wait for all parameters in some values and in containers of them."""
    for value in values:
        if isinstance(value, GatheredLater):
            _waits[id(value)]()
        elif isinstance(value, Mapping):
            _arrive(*value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            _arrive(*value)


@cache
def _later(kind: type) -> type:
    """The class of parameters of class ``kind`` that have not arrived."""
    if kind is nn.Parameter:
        return GatheredLater
    return type(f"GatheredLater{kind.__name__}", (GatheredLater, kind), {})


class Arrival:
    """Parameters that come together, in one collective.

    Args:
        params: The parameters.
        wait: Waits for them, in the sense of the device.
    """

    def __init__(self, params: Sequence[nn.Parameter], wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait
        self._kinds: list[tuple[nn.Parameter, type]] = []
        for param in params:
            kind = type(param)
            try:
                param.__class__ = _later(kind)
            except TypeError:  # a class of another layout in memory; rare enough to wait for everything
                self.wait()
                return
            self._kinds.append((param, kind))
            _waits[id(param)] = self.wait

    def wait(self) -> None:
        """Wait, and make the parameters what they were; in any call but the first that got through, nothing."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        self.forget()

    def forget(self) -> None:
        """Make the parameters what they were, arrived or not."""
        for param, kind in self._kinds:
            param.__class__ = kind
            _waits.pop(id(param), None)
        self._kinds.clear()


def reads_past_python(module: nn.Module) -> bool:
    """Whether parts of a module read parameters without torch asking first: compiled and scripted ones."""
    return any(
        isinstance(it, torch.jit.ScriptModule | torch._dynamo.OptimizedModule)
        or getattr(it, "_compiled_call_impl", None) is not None  # private: module.compile() has no public sign
        for it in module.modules()
    )
