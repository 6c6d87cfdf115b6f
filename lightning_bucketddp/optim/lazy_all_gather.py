"""The lazy all-gather: new parameters are awaited where they are first used.

Until a parameter has arrived, its class is a subclass that defines ``__torch_function__``, torch's public way to extend
tensors. torch then calls this file before any of its functions sees the parameter. The parameter waits, gets its class
back, and from then on costs nothing.

So every use waits, in any order: functional reads (``nn.MultiheadAttention``), tied weights, parametrizations,
references kept elsewhere (``nn.LSTM``, optimizers, averaged models), ``state_dict`` and copies. Code that does not call
torch's functions is not caught: compiled and scripted code, captured CUDA graphs, pointers taken earlier.
:func:`reads_past_python` finds such modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch._dynamo
from torch import nn

from lightning_bucketddp.grads.sharded_grad import ABOUT_A_TENSOR

_CALLS_WITHOUT_VALUES = frozenset({
    "size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "storage_offset", "__len__",
    "is_floating_point", "is_complex", "is_contiguous", "is_same_size", "get_device",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
})  # fmt: skip
"""Methods that do not depend on a tensor's values."""

_PAST_PYTHON = (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)


class AwaitedParameter(nn.Parameter):
    """A parameter whose new values have not arrived.

    Attributes:
        kind: The class that the parameter gets back.
        wait_for_values: Waits for the parameter and for the rest of its bucket.
    """

    kind: type[nn.Parameter]
    wait_for_values: Callable[[], None]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a parameter of the original class, for code like ``type(param)(data)``."""
        _wait_for_all(args, kwargs)
        return cls.kind(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for the parameters in the arguments, unless ``func`` needs no values, and call ``func``."""
        if _needs_no_values(func):
            with torch._C.DisableTorchFunctionSubclass():  # torch's documentation names it, for this
                return func(*args, **kwargs or {})
        _wait_for_all(args, kwargs)
        return func(*args, **kwargs or {})

    # nn.Parameter copies itself without asking __torch_function__.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Wait, and copy."""
        _wait_for_all(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait, and pickle."""
        _wait_for_all(self)
        return self.__reduce_ex__(protocol)


@lru_cache(256)
def _needs_no_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in ABOUT_A_TENSOR
    return name in _CALLS_WITHOUT_VALUES


def _wait_for_all(*values: Any) -> None:
    """Wait for all parameters in ``values`` and in containers among them."""
    for value in values:
        if isinstance(value, AwaitedParameter):
            value.wait_for_values()
        elif isinstance(value, Mapping):
            _wait_for_all(*value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            _wait_for_all(*value)


@cache
def _awaited_class(kind: type[nn.Parameter]) -> type[AwaitedParameter]:
    """Return the class that parameters of class ``kind`` have until their values arrive."""
    return type(f"Awaited{kind.__name__}", (AwaitedParameter, kind), {"kind": kind})


class Arrival:
    """Parameters that arrive together, by one collective.

    Args:
        params: The parameters.
        wait: Waits for the collective, on the host or on the device's stream.
    """

    def __init__(self, params: Sequence[nn.Parameter], wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait
        self._late: list[Any] = []
        for param in params:
            try:
                param.__class__ = _awaited_class(type(param))
            except TypeError:  # a class with another memory layout, which is rare: wait for all of them now
                self.wait()
                return
            self._late.append(param)
            self._late[-1].wait_for_values = self.wait  # nowhere else: a module that is dropped now is collected

    def wait(self) -> None:
        """Wait, and give the parameters their classes back. Does nothing after it has succeeded once."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        self.forget()

    def forget(self) -> None:
        """Give the parameters their classes back, whether or not they have arrived."""
        for param in self._late:
            param.__class__ = type(param).kind
            del param.wait_for_values
        self._late.clear()


def reads_past_python(module: nn.Module) -> bool:
    """Tell whether compiled or scripted parts of a module read parameters without calling torch's functions."""
    return any(
        isinstance(it, _PAST_PYTHON)
        or getattr(it, "_compiled_call_impl", None) is not None  # private: module.compile() has no public sign
        for it in module.modules()
    )
