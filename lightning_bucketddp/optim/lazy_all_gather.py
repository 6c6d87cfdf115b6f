"""The lazy all-gather: new parameters are awaited where they are first used.

Until a parameter has arrived, its class is a subclass that defines ``__torch_function__``, torch's public way to extend
tensors. torch then calls this file before any of its functions sees the parameter. The parameter waits, gets its class
back, and from then on costs nothing.

So every use waits, in any order: functional reads (``nn.MultiheadAttention``), tied weights, parametrizations,
references kept elsewhere (``nn.LSTM``, optimizers, averaged models), ``state_dict`` and copies.

Arguments of C++ extensions and of ``autograd.Function.apply`` do not come by. So modules wait too, in hooks before
their forwards (:class:`ModulesWait`). Where parts are compiled or scripted
(:func:`reads_past_python`), the wrapper waits for all before its forward. Captured CUDA graphs and pointers taken
earlier are not caught.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
import torch._dynamo
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_bucketddp.grads.sharded_grad import ABOUT_A_TENSOR, CALLS_ABOUT_A_TENSOR

_CALLS_WITHOUT_VALUES = CALLS_ABOUT_A_TENSOR | {
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
}  # fmt: skip
"""Methods that do not depend on a tensor's values."""

_PAST_PYTHON = (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)


class AwaitedParameter(nn.Parameter):
    """A parameter whose new values have not arrived.

    Attributes:
        kind: The class that the parameter gets back.
        arrival: The collective that brings the values of its bucket.
    """

    kind: type[nn.Parameter]
    arrival: Arrival

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
        if _wait_for_all(args, kwargs):  # other streams have to wait still
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    # nn.Parameter copies itself without asking __torch_function__.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Wait, and copy."""
        self.arrival.wait()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait, and pickle."""
        self.arrival.wait()
        return self.__reduce_ex__(protocol)


@lru_cache(256)
def _needs_no_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in ABOUT_A_TENSOR
    return name in _CALLS_WITHOUT_VALUES


def _wait_for_all(*values: Any) -> bool:
    """Wait for all parameters in ``values`` and in containers among them. Return whether some keep their class."""
    awaited = False
    for value in values:
        if isinstance(value, AwaitedParameter):
            value.arrival.wait_here()
            awaited |= isinstance(value, AwaitedParameter)
        elif isinstance(value, Mapping):
            awaited |= _wait_for_all(*value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            awaited |= _wait_for_all(*value)
    return awaited


@cache
def _awaited_class(kind: type[nn.Parameter]) -> type[AwaitedParameter]:
    """Return the class that parameters of class ``kind`` have until their values arrive."""
    return type(f"Awaited{kind.__name__}", (AwaitedParameter, kind), {"kind": kind})


class Arrival:
    """Parameters that arrive together, by one collective.

    Args:
        params: The parameters.
        wait: Waits for the collective, on the host or on the current stream. For the stream it returns an event, after
            which other streams may use the parameters too.
        arrived: Called when all streams may use the parameters.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        wait: Callable[[], torch.Event | None],
        arrived: Callable[[], object] = lambda: None,
    ) -> None:
        self._wait: Callable[[], torch.Event | None] | None = wait
        self._event: torch.Event | None = None
        self._arrived = arrived
        self._late: list[Any] = []
        for param in params:
            try:
                param.__class__ = _awaited_class(type(param))
            except TypeError:  # a class with another memory layout, which is rare: wait for all of them now
                self.wait()
                return
            self._late.append(param)
            self._late[-1].arrival = self  # nowhere else: a module that is dropped now is collected

    def wait_here(self) -> None:
        """Let the current stream wait. Every stream does that, until the device says that the values are there."""
        if self._wait is not None:
            self._event = self._wait()
            self._wait = None
        if self._event is None or self._event.query():
            self.forget()
        else:
            self._event.wait(torch.accelerator.current_stream(self._event.device))

    def wait(self) -> None:
        """Let the current stream wait, and give the parameters their classes back. No other stream waits then."""
        self.wait_here()
        self.forget()

    def forget(self) -> None:
        """Give the parameters their classes back, whether or not they have arrived."""
        for param in self._late:
            param.__class__ = type(param).kind
            del param.arrival
        self._late.clear()
        self._arrived()


class ModulesWait:
    """Waits for parameters before forwards, in a global forward pre-hook that is there while some are on their way.

    C++ extensions and custom autograd functions read parameters without asking ``__torch_function__``. A module waits
    for its own parameters, and for those of submodules that are not called: fused layers read ``self.first.weight`` and
    never call ``self.first``. Which modules are called shows in the wrapper's forwards, apart for those that train and
    those that do not. The first forward waits for all parameters, as does a module that is called past the wrapper.

    A module that is called in some forwards, and whose parameters an extension reads past it in others, is not caught.

    Args:
        module: The outermost module.
        arrivals: What is on its way.
    """

    def __init__(self, module: nn.Module, arrivals: Sized) -> None:
        self._module, self._arrivals = module, arrivals
        self._remove_hook: finalize[[], ModulesWait] | None = None
        self._called: dict[bool, WeakSet[nn.Module]] = {True: WeakSet(), False: WeakSet()}
        self._trains: bool | None = None  # of the wrapper's forward that runs; None outside

    def begin(self) -> None:
        """Put the hook in place."""
        if self._remove_hook is not None:
            return
        here = ref(self)  # the hook must not keep the module

        def wait(module: nn.Module, args: object) -> None:
            waits = here()
            if waits is not None and waits._module not in module._modules.values():  # the wrapper calls it only
                waits.before_forward(module)

        self._remove_hook = finalize(self, register_module_forward_pre_hook(wait).remove)

    def end(self) -> None:
        """Remove the hook."""
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None

    @contextmanager
    def in_forward(self, trains: bool) -> Iterator[None]:
        """The wrapper's forward: learn which modules are called, and remove the hook if all parameters are there."""
        before, self._trains = self._trains, trains
        try:
            yield
        finally:
            self._trains = before
            if not self._arrivals:
                self.end()

    def before_forward(self, module: nn.Module) -> None:
        """Wait for the parameters that a module may read."""
        called = () if self._trains is None else self._called[self._trains]
        if self._arrivals:
            for param in _params_inside(module, called):
                if isinstance(param, AwaitedParameter):
                    param.arrival.wait_here()
        if self._trains is not None:
            self._called[self._trains].add(module)
        elif not self._arrivals:
            self.end()


def _params_inside(module: nn.Module, called: Container[nn.Module]) -> Iterator[nn.Parameter | None]:
    """Yield the parameters of a module and of its submodules, except what is inside of modules that are called."""
    modules, seen = [module], {module}
    for part in modules:  # grows
        yield from part._parameters.values()
        new = [child for child in part._modules.values() if child is not None and child not in seen]
        inside = [child for child in new if child not in called]
        modules += inside
        seen.update(inside)


def reads_past_python(module: nn.Module) -> bool:
    """Tell whether compiled or scripted parts of a module read parameters without calling torch's functions."""
    return any(
        isinstance(part, _PAST_PYTHON)
        or getattr(part, "_compiled_call_impl", None) is not None  # private: module.compile() has no public sign
        for part in module.modules()
    )
