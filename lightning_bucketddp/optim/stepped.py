"""What one optimizer steps on instead of its parameters: this rank's parts of them, or fp32 masters of those parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bucketddp.optim.parts import Parts

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to in place, as autograd counts it; None if torch no longer tells.

    ``_version`` is private by its name. It misses writes through ``.data`` and those of fused optimizers, so it may
    only ever add to what is known otherwise.
    """
    return getattr(tensor, "_version", None)


def _wants_master(param: Tensor) -> bool:
    # A parameter that was frozen between backward and step is stepped on all the same.
    trained = param.requires_grad or param.grad is not None
    return trained and param.grad_dtype is torch.float32


@dataclass(slots=True)
class _Master:
    """A master, and its parameter's version when the two were last the same up to rounding (None: to be looked at)."""

    tensor: Tensor
    param_version: int | None


class Stepped:
    """The tensors that one optimizer steps on.

    A trained bf16/fp16 parameter whose gradients are fp32 has an fp32 master: of this rank's part of it, which may be
    all of it. The master is made from the parameter when it is first asked for. What counts is the parameter: where it
    was changed from outside, its master follows, element by element.

    Args:
        parts: Which part of each parameter is this rank's.
        with_masters: Whether there are masters.

    Attributes:
        parts: The same.
    """

    def __init__(self, parts: Parts, with_masters: bool) -> None:
        self.parts = parts
        self._with_masters = with_masters
        self._masters: dict[Tensor, _Master] = {}
        self._in_memory: dict[Tensor, nn.Parameter] = {}  # parts without masters, by parameter

    # -- around a step -------------------------------------------------------------------------------

    def tensor_for(self, param: Tensor, state: Any) -> Tensor | None:
        """What to step on instead of a parameter, with its gradient.

        Args:
            param: One of the optimizer's parameters.
            state: The optimizer's state; the parameter's own becomes fp32 with its first master.

        Returns:
            The parameter itself if it is stepped on as it is; None if no part of it is this rank's.
        """
        found = self.parts.find(param)
        if found is not None and not found.numel:
            return None
        memory = self.parts.param_part(param)
        tensor = self._current_master(param, memory, state)
        if tensor is None:
            if memory is param:
                return param
            tensor = self._in_memory.get(param)
            if tensor is None:
                tensor = self._in_memory[param] = nn.Parameter(memory)
        # The very gradient. Only one that lost its grad_dtype (deepcopy, close() of the wrapper) has to be converted.
        grad = self.parts.grad_part(param)
        tensor.grad = None if grad is None else grad.to(tensor.dtype)
        return tensor

    def _current_master(self, param: Tensor, memory: Tensor, state: Any) -> Tensor | None:
        entry = self._masters.get(param)
        if not self.may_have_master(param, entry is not None):
            self._masters.pop(param, None)  # the module was moved to another dtype since
            return None
        if entry is None:
            if param in state:  # in place: LBFGS holds on to its state while the closure runs
                for key, value in state[param].items():
                    state[param][key] = in_fp32(value, value, param.dtype)
            entry = self._masters[param] = _Master(nn.Parameter(memory.detach().float()), version_of(param))
        elif not self._is_current(param):
            self._follow(param, entry)
        return entry.tensor

    @torch.no_grad()
    def write_back(self, params: Iterable[Tensor]) -> None:
        """Round masters that were stepped on into their parameters; parts without masters need nothing."""
        rounded = [param for param in params if param in self._masters]
        if rounded:
            parts = [self.parts.param_part(param) for param in rounded]
            torch._foreach_copy_(parts, [self._masters[param].tensor for param in rounded])
            self._note_versions(rounded)

    def updated(self, params: Sequence[Tensor], complete: bool = True) -> None:
        """All ranks have stepped on these parameters: send this rank's parts of them."""
        current = [param for param in params if self._is_current(param)]  # others were changed by hooks of the step
        self.parts.updated(params)
        self._note_versions(current)
        self.parts.send(params, complete)

    def _is_current(self, param: Tensor) -> bool:
        """Whether a parameter has a master, and was not changed since the two were the same up to rounding."""
        entry = self._masters.get(param)
        return entry is not None and entry.param_version is not None and entry.param_version == version_of(param)

    def _note_versions(self, params: Iterable[Tensor]) -> None:
        for param in params:
            self._masters[param].param_version = version_of(param)

    def _follow(self, param: Tensor, entry: _Master) -> None:
        memory = self.parts.param_part(param)
        kept = entry.tensor.to(memory.dtype) == memory
        entry.tensor.copy_(torch.where(kept, entry.tensor, memory))
        entry.param_version = version_of(param)

    # -- masters -------------------------------------------------------------------------------------

    def may_have_master(self, param: Tensor, has_one: bool) -> bool:
        """Whether a parameter keeps the master that it has, or is to get one."""
        return self._with_masters and param.dtype in _LOW_PRECISION and (has_one or _wants_master(param))

    def master(self, param: Tensor) -> Tensor | None:
        """A parameter's fp32 master, with the shape of this rank's part; None if it has none (yet)."""
        entry = self._masters.get(param)
        return None if entry is None else entry.tensor.detach()

    def set_master(self, param: Tensor, values: Tensor | None) -> None:
        """Set or forget a parameter's master."""
        self._masters.pop(param, None)
        if values is not None:  # without a version: the parameter may have been changed since the master was made
            self._masters[param] = _Master(nn.Parameter(values), param_version=None)

    def whole_masters(self) -> list[Tensor]:
        """The parameters that have a master of all their elements."""
        return [param for param in self._masters if self.parts.find(param) is None]

    @torch.no_grad()
    def refresh(self) -> None:
        """Let masters follow parameters that were changed through ``.data`` since the last step."""
        for param, entry in self._masters.items():
            self._follow(param, entry)

    def forget_memory(self) -> None:
        """Parameters have moved to other memory, or this rank's parts are others."""
        self._in_memory.clear()


def in_fp32(value: Any, original: Any, low_precision: torch.dtype) -> Any:
    """State as torch would have it for an fp32 parameter.

    Args:
        value: A parameter's state, on the right device.
        original: The same state before it was cast.
        low_precision: The parameter's dtype.

    Returns:
        ``value``, with fp32 copies of the originals where it has that dtype.
    """

    def wide(cast: Any, before: Any) -> Any:
        if not isinstance(before, Tensor) or not isinstance(cast, Tensor) or cast.dtype is not low_precision:
            return cast
        return before.to(cast.device, torch.float32, copy=True)  # a copy: steps must not change the caller's tensors

    return tree_map(wide, value, original)
