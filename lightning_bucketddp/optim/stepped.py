"""The tensors that an optimizer steps on instead of its parameters, shards and fp32 masters, and their state dicts.

Parameters' versions tell where somebody has changed one. ``_version`` misses writes through ``.data`` and by fused
optimizers, so an equal version proves nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.optim.parts import ParamPart, Parts

_LOW_PRECISION = (torch.bfloat16, torch.float16)

STATE_DICT_KEY = "master_params"
"""Entry of ``state_dict()`` with the masters: {index of the parameter as in ``"param_groups"``: fp32 tensor}."""

SHARD_KEY = "bucketddp_shard"
"""Entry of a sharded optimizer's own ``state_dict()``: {index of the parameter: range of elements of its part}."""


def params_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return an optimizer's parameters, in the order in which its state dict numbers them."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def gets_master(param: Tensor, with_masters: bool) -> bool:
    """Whether a parameter that is trained gets a master."""
    return with_masters and param.dtype in _LOW_PRECISION and param.grad_dtype is torch.float32


class Stepped:
    """The shards and masters that one optimizer steps on.

    A bf16/fp16 parameter with fp32 gradients has an fp32 master of this rank's part, which may be all of it. The master
    is made from the parameter in its first step. The parameter stays the truth: where somebody else changes it, its
    master follows, element by element.

    Args:
        parts: This rank's part of each parameter.
        with_masters: Whether there are masters.

    Attributes:
        parts: The same.
    """

    def __init__(self, parts: Parts, with_masters: bool) -> None:
        self.parts = parts
        self._with_masters = with_masters
        self._shards: dict[Tensor, tuple[ParamPart, Tensor]] = {}  # of parameters without a master
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}  # of parameters, when they last agreed with their master up to rounding
        self._loading: dict[str, Any] = {}  # the state dict that is being loaded

    # -- around a step -------------------------------------------------------------------------------

    def tensor_for(self, param: Tensor, state: Any) -> Tensor | None:
        """Return the tensor to step on instead of a parameter, with its gradient.

        Args:
            param: One of the optimizer's parameters.
            state: The optimizer's state. The parameter's own becomes fp32 with its first master.

        Returns:
            The parameter itself if it is not swapped; None if this rank has no part of it.
        """
        found = self.parts.find(param)
        if found is not None and not found.numel:
            return None
        tensor = self._current_master(param, state)
        if tensor is None:
            if found is None:
                return param
            tensor = self._shard(param, found)
        grad = self.parts.grad_part(param)
        if grad is not None and grad.dtype is not tensor.dtype:  # grad_dtype was lost, by a deepcopy or by close()
            grad = grad.to(tensor.dtype)
        tensor.grad = grad
        return tensor

    def _shard(self, param: Tensor, found: ParamPart) -> Tensor:
        """This rank's part as a parameter: the same object until buckets change, as parameters lie where they did."""
        known = self._shards.get(param)
        if known is None or known[0] is not found:
            known = self._shards[param] = found, nn.Parameter(self.parts.param_part(param))
        return known[1]

    def _current_master(self, param: Tensor, state: Any) -> Tensor | None:
        has_one = bool(self._masters) and param in self._masters
        if not self.may_have_master(param, has_one):
            if has_one:
                self.set_master(param, None)  # the module was moved to another dtype since
            return None
        if not has_one:
            if param in state:  # in place: LBFGS holds on to its state while the closure runs
                state[param].update(in_fp32(state[param], state[param], param.dtype))
            self._masters[param] = nn.Parameter(self.parts.param_part(param).detach().float())
            self._note_versions([param])
        elif not self._is_current(param):
            self._follow(param)
        return self._masters[param]

    @torch.no_grad()
    def write_back(self, params: Iterable[Tensor]) -> None:
        """Round masters into their parameters. Shards without a master are the parameters' memory already."""
        rounded = [param for param in params if param in self._masters]
        if rounded:
            parts = [self.parts.param_part(param) for param in rounded]
            torch._foreach_copy_(parts, [self._masters[param] for param in rounded])
            self._note_versions(rounded)

    def bring_back(self, params: Iterable[Tensor]) -> None:
        """Copy shards that the optimizer gave other memory (``shard.data = tensor``) into their parameters."""
        for param in params:
            if (known := self._shards.pop(param, None)) is not None:
                self.parts.param_part(param).copy_(known[1])

    def updated(self, params: Sequence[Tensor]) -> None:
        """Send this rank's parts of parameters that all ranks have stepped on."""
        # Hooks of the step may have changed others.
        current = [param for param in params if self._is_current(param)] if self._masters else []
        self.parts.updated(params)
        self._note_versions(current)

    def _is_current(self, param: Tensor) -> bool:
        """Tell whether a parameter has a master and nobody has changed it since the two agreed."""
        return self._versions.get(param) == param._version

    def _note_versions(self, params: Iterable[Tensor]) -> None:
        self._versions.update({param: param._version for param in params})

    def _follow(self, param: Tensor) -> None:
        memory, master = self.parts.param_part(param), self._masters[param]
        master.copy_(torch.where(master.to(memory.dtype) == memory, master, memory))
        self._note_versions([param])

    def is_whole(self, param: Tensor) -> bool:
        """Whether this rank steps on the whole parameter."""
        found = self.parts.find(param)
        return found is None or found.shape == found.spec.shape

    # -- masters -------------------------------------------------------------------------------------

    def may_have_master(self, param: Tensor, has_one: bool) -> bool:
        """Tell whether a parameter keeps the master that it has, or gets one."""
        # A parameter that was frozen between backward and step is stepped on all the same.
        trained = param.requires_grad or param.grad is not None
        if has_one:
            return param.dtype in _LOW_PRECISION and self._with_masters
        return trained and gets_master(param, self._with_masters)

    def master(self, param: Tensor) -> Tensor | None:
        """Return a parameter's fp32 master, with the shape of this rank's part; None if it has none (yet)."""
        return self._masters[param].detach() if param in self._masters else None

    def set_master(self, param: Tensor, values: Tensor | None) -> None:
        """Set a parameter's master; None drops it."""
        self._masters.pop(param, None)
        self._versions.pop(param, None)  # the parameter may have changed since these values were saved
        if values is not None:
            self._masters[param] = nn.Parameter(values)

    def whole_masters(self) -> list[Tensor]:
        """Return the parameters that have a master of all their elements."""
        return [param for param in self._masters if self.parts.find(param) is None]

    @torch.no_grad()
    def refresh(self) -> None:
        """Let masters follow parameters that were changed through ``.data``."""
        for param in self._masters:
            self._follow(param)

    # -- state dicts: hooks -----------------------------------------------------------------------

    def write_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the masters, and the ranges of elements that state and masters are for."""
        params = enumerate(params_of(optimizer))
        masters = {index: master for index, param in params if (master := self.master(param)) is not None}
        for key, value in ((SHARD_KEY, self._ranges(optimizer)), (STATE_DICT_KEY, masters)):
            if value:
                _refuse_dcp()
                state_dict[key] = value

    def _ranges(self, optimizer: Optimizer) -> dict[int, tuple[int, int]]:
        found = {index: self.parts.find(param) for index, param in enumerate(params_of(optimizer))}
        return {index: (part.part.start, part.part.stop) for index, part in found.items() if part is not None}

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Cut this rank's part out of a whole state dict, before anything is moved to the device.

        Raises:
            ValueError: If the state dict is another rank's part, or does not fit the parameters.
        """
        self.parts.keep_place()
        loaded = self._loading = dict(state_dict)
        described = state_dict.get(SHARD_KEY)
        if described is not None:
            if {int(index): tuple(part) for index, part in described.items()} != self._ranges(optimizer):
                raise ValueError(
                    "expected a whole optimizer state dict, or one of this rank's shard in the same buckets, found "
                    "one of another shard; save BucketDDP.optimizer_state_dict(), which loads anywhere"
                )
            return loaded
        loaded["state"] = dict(state_dict["state"])
        loaded[STATE_DICT_KEY] = dict(state_dict.get(STATE_DICT_KEY, {}))
        for index, param in zip(
            _indices(state_dict), params_of(optimizer), strict=False
        ):  # torch refuses other numbers
            found = self.parts.find(param)
            for entries in (loaded["state"], loaded[STATE_DICT_KEY]):
                if found is not None and index in entries:
                    whole = entries.pop(index)
                    if found.numel:
                        entries[index] = _part_of(found, whole)
        return loaded

    def after_load(self, optimizer: Optimizer) -> None:
        """Set the masters, and restore state in fp32 that torch has cast to the parameters' dtype.

        Raises:
            ValueError: If a master has another shape than its parameter.
        """
        loaded, self._loading = self._loading, {}
        masters = loaded.get(STATE_DICT_KEY, {})
        for index, param in zip(_indices(loaded), params_of(optimizer), strict=True):
            self.set_master(param, None)
            if not self.may_have_master(param, index in masters):
                continue
            if param in optimizer.state and index in loaded["state"]:
                optimizer.state[param] = in_fp32(optimizer.state[param], loaded["state"][index], param.dtype)
            if index in masters:
                memory = self.parts.param_part(param)
                if masters[index].shape != memory.shape:
                    raise ValueError(
                        f"expected master parameter {index} of the loaded state dict to have the shape of the "
                        f"optimizer's parameter, {tuple(memory.shape)}, found {tuple(masters[index].shape)}; the state "
                        "dict is another model's, or its parameters are in another order"
                    )
                fp32 = torch.empty_like(memory, dtype=torch.float32, requires_grad=False)
                self.set_master(param, fp32.copy_(masters[index]))

    # -- one parameter -------------------------------------------------------------------------------

    def entries(self, optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
        """Return a parameter's state, with its master under ``STATE_DICT_KEY`` if it has one."""
        master = self.master(param)
        own = {} if master is None else {STATE_DICT_KEY: master}
        return {**optimizer.state.get(param, {}), **own}

    def forget_shards(self) -> None:
        """Let go of the memory of parameters that are about to be moved."""
        self._shards.clear()

    def keep_own_part(self, optimizer: Optimizer, param: Tensor) -> None:
        """Cut a whole parameter's state and master down to this rank's part, if the parameter is sharded."""
        found, whole = self.parts.find(param), self.entries(optimizer, param)
        if found is None or not whole:
            return
        self.parts.keep_place()
        part = {key: _part_of(found, value, key) for key, value in whole.items()} if found.numel else {}
        self.set_master(param, part.pop(STATE_DICT_KEY, None))
        optimizer.state.pop(param, None)
        if part:
            optimizer.state[param] = part


def in_fp32(value: Any, original: Any, low_precision: torch.dtype) -> Any:
    """Undo torch's cast of state to a low-precision parameter's dtype.

    Args:
        value: A parameter's state, on the right device: tensors, dicts, lists and tuples of them, other things.
        original: The same state before it was cast.
        low_precision: The parameter's dtype.

    Returns:
        ``value``, with fp32 copies of the originals where it has that dtype.
    """
    if isinstance(value, dict):
        return {key: in_fp32(cast, original[key], low_precision) for key, cast in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(in_fp32, value, original, repeat(low_precision)))
    if not isinstance(original, Tensor) or not isinstance(value, Tensor) or value.dtype is not low_precision:
        return value
    return original.to(value.device, torch.float32, copy=True)  # a copy: steps must not change the caller's tensors


def _indices(state_dict: Mapping[str, Any]) -> list[int]:
    return [index for group in state_dict["param_groups"] for index in group["params"]]


def _part_of(found: ParamPart, whole: Any, key: str = STATE_DICT_KEY) -> Any:
    """Copy one part of a whole parameter's state or master."""
    if isinstance(whole, dict):
        return {key: _part_of(found, value, key) for key, value in whole.items()}
    if not isinstance(whole, Tensor):
        return whole
    return (found.of(whole) if found.splits(key, whole.shape) else whole).clone()


def _refuse_dcp() -> None:
    """Refuse ``optimizer.state_dict()`` to torch's ``get_optimizer_state_dict``, which drops shards and masters.

    Raises:
        RuntimeError: If that function is on the stack. torch does not tell who asks.
    """
    callers = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None))
    if "torch.distributed.checkpoint.state_dict" in callers:
        raise RuntimeError(
            "expected optimizer_state_dict() or save_sharded() of the BucketDDP, found get_optimizer_state_dict() of "
            "torch.distributed.checkpoint, which drops shards and fp32 master parameters"
        )
