"""State dicts of optimizers that step on parts of their parameters, or on fp32 masters: read and written here alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.layout.plan import ParamSpec
from lightning_bucketddp.optim.parts import ParamPart
from lightning_bucketddp.optim.stepped import Stepped, in_fp32

STATE_DICT_KEY = "master_params"
"""Entry of ``state_dict()`` with the masters: {index of the parameter as in ``"param_groups"``: fp32 tensor}."""

SHARD_KEY = "bucketddp_shard"
"""Entry of a sharded optimizer's own ``state_dict()``: which part of each parameter its state is for."""


def params_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """An optimizer's parameters, in the order in which its state dict numbers them."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


class StateDicts:
    """What one optimizer's state dict has besides the optimizer's own, written and read by hooks.

    Args:
        stepped: What the optimizer steps on.
    """

    def __init__(self, stepped: Stepped) -> None:
        self._stepped = stepped
        self._loading: dict[str, Any] = {}

    def write(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the masters, and which parts of parameters all of it is for."""
        masters = {
            index: master
            for index, param in enumerate(params_of(optimizer))
            if (master := self._stepped.master(param)) is not None
        }
        if described := self._described(optimizer):
            _refuse_dcp("optimizer_state_dict() of the BucketDDP, or its save_sharded(), for a sharded optimizer")
            state_dict[SHARD_KEY] = described
        if masters:
            _refuse_dcp("optimizer.state_dict() for an optimizer with fp32 master parameters")
            state_dict[STATE_DICT_KEY] = masters

    def _described(self, optimizer: Optimizer) -> dict[int, tuple[int, int]]:
        found = {index: self._stepped.parts.find(param) for index, param in enumerate(params_of(optimizer))}
        return {index: (it.part.start, it.part.stop) for index, it in found.items() if it is not None}

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Cut this rank's part out of a whole state dict, before anything is moved to the device.

        Raises:
            ValueError: If it is another rank's part, or does not fit the parameters.
        """
        loaded = self._loading = dict(state_dict)
        described = state_dict.get(SHARD_KEY)
        if described is not None:
            if {int(index): tuple(part) for index, part in described.items()} != self._described(optimizer):
                raise ValueError(
                    "expected a whole optimizer state dict, or one of this rank's with the same buckets, found one of "
                    "another shard; save what BucketDDP.optimizer_state_dict() gives, which loads anywhere"
                )
            return loaded
        indices, params = _indices(state_dict), list(params_of(optimizer))
        if len(indices) != len(params):
            return loaded  # which torch refuses
        state, masters = dict(state_dict["state"]), dict(state_dict.get(STATE_DICT_KEY, {}))
        for index, param in zip(indices, params, strict=True):
            found = self._stepped.parts.find(param)
            for entries in (state, masters):
                if found is not None and index in entries:
                    whole = entries.pop(index)
                    if found.numel:
                        entries[index] = _part_of(found, whole)
        loaded["state"], loaded[STATE_DICT_KEY] = state, masters
        return loaded

    def after_load(self, optimizer: Optimizer) -> None:
        """Take the masters in, and keep in fp32 what torch has cast to the parameters' dtype.

        Raises:
            ValueError: If a master has another shape than its parameter.
        """
        loaded, self._loading = self._loading, {}
        masters = loaded.get(STATE_DICT_KEY, {})
        for index, param in zip(_indices(loaded), params_of(optimizer), strict=True):
            self._stepped.set_master(param, None)
            if not self._stepped.may_have_master(param, index in masters):
                continue
            if param in optimizer.state and index in loaded["state"]:
                optimizer.state[param] = in_fp32(optimizer.state[param], loaded["state"][index], param.dtype)
            if index in masters:
                self._stepped.set_master(param, _copy_for(self._stepped.parts.param_part(param), masters[index], index))

    def put_part(
        self, optimizer: Optimizer, param: Tensor, found: ParamPart, state: dict[str, Any] | None, master: Tensor | None
    ) -> None:
        """Let the optimizer have one part of a parameter's whole state and master."""
        optimizer.state.pop(param, None)
        if state is not None and found.numel:
            optimizer.state[param] = _part_of(found, state)
        self._stepped.set_master(param, None if master is None or not found.numel else _part_of(found, master))

    def take_in(self, optimizer: Optimizer, param: Tensor) -> None:
        """Cut state and master of a whole parameter down to this rank's part of it, if it is sharded."""
        if (found := self._stepped.parts.find(param)) is not None:
            self.put_part(optimizer, param, found, optimizer.state.get(param), self._stepped.master(param))


def _indices(state_dict: Mapping[str, Any]) -> list[int]:
    return [index for group in state_dict["param_groups"] for index in group["params"]]


def _copy_for(memory: Tensor, master: Tensor, index: int) -> Tensor:
    if master.shape != memory.shape:
        raise ValueError(
            f"master parameter {index} of the loaded state dict has shape {tuple(master.shape)}, the optimizer's "
            f"parameter {tuple(memory.shape)}; the state dict is another model's, or its parameters are in another "
            "order"
        )
    return torch.empty_like(memory, dtype=torch.float32, requires_grad=False).copy_(master)


def _part_of(found: ParamPart, whole: Any, key: str = STATE_DICT_KEY) -> Any:
    """A copy of one part of a whole parameter's state or master.

    Raises:
        ValueError: If a tensor has neither the parameter's shape nor one element.
    """
    if isinstance(whole, dict):
        return {key: _part_of(found, value, key) for key, value in whole.items()}
    if not isinstance(whole, Tensor):
        return whole
    return (found.of(whole) if is_per_element(key, whole.shape, found.spec) else whole).clone()


def is_per_element(key: str, shape: torch.Size, spec: ParamSpec) -> bool:
    """Whether a tensor of a parameter's state has a value for each of its elements.

    Raises:
        ValueError: If it has neither that nor one element.
    """
    if key != "step" and tuple(shape) == spec.shape:
        return True
    if shape.numel() == 1:
        return False
    raise ValueError(
        f"expected optimizer state {key!r} of parameter {spec.name!r} to have the parameter's shape {spec.shape}, or "
        f"one element, found {tuple(shape)}: it cannot be sharded, or is another model's"
    )


def _refuse_dcp(instead: str) -> None:
    """Refuse ``optimizer.state_dict()`` to torch's ``get_optimizer_state_dict``, which would drop a part of it.

    Args:
        instead: What to call.

    Raises:
        RuntimeError: If it is what calls.
    """
    frame = inspect.currentframe()
    while frame is not None:  # torch names no caller, and its result has the optimizer's state and groups alone
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(f"expected {instead}, found get_optimizer_state_dict() of torch.distributed.checkpoint")
        frame = frame.f_back
