"""A sharded optimizer: each rank's steps on its parts of the parameters, and has state for those only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_bucketddp.layout.plan import ParamSpec
from lightning_bucketddp.layout.require import require
from lightning_bucketddp.layout.shards import Part
from lightning_bucketddp.optim.masters import STATE_DICT_KEY, _in_fp32, _Master, params_of, wants_master
from lightning_bucketddp.optim.param_buffers import in_memory_order
from lightning_bucketddp.optim.swap import LEFT_OUT, SteppedParams, Swap, refuse_dcp, version_of

SHARD_KEY = "bucketddp_shard"
"""Entry of a sharded optimizer's own ``state_dict()``: which part of each parameter its state is for."""

_TORCHS: frozenset[type] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.ASGD,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
    }
)
"""Element-wise, and steps are counted by parameter."""

_ELEMENT_WISE: set[type] = set(_TORCHS)
_KNOWN = frozenset(
    {
        "lion_pytorch.foreach.Lion",
        "lion_pytorch.lion_pytorch.Lion",
        "timm.optim.adamw.AdamWLegacy",
        "timm.optim.adopt.Adopt",
        "timm.optim.lion.Lion",
        "timm.optim.nadamw.NAdamW",
        "timm.optim.sgdw.SGDW",
        "torch_optimizer.adabelief.AdaBelief",
        "torch_optimizer.adabound.AdaBound",
        "torch_optimizer.adamod.AdaMod",
        "torch_optimizer.diffgrad.DiffGrad",
        "torch_optimizer.qhadam.QHAdam",
        "torch_optimizer.sgdw.SGDW",
        "torch_optimizer.yogi.Yogi",
    }
)
"""Element-wise optimizers of other packages, which need not be installed."""

_NOT_ELEMENT_WISE: dict[str, str] = {
    "LBFGS": "its directions are products of the whole gradient with earlier ones",
    "Adafactor": "it keeps sums over rows and columns of each parameter",
    "Muon": "it orthogonalises each parameter's matrix",
    "Shampoo": "it multiplies by matrices of each parameter's rows and columns",
    "SOAP": "it multiplies by matrices of each parameter's rows and columns",
    "LAMB": "it scales by the norm of each parameter",
    "LARS": "it scales by the norm of each parameter",
    "NovoGrad": "it divides by the norm of each parameter's gradient",
    "SparseAdam": "it is for sparse gradients, which are not sharded",
    "Prodigy": "it estimates a step size from products over all parameters",
    "DAdaptAdam": "it estimates a step size from products over all parameters",
}


def declare_element_wise(kind: type[Optimizer]) -> type[Optimizer]:
    """Says that an optimizer class may be sharded; usable as a decorator.

    That is so if what happens to an element of a parameter depends on that element, its gradient and its state alone,
    and state is made in ``step``, of the parameter's shape or of one element. No other method may touch parameters
    together with their state.

    Args:
        kind: The class itself; subclasses are not included.

    Raises:
        TypeError: If it is no class of optimizers.
    """
    require("kind", kind, "a class of torch.optim.Optimizer", type(Optimizer))
    _ELEMENT_WISE.add(kind)
    return kind


def require_element_wise(optimizer: Optimizer) -> None:
    """Requires that an optimizer can work on parts of parameters.

    Raises:
        TypeError: If it is no torch optimizer, but a wrapper around one.
        ValueError: If it looks at more than one element at a time, if it is not known whether it does, or if it changes
            parameters outside of ``step``.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}; pass the optimizer that it wraps"
        )
    kind = type(optimizer)
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        raise ValueError(
            f"expected an optimizer that changes parameters in step() alone with shard_optimizer=True, found "
            f"{kind.__name__} with train() and eval(), as schedule-free ones have: outside of step() they would find "
            "whole parameters, and state for this rank's part only. Use shard_optimizer=False with it"
        )
    name = f"{kind.__module__}.{kind.__qualname__}"
    if any(group.get("caution") for group in optimizer.param_groups):  # timm's
        raise ValueError(
            f"expected an element-wise optimizer with shard_optimizer=True, found {name} with caution=True: it takes a "
            "mean over each parameter, and each rank would see a part only. Use caution=False"
        )
    if kind in _ELEMENT_WISE or name in _KNOWN:
        return
    for base in kind.__mro__:
        if (why := _NOT_ELEMENT_WISE.get(base.__name__)) is not None:
            raise ValueError(
                f"expected an element-wise optimizer with shard_optimizer=True, found {kind.__name__}: {why}, and each "
                "rank would see a part only. Use shard_optimizer=False with it"
            )
    raise ValueError(
        f"expected an optimizer known to be element-wise with shard_optimizer=True, found {name}. If what it does to "
        "an element depends on that element, its gradient and its state alone, say so: "
        "lightning_bucketddp.declare_element_wise(its class)"
    )


class Shards(Protocol):
    """What a sharded optimizer asks of the buffers."""

    def find(self, param: Tensor) -> tuple[ParamSpec, Part] | None:
        """A parameter's specification and this rank's part of it; None if the parameter is not sharded."""

    def param_part(self, param: Tensor) -> Tensor:
        """The memory of this rank's part of a parameter, 1-D."""

    def grad_part(self, param: Tensor) -> Tensor | None:
        """This rank's part of a parameter's gradient, 1-D; None if the parameter has no gradient."""

    def before_update(self) -> None:
        """Parameters are about to be updated: nothing may be on its way from them."""

    def half_updated(self) -> None:
        """A step raised, and has changed some of this rank's parts."""

    def updated(self, params: Iterable[Tensor], complete: bool = True) -> None:
        """This rank's parts of all these parameters have their new values; all ranks do this together."""

    def in_stages(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """The parameters in the order in which forward needs them, cut where they may be sent one after the other."""


_attached: weakref.WeakKeyDictionary[Optimizer, ShardedParams] = weakref.WeakKeyDictionary()


def sharded_params(optimizer: Optimizer) -> ShardedParams | None:
    """What makes an optimizer a sharded one; None if it is not."""
    return _attached.get(optimizer)


class ShardedParams(SteppedParams):
    """Has an optimizer step on this rank's parts of its parameters, and keep state for those only.

    Outside of ``step`` the optimizer holds the module's parameters, and as its state, by parameter, that of the part:
    1-D tensors. A parameter of which this rank has no part has no state here.

    Low-precision parameters whose gradients are fp32 have fp32 masters, of the part as well.

    Args:
        optimizer: An element-wise optimizer.
        shards: The buffers.
        with_masters: Whether low-precision parameters have masters.
    """

    def __init__(self, optimizer: Optimizer, shards: Shards, with_masters: bool) -> None:
        require_element_wise(optimizer)
        super().__init__(optimizer)
        self._shards = shards
        self._with_masters = with_masters
        self._masters: dict[Tensor, _Master] = {}
        self._stand_ins: dict[Tensor, tuple[Tensor, nn.Parameter]] = {}  # by parameter: the memory, and the stand-in
        self._loading: dict[str, Any] = {}
        self._sent: set[int] = set()  # ids of the parameters that are on their way while the others are stepped on
        self._hooks += [
            optimizer.register_state_dict_post_hook(self._mark_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        for param in params_of(optimizer):
            self.take_in(optimizer, param)
        _attached[optimizer] = self

    def master(self, param: Tensor) -> Tensor | None:
        """The fp32 master of this rank's part of a parameter, 1-D; None if it has none (yet)."""
        entry = self._masters.get(param)
        return None if entry is None else entry.tensor.detach()

    def set_master(self, param: Tensor, values: Tensor | None) -> None:
        """Sets or forgets the master of this rank's part of a parameter."""
        self._masters.pop(param, None)
        if values is not None:
            # Without a version: the parameter may have been changed since the master was made.
            self._masters[param] = _Master(nn.Parameter(values), param_version=None)

    def forget_memory(self) -> None:
        """The parameters have moved to other memory, or this rank's parts are others."""
        self._stand_ins.clear()

    def close(self) -> None:
        """Removes the hooks. State and masters remain those of this rank's parts."""
        super().close()
        for optimizer, sharded in list(_attached.items()):
            if sharded is self:
                del _attached[optimizer]

    # -- around a step -------------------------------------------------------------------------------

    def restore(self) -> None:
        """As for any optimizer; if the step that raised has changed something, the ranks cannot go on together."""
        changed = any((now := version_of(swap.stand_in)) is None or now != swap.version for swap in self._swaps)
        super().restore()
        if changed:
            self._shards.half_updated()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        by_name = len(args) < 2  # args[0] is the optimizer
        closure = kwargs.get("closure") if by_name else args[1]
        if not callable(closure):
            return super()._before_step(optimizer, args, kwargs)
        # Element-wise optimizers call it first; forward then waits for what it needs, and nobody for all of it.
        self.restore()
        closure = self._outside(optimizer, closure)
        return (args, {**kwargs, "closure": closure}) if by_name else ((args[0], closure, *args[2:]), kwargs)

    def _swap_in(self, optimizer: Optimizer) -> None:
        self._shards.before_update()
        self._sent.clear()
        super()._swap_in(optimizer)
        if self._stepping:
            self._step_on_first_stages(optimizer)

    def _step_on_first_stages(self, optimizer: Optimizer) -> None:
        """Steps on what forward needs first, so that it is on its way while the rest is stepped on.

        Only where it is known that a step on some parameters, and then on the others, is a step on all of them: torch's
        optimizers count steps by parameter. The step that was called goes on with what is left in the groups.
        """
        hooked = type(optimizer).step
        step = getattr(hooked, "__wrapped__", None)  # functools' name for what the hooks are around
        if step is None or not getattr(hooked, "hooked", False) or type(optimizer) not in _TORCHS:
            return
        stages = self._shards.in_stages([param for _, belonging in self._groups for param in belonging])
        present = [list(group["params"]) for group in optimizer.param_groups]
        by_param = {id(swap.param): swap for swap in self._swaps}
        for stage in stages[:-1]:
            swaps = [by_param[id(param)] for param in stage if id(param) in by_param]
            chosen = {id(swap.stand_in) for swap in swaps}
            for group, stand_ins in zip(optimizer.param_groups, present, strict=True):
                group["params"][:] = [it for it in stand_ins if id(it) in chosen]
            if chosen:
                step(optimizer)
            self._write_back(swaps)
            self._sent.update(id(param) for param in stage)
            self._shards.updated(stage, complete=False)
        gone = {id(by_param[at].stand_in) for at in self._sent if at in by_param}
        for group, stand_ins in zip(optimizer.param_groups, present, strict=True):
            group["params"][:] = [it for it in stand_ins if id(it) not in gone]

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._groups:
            return  # around a step within it, which has seen to everything
        super()._after_step(optimizer, args, kwargs)
        sent, self._sent = self._sent, set()
        self._shards.updated([param for param in params_of(optimizer) if id(param) not in sent])

    def _stand_in(self, param: Tensor, state: Any) -> Tensor | object | None:
        found = self._shards.find(param)
        if found is None:
            return None
        _, part = found
        if part.empty:
            return LEFT_OUT
        memory = self._shards.param_part(param)
        if self._with_masters and (param in self._masters or wants_master(param)):
            stand_in = self._master_of(param, memory, state)
        else:
            known = self._stand_ins.get(param)
            if known is None or known[0].data_ptr() != memory.data_ptr() or known[0].dtype is not memory.dtype:
                known = self._stand_ins[param] = (memory, nn.Parameter(memory))
            stand_in = known[1]
        grad = self._shards.grad_part(param)
        stand_in.grad = None if grad is None else grad.to(stand_in.dtype)
        return stand_in

    def _master_of(self, param: Tensor, memory: Tensor, state: Any) -> Tensor:
        entry = self._masters.get(param)
        if entry is None:
            if param in state:
                for key, value in state[param].items():
                    state[param][key] = _in_fp32(value, value, param.dtype)
            entry = self._masters[param] = _Master(nn.Parameter(memory.float()), version_of(param))
        elif entry.param_version is None or entry.param_version != version_of(param):
            # Changed from outside: an element whose master rounds to the parameter keeps its master.
            kept = entry.tensor.to(param.dtype) == memory
            entry.tensor.copy_(torch.where(kept, entry.tensor, memory))
            entry.param_version = version_of(param)
        return entry.tensor

    def _write_back(self, swaps: Sequence[Swap]) -> None:
        stepped = [swap for swap in swaps if id(swap.param) not in self._sent and self._was_stepped(swap)]
        rounded = [swap for swap in stepped if swap.param in self._masters]
        by_dtype: dict[tuple[torch.dtype, torch.device], list[Swap]] = {}
        for swap in rounded:
            by_dtype.setdefault((swap.param.dtype, swap.param.device), []).append(swap)
        for same in by_dtype.values():
            parts = [self._shards.param_part(swap.param) for swap in same]
            torch._foreach_copy_(parts, [swap.stand_in for swap in same])
        # Graphs that have saved the parameters must notice, on every rank: those without a part of one as well.
        for swap in rounded:
            self._masters[swap.param].param_version = None

    def synchronised(self, param: Tensor) -> None:
        """A parameter has its new values, which are those of its master, on every rank."""
        entry = self._masters.get(param)
        if entry is not None:
            entry.param_version = version_of(param)

    # -- state dicts ---------------------------------------------------------------------------------

    def take_in(self, optimizer: Optimizer, param: Tensor) -> None:
        """Has a parameter sharded: state and master of the whole become those of this rank's part."""
        found = self._shards.find(param)
        if found is None:
            return
        state, master = part_of_whole(*found, optimizer.state.pop(param, None), self.master(param))
        if state is not None:
            optimizer.state[param] = state
        self.set_master(param, master)

    def _described(self, optimizer: Optimizer) -> dict[int, tuple[int, int]]:
        found = {index: self._shards.find(param) for index, param in enumerate(params_of(optimizer))}
        return {index: (it[1].start, it[1].stop) for index, it in found.items() if it is not None}

    def _mark_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        refuse_dcp(
            "optimizer_state_dict() of the BucketDDP, or its save_sharded(), for a sharded optimizer, of whose state "
            "each rank has a part"
        )
        state_dict[SHARD_KEY] = self._described(optimizer)
        masters = {
            index: self._masters[param].tensor.detach()
            for index, param in enumerate(params_of(optimizer))
            if param in self._masters
        }
        if masters:
            state_dict[STATE_DICT_KEY] = masters

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A whole state dict becomes this rank's part of it, before anything is moved to the device."""
        described = state_dict.get(SHARD_KEY)
        mine = self._described(optimizer)
        params = list(params_of(optimizer))
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        loaded = dict(state_dict)
        if described is not None:
            if {int(index): tuple(part) for index, part in described.items()} != mine:
                raise ValueError(
                    "expected a whole optimizer state dict, or one of this rank's with the same buckets, found one of "
                    "another shard; save what BucketDDP.optimizer_state_dict() gives, which loads anywhere"
                )
        elif len(indices) == len(params):
            state, masters = dict(state_dict["state"]), dict(state_dict.get(STATE_DICT_KEY, {}))
            for index, param in zip(indices, params, strict=True):
                found = self._shards.find(param)
                if found is None:
                    continue
                own, master = part_of_whole(*found, state.pop(index, None), masters.pop(index, None))
                if own is not None:
                    state[index] = own
                if master is not None:
                    masters[index] = master
            loaded["state"], loaded[STATE_DICT_KEY] = state, masters
        self._loading = loaded
        return loaded

    def _after_load(self, optimizer: Optimizer) -> None:
        loaded, self._loading = self._loading, {}
        masters = loaded.get(STATE_DICT_KEY, {})
        self._masters.clear()
        indices = [index for group in loaded["param_groups"] for index in group["params"]]
        for index, param in zip(indices, params_of(optimizer), strict=True):
            if not self._with_masters or not (index in masters or wants_master(param)):
                continue
            if param in optimizer.state and index in loaded["state"]:
                optimizer.state[param] = _in_fp32(optimizer.state[param], loaded["state"][index], param.dtype)
            if index in masters:
                values = masters[index].to(param.device, torch.float32, copy=True)
                self._masters[param] = _Master(nn.Parameter(values), param_version=None)


def part_of_whole(
    spec: ParamSpec, part: Part, state: Mapping[str, Any] | None, master: Tensor | None
) -> tuple[dict[str, Any] | None, Tensor | None]:
    """The state and master of a part, from those of a whole parameter; copies, and None where there is nothing.

    Raises:
        ValueError: If a tensor of the state has neither the parameter's shape nor one element, or the master another.
    """
    if part.empty:
        return None, None

    def own(value: Tensor) -> Tensor:
        return in_memory_order(value, spec)[part.start : part.stop].clone()

    if master is not None and tuple(master.shape) != spec.shape:
        raise ValueError(
            f"expected a master parameter of {spec.name!r} to have shape {spec.shape}, found {tuple(master.shape)}"
        )
    found: dict[str, Any] = {}
    for key, value in (state or {}).items():
        if isinstance(value, Tensor):
            found[key] = own(value) if is_per_element(key, value, spec) else value.clone()
        else:
            found[key] = value
    return None if state is None else found, None if master is None else own(master)


def is_per_element(key: str, value: Tensor, spec: ParamSpec) -> bool:
    """Whether a tensor of a parameter's state has a value for each of its elements.

    Raises:
        ValueError: If it has neither that nor one element.
    """
    if key != "step" and tuple(value.shape) == spec.shape:
        return True
    if value.numel() == 1:
        return False
    raise ValueError(
        f"expected optimizer state {key!r} of parameter {spec.name!r} to have the parameter's shape {spec.shape}, or "
        f"one element, found {tuple(value.shape)}: it cannot be sharded, or is another model's"
    )
