"""The swap: an optimizer steps on shards or masters in place of its parameters.

Outside of a step ``param_groups`` and ``state`` hold the module's parameters. So toggling, schedulers, ``zero_grad``,
clipping, unscaling and state dicts work as ever::

    step pre-hook     swap in    group["params"][i]: param -> shard or master, state[param] -> state[shard or master]
      closure         swap out, forward and backward on the module's parameters, swap in again
      update          of the shards and masters, with the gradients of the parameters
    step post-hook    swap out   parameters and state back in place; masters are rounded into parameters, shards sent

The hooks are torch's public ones. torch does not run the post-hook when ``step`` raises, hence
:meth:`Swap.restored_after`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.optim.element_wise import require_optimizer
from lightning_bucketddp.optim.parts import Parts
from lightning_bucketddp.optim.stepped import Stepped, params_of

_swaps: weakref.WeakKeyDictionary[Optimizer, Swap] = weakref.WeakKeyDictionary()

_left_with_parts: weakref.WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The state of this rank's parts that closed swaps have left in their optimizers."""


def swap_of(optimizer: Optimizer) -> Swap | None:
    """Return an optimizer's swap; None if it steps on its parameters."""
    return _swaps.get(optimizer)


@dataclass(slots=True)
class _Swapped:
    """A parameter whose place in the optimizer another tensor has now.

    Attributes:
        param: The module's parameter.
        tensor: The tensor in its place.
        grad: The tensor's gradient when it was swapped in.
        param_grad: The parameter's, then.
        version: The tensor's version when it was swapped in.
        address: Where its memory was then.
    """

    param: Tensor
    tensor: Tensor
    grad: Tensor | None
    param_grad: Tensor | None
    version: int
    address: int

    @property
    def moved(self) -> bool:
        """Whether the tensor was given other memory, by ``tensor.data = other``."""
        return self.tensor.data_ptr() != self.address

    @property
    def written(self) -> bool:
        """Whether the tensor is known to have been written to."""
        return self.moved or self.tensor._version != self.version


class Swap:
    """Has an optimizer step on this rank's shards of its parameters, and on fp32 masters of low-precision ones.

    Masters: Adam-type and all fused torch optimizers reject a bf16 parameter with an fp32 gradient. bf16 also loses an
    update much smaller than the parameter. The first step with a trainable bf16/fp16 parameter whose ``grad_dtype`` is
    fp32 makes its master. From then on its state is fp32, and the update is the optimizer's own on fp32 parameters, bit
    for bit. A master costs 4 bytes per element.

    The module's parameters stay the truth. Where one was changed from outside (``load_state_dict``, averaged weights),
    its master follows in the next step, element by element. Writes through ``param.data`` go unnoticed: call
    :meth:`refresh` after them.

    Shards: the optimizer's state for a sharded parameter is 1-D, for this rank's part. A parameter without a part on
    this rank has no state here.

    State dicts: ``optimizer.state_dict()`` has an entry ``"master_params"``, {index of the parameter as in
    ``"param_groups"``: fp32 tensor}. With it training resumes bit for bit; a plain optimizer ignores it. Without it,
    masters are made from the parameters. ``load_state_dict`` keeps state in fp32, which torch alone would cast to the
    parameters' dtype. So swap before loading.

    After :meth:`close` the state is still fp32, and that of this rank's parts. Adagrad makes its state in its
    constructor: an ``initial_accumulator_value`` that the parameter's dtype cannot represent stays rounded.

    A swap holds no reference to its optimizer outside of a step. Copies of the optimizer (``copy.deepcopy``,
    ``pickle``) are plain, as torch does not copy hooks.

    Args:
        optimizer: A torch optimizer without a swap; an element-wise one if parameters are sharded.
        parts: This rank's part of each parameter; all of it if None.
        with_masters: Whether low-precision parameters have masters.

    Attributes:
        stepped: The shards and masters, and their state.

    Raises:
        ValueError: If the optimizer has a swap, or the state that another one has left.
    """

    def __init__(self, optimizer: Optimizer, parts: Parts | None = None, with_masters: bool = True) -> None:
        if optimizer in _swaps:
            raise ValueError("the optimizer has master parameters already; master_params(optimizer) returns them")
        left = set(map(id, _left_with_parts.get(optimizer, ())))
        if any(id(entries) in left for entries in optimizer.state.values()):
            raise ValueError(
                f"expected an optimizer with the whole state of its parameters, or none, found a "
                f"{type(optimizer).__name__} that kept this rank's part from an earlier fit, or from a BucketDDP that "
                "was closed. Make a new one (in a Trainer: in configure_optimizers), or call load_state_dict() first"
            )
        _left_with_parts.pop(optimizer, None)
        self.stepped = Stepped(parts or Parts(), with_masters)
        self._swapped: list[_Swapped] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []  # each group's list, and its parameters
        self._state: Any = None
        self._stepping = False  # whether the closure has run: before that, gradients are those of the last step
        for param in params_of(optimizer):
            self.stepped.keep_own_part(optimizer, param)
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(lambda _: self.restore(), prepend=True),
            optimizer.register_state_dict_post_hook(self.stepped.write_state_dict),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.restore(), prepend=True),
            optimizer.register_load_state_dict_pre_hook(self.stepped.before_load),
            optimizer.register_load_state_dict_post_hook(self.stepped.after_load),
        ]
        _swaps[optimizer] = self

    def master(self, param: Tensor) -> Tensor | None:
        """Return a parameter's fp32 master, with the shape and strides of this rank's part; None if it has none."""
        return self.stepped.master(param)

    def refresh(self) -> None:
        """Let masters follow parameters that were changed through ``.data`` since the last step.

        An element whose master rounds to the parameter keeps its master; the others take the parameter's value.
        """
        self.stepped.refresh()

    def restore(self) -> None:
        """Give the optimizer its parameters back after a step that raised. Does nothing at any other time.

        Changes that the step made before it raised are written back.
        """
        changed = any(swapped.written for swapped in self._swapped)
        self._swap_out()
        if changed:
            self.stepped.parts.half_updated()

    @contextmanager
    def restored_after(self) -> Iterator[None]:
        """Call :meth:`restore` when the block ends, also when it raises. For callers of ``optimizer.step``."""
        try:
            yield
        finally:
            self.restore()

    def close(self) -> None:
        """Remove the hooks, and give the optimizer its parameters back. Its state stays that of this rank's parts."""
        self.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for optimizer in [key for key, swap in list(_swaps.items()) if swap is self]:
            del _swaps[optimizer]
            if not all(self.stepped.is_whole(param) for param in params_of(optimizer)):
                _left_with_parts[optimizer] = list(optimizer.state.values())

    # -- around a step -------------------------------------------------------------------------------

    def be_innermost(self, optimizer: Optimizer) -> None:
        """Swap in after the optimizer's other pre-hooks, and out before its other post-hooks."""
        # torch has no public way. Should its attributes go, hooks run in the order in which they were registered.
        for name, hook, last in zip(("pre", "post"), self._hooks, (True, False), strict=False):
            hooks: Any = getattr(optimizer, f"_optimizer_step_{name}_hooks", {})
            if hook.id in hooks:
                hooks.move_to_end(hook.id, last=last)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.restore()
        by_name = len(args) < 2  # args[0] is the optimizer
        closure = kwargs.get("closure") if by_name else args[1]
        self._stepping = not callable(closure)
        if self._stepping or self.stepped.parts.swap_before_closure:
            self._swap_in(optimizer)
        if not callable(closure):
            return None
        closure = self._on_params(optimizer, closure)
        return (args, {**kwargs, "closure": closure}) if by_name else ((args[0], closure, *args[2:]), kwargs)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._groups:
            return  # a step that this one called has swapped out
        self._swap_out()
        self.stepped.updated([*params_of(optimizer)])

    def _on_params(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a closure so that it runs on the module's parameters."""

        def on_params(*args: Any, **kwargs: Any) -> Any:
            self._swap_out()
            result = closure(*args, **kwargs)  # if it raises, so does the step: the parameters stay where they belong
            self._stepping = True
            self._swap_in(optimizer)
            return result

        return on_params

    @torch.no_grad()
    def _swap_in(self, optimizer: Optimizer) -> None:
        if self._groups:
            return  # this step calls another one with hooks: the closure of both has just swapped in
        self.stepped.parts.before_update()
        state = self._state = optimizer.state
        # Set before anything moves, so that an interrupted swap can be undone.
        self._groups = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
        params = [param for _, originals in self._groups for param in originals]
        tensors = {param: tensor for param in params if (tensor := self.stepped.tensor_for(param, state)) is not None}
        for param, tensor in tensors.items():
            if tensor is not param:
                grads = tensor.grad, param.grad
                self._swapped.append(_Swapped(param, tensor, *grads, tensor._version, tensor.data_ptr()))
                if param in state:
                    state[tensor] = state.pop(param)
        for group, originals in self._groups:
            # In place: LBFGS keeps the list.
            group[:] = [tensor for param in originals if (tensor := tensors.get(param)) is not None]

    @torch.no_grad()
    def _swap_out(self) -> None:
        swapped, self._swapped = self._swapped, []
        groups, self._groups = self._groups, []
        state, self._state = self._state, None
        for params, originals in groups:
            params[:] = originals
        for one in swapped:
            if one.tensor in state:
                state[one.param] = state.pop(one.tensor)
            if one.grad is not None and one.tensor.grad is None and one.param.grad is one.param_grad:
                one.param.grad = None  # the optimizer has cleared it
            one.tensor.grad = None
        self.stepped.bring_back([one.param for one in swapped if one.moved])
        # Versions miss a fused optimizer's writes, so every tensor with a gradient counts as written.
        self.stepped.write_back(
            [one.param for one in swapped if (self._stepping and one.grad is not None) or one.written]
        )


def master_params(optimizer: Optimizer) -> Swap:
    """Return an optimizer's master parameters; the first call attaches them.

    Args:
        optimizer: A torch optimizer.

    Returns:
        The same object in every call, until it is closed.

    Raises:
        TypeError: If it is a wrapper around an optimizer, which has no hooks and state of its own.
    """
    require_optimizer(optimizer)
    return swap_of(optimizer) or Swap(optimizer)


def holders_of_masters(params: Container[int]) -> list[Optimizer]:
    """Return the optimizers with whole masters of some parameters, which are given by id."""
    return [
        optimizer
        for optimizer, swap in list(_swaps.items())
        if any(id(param) in params for param in swap.stepped.whole_masters())
    ]


def restart_masters(params: Iterable[Tensor]) -> None:
    """Drop the whole masters of parameters; the next step makes them anew.

    For parameters that were broadcast rounded: the sender's masters would know more than the others'.
    """
    chosen = {id(param) for param in params}
    for swap in list(_swaps.values()):
        for param in swap.stepped.whole_masters():
            if id(param) in chosen:
                swap.stepped.set_master(param, None)
