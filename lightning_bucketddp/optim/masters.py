"""fp32 master parameters: the optimizer steps on them, and bf16/fp16 parameters are their rounded copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.optim.swap import SteppedParams, Swap, refuse_dcp, version_of

STATE_DICT_KEY = "master_params"
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_attached: weakref.WeakKeyDictionary[Optimizer, MasterParams] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Master:
    """A master, and its parameter's version when the two were last the same up to rounding (None: to be looked at)."""

    tensor: Tensor
    param_version: int | None


def wants_master(param: Tensor) -> bool:
    """Whether a parameter is to have an fp32 master: a trained one of low precision, whose gradients are fp32."""
    # A parameter that was frozen between backward and step is stepped on all the same.
    trained = param.requires_grad or param.grad is not None
    return trained and param.dtype in _LOW_PRECISION and param.grad_dtype is torch.float32


def master_params(optimizer: Optimizer) -> MasterParams:
    """The optimizer's master parameters; attached to it in the first call.

    Args:
        optimizer: A torch optimizer.

    Returns:
        The same object in every call, until it is closed.

    Raises:
        TypeError: If it is no torch optimizer, but a wrapper around one, which has no hooks and state of its own.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}; pass the optimizer that it wraps"
        )
    return _attached.get(optimizer) or MasterParams(optimizer)


def holders_of_masters(params: Container[int]) -> list[Optimizer]:
    """The optimizers that step on fp32 masters of some parameters, which are given by id."""
    return [it for it, masters in _attached.items() if any(id(param) in params for param in masters._masters)]


def restart_masters(params: Iterable[Tensor]) -> None:
    """Has masters made anew, in the next step, from the parameters.

    For ranks that got one rank's rounded parameters: that rank's masters know more than the others'.
    """
    chosen = {id(param) for param in params}
    for masters in list(_attached.values()):
        masters.forget(chosen)


class MasterParams(SteppedParams):
    """Has an optimizer step on fp32 copies of its low-precision parameters.

    Adam-type and all fused torch optimizers reject a bf16 parameter with an fp32 gradient, and an update much smaller
    than a parameter is lost when it is added in bf16. A master is made, from the parameter, in the first step in which
    a trainable bf16/fp16 parameter has ``grad_dtype`` fp32; from then on the optimizer's state for it is fp32. The
    update is the optimizer's own on fp32 parameters, bit for bit. Other parameters are stepped on as ever.

    The module's parameters remain what counts: where one was changed from outside (``load_state_dict``, averaged
    weights), its master follows, element by element, in the next step. Writes through ``param.data`` cannot be
    noticed: call :meth:`refresh` after them.

    ``optimizer.state_dict()`` gets an entry ``"master_params"``: {index of the parameter as in ``"param_groups"``: fp32
    tensor}, references like the state's. With it a resumed training goes on bit for bit; a plain optimizer ignores it.
    Without it, masters are made from the parameters. ``load_state_dict`` keeps the state in fp32, which torch's
    casts to the parameters' dtype, so attach before loading.

    Memory: 4 bytes per element of the low-precision parameters, besides the optimizer's state, which is fp32 too.

    After :meth:`close` the state is still fp32; ``optimizer.load_state_dict(optimizer.state_dict())`` rounds it.
    Adagrad makes its state in its constructor: an ``initial_accumulator_value`` that the parameter's dtype cannot
    represent stays rounded.

    Args:
        optimizer: A torch optimizer that has no masters yet; see :func:`master_params`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if optimizer in _attached:
            raise ValueError("the optimizer has master parameters already; master_params(optimizer) returns them")
        super().__init__(optimizer)
        self._masters: dict[Tensor, _Master] = {}
        self._loading: dict[str, Any] = {}
        self._hooks += [
            optimizer.register_state_dict_post_hook(self._add_to_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        _attached[optimizer] = self

    def master(self, param: Tensor) -> Tensor | None:
        """A parameter's fp32 master, of the parameter's shape and strides; None if it has none (yet)."""
        entry = self._masters.get(param)
        return None if entry is None else entry.tensor.detach()

    def forget(self, ids: Container[int]) -> None:
        """Forgets the masters of the parameters with these ids; the next step makes them anew from the parameters."""
        for param in [param for param in self._masters if id(param) in ids]:
            del self._masters[param]

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes masters follow parameters that were changed through ``.data`` since the last step.

        An element whose master rounds to the parameter keeps its master; the others take the parameter's value.
        """
        for param, entry in self._masters.items():
            self._follow(param, entry)

    def close(self) -> None:
        """Removes the hooks and forgets the masters; the optimizer is a plain one again."""
        super().close()
        self._masters.clear()
        for optimizer, masters in list(_attached.items()):
            if masters is self:
                del _attached[optimizer]

    # -- around a step -------------------------------------------------------------------------------

    def _stand_in(self, param: Tensor, state: Any) -> Tensor | None:
        entry = self._masters.get(param)
        if entry is None:
            if not wants_master(param):
                return None
            if param in state:  # in place: LBFGS holds on to its state while the closure runs
                for key, value in state[param].items():
                    state[param][key] = _in_fp32(value, value, param.dtype)
            entry = _Master(torch.nn.Parameter(param.detach().float()), version_of(param))
            self._masters[param] = entry
        elif param.dtype not in _LOW_PRECISION:  # the module was moved to another dtype since
            del self._masters[param]
            return None
        elif entry.param_version is None or entry.param_version != version_of(param):
            self._follow(param, entry)
        # The very gradient. Only one that lost its grad_dtype (deepcopy, close() of the wrapper) has to be converted.
        entry.tensor.grad = None if param.grad is None else param.grad.to(torch.float32)
        return entry.tensor

    def _write_back(self, swaps: Sequence[Swap]) -> None:
        stepped: dict[tuple[torch.dtype, torch.device], list[Swap]] = {}
        for swap in swaps:
            if self._was_stepped(swap):
                stepped.setdefault((swap.param.dtype, swap.param.device), []).append(swap)
        for same in stepped.values():
            torch._foreach_copy_([swap.param for swap in same], [swap.stand_in for swap in same])
            for swap in same:
                self._masters[swap.param].param_version = version_of(swap.param)

    def _follow(self, param: Tensor, entry: _Master) -> None:
        kept = entry.tensor.to(param.dtype) == param
        entry.tensor.copy_(torch.where(kept, entry.tensor, param))
        entry.param_version = version_of(param)

    # -- state dicts ---------------------------------------------------------------------------------

    def _add_to_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        masters = {
            index: self._masters[param].tensor.detach()
            for index, param in enumerate(params_of(optimizer))
            if param in self._masters
        }
        if masters:
            refuse_dcp("optimizer.state_dict() for an optimizer with fp32 master parameters")
            state_dict[STATE_DICT_KEY] = masters

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict

    def _after_load(self, optimizer: Optimizer) -> None:
        loaded, self._loading = self._loading, {}
        masters = loaded.get(STATE_DICT_KEY, {})
        self._masters.clear()
        indices = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        for index, param in zip(indices, params_of(optimizer), strict=True):
            if param.dtype not in _LOW_PRECISION or not (index in masters or wants_master(param)):
                continue
            if param in optimizer.state and index in loaded["state"]:
                optimizer.state[param] = _in_fp32(optimizer.state[param], loaded["state"][index], param.dtype)
            if index in masters:
                self._masters[param] = _Master(_copy_for(param, masters[index], index), param_version=None)


def prepare_at_first_step(
    params: Callable[[], Container[int]], prepare: Callable[[Optimizer], object] = master_params
) -> RemovableHandle:
    """Prepare every optimizer that steps on some parameters, in its first step if it was not before.

    Through torch's global step hook, so that an optimizer nobody has handed over steps on masters too. A state dict
    that is loaded into one *before* its first step is loaded as torch does, in the parameters' dtype and without
    masters: where training is resumed, prepare the optimizer first.

    Args:
        params: Gives the ids of the parameters, which may change.
        prepare: Called with the optimizer, when it has such parameters of low precision with fp32 gradients.
            It has to attach :class:`MasterParams`.

    Returns:
        A handle that ends it; optimizers that were prepared stay so.
    """

    def look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch calls the optimizer's own hooks after the global ones, and so the one that is registered here.
        if optimizer in _attached:
            return
        candidates = [id(param) for param in params_of(optimizer) if wants_master(param)]
        ours = params() if candidates else ()
        if any(candidate in ours for candidate in candidates):
            prepare(optimizer)

    return register_optimizer_step_pre_hook(look)


def params_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """An optimizer's parameters, in the order in which its state dict numbers them."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _in_fp32(value: Any, original: Any, low_precision: torch.dtype) -> Any:
    """State as torch would have it for an fp32 parameter.

    Args:
        value: A parameter's state, on the right device.
        original: The same state before it was cast.
        low_precision: The parameter's dtype.

    Returns:
        ``value``, with fp32 copies of the originals where it has that dtype.
    """
    if isinstance(value, Tensor):
        if value.dtype is not low_precision or not isinstance(original, Tensor):
            return value
        return original.to(value.device, torch.float32, copy=True)  # a copy: steps must not change the caller's tensors
    if isinstance(value, dict) and isinstance(original, dict):
        return {key: _in_fp32(item, original.get(key), low_precision) for key, item in value.items()}
    if isinstance(value, list | tuple) and isinstance(original, list | tuple):
        return type(value)(_in_fp32(item, before, low_precision) for item, before in zip(value, original, strict=True))
    return value


def _copy_for(param: Tensor, master: Tensor, index: int) -> Tensor:
    if master.shape != param.shape:
        raise ValueError(
            f"master parameter {index} of the loaded state dict has shape {tuple(master.shape)}, the optimizer's "
            f"parameter {tuple(param.shape)}; the state dict is another model's, or its parameters are in another order"
        )
    copy = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
    return torch.nn.Parameter(copy.copy_(master))
