"""The swap: an optimizer steps on other tensors than the parameters that it holds.

Outside of a step ``param_groups`` and ``state`` hold the module's parameters, so that toggling, schedulers,
``zero_grad``, clipping, unscaling and state dicts see what they expect::

    step pre-hook     swap in    group["params"][i]: param -> shard or master, state[param] -> state[shard or master]
      closure         swap out, forward and backward on the module's parameters, swap in again
      update          of the shards and masters, with the gradients of the parameters
    step post-hook    swap out   parameters and state back in place; masters are rounded into parameters, shards sent

Hooks are torch's public ones. They do not run when ``step`` raises, hence :meth:`Swap.restored_after`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.optim.element_wise import plain_step, require_optimizer
from lightning_bucketddp.optim.parts import Parts
from lightning_bucketddp.optim.state_dicts import StateDicts, params_of
from lightning_bucketddp.optim.stepped import Stepped, version_of

_swaps: weakref.WeakKeyDictionary[Optimizer, Swap] = weakref.WeakKeyDictionary()


def swap_of(optimizer: Optimizer) -> Swap | None:
    """An optimizer's swap; None if it steps on its parameters."""
    return _swaps.get(optimizer)


@dataclass(slots=True)
class _Swapped:
    """One parameter in whose place the optimizer has another tensor now.

    Attributes:
        param: The module's parameter.
        tensor: What the optimizer steps on.
        grad: The tensor's gradient when it was swapped in.
        version: The tensor's version when it was swapped in.
    """

    param: Tensor
    tensor: Tensor
    grad: Tensor | None
    version: int | None

    @property
    def written(self) -> bool:
        """Whether the tensor was written to, as far as can be told."""
        now = version_of(self.tensor)
        return now is None or now != self.version


class Swap:
    """Has an optimizer step on this rank's parts of its parameters, and on fp32 masters of low-precision ones.

    Adam-type and all fused torch optimizers reject a bf16 parameter with an fp32 gradient, and an update much smaller
    than a parameter is lost when it is added in bf16. A master is made, from the parameter, in the first step in which
    a trainable bf16/fp16 parameter has ``grad_dtype`` fp32; from then on the optimizer's state for it is fp32. The
    update is the optimizer's own on fp32 parameters, bit for bit. Other parameters are stepped on as ever.

    The module's parameters remain what counts: where one was changed from outside (``load_state_dict``, averaged
    weights), its master follows, element by element, in the next step. Writes through ``param.data`` cannot be
    noticed: call :meth:`refresh` after them.

    Where parameters are sharded, the optimizer holds the module's parameters outside of ``step``, and as its state, by
    parameter, that of this rank's part: 1-D tensors. A parameter of which this rank has no part has no state here.

    ``optimizer.state_dict()`` gets an entry ``"master_params"``: {index of the parameter as in ``"param_groups"``: fp32
    tensor}, references like the state's. With it a resumed training goes on bit for bit; a plain optimizer ignores it.
    Without it, masters are made from the parameters. ``load_state_dict`` keeps the state in fp32, which torch's
    casts to the parameters' dtype, so swap before loading.

    Memory: 4 bytes per element of the low-precision parameters, besides the optimizer's state, which is fp32 too.

    After :meth:`close` the state is still fp32, and this rank's part; ``optimizer.load_state_dict(
    optimizer.state_dict())`` rounds it. Adagrad makes its state in its constructor: an ``initial_accumulator_value``
    that the parameter's dtype cannot represent stays rounded.

    Holds no reference to the optimizer outside of a step, so that both go when the last user lets go of them.
    Copies of the optimizer (``copy.deepcopy``, ``pickle``) are plain: torch leaves the hooks behind.

    Args:
        optimizer: A torch optimizer without a swap; an element-wise one if parameters are sharded.
        parts: This rank's part of each parameter; all of it if None.
        with_masters: Whether low-precision parameters have masters.

    Attributes:
        stepped: What the optimizer steps on.
        dicts: What reads and writes the optimizer's state dicts.

    Raises:
        ValueError: If the optimizer has a swap.
    """

    def __init__(self, optimizer: Optimizer, parts: Parts | None = None, with_masters: bool = True) -> None:
        if optimizer in _swaps:
            raise ValueError("the optimizer has master parameters already; master_params(optimizer) returns them")
        self.stepped = Stepped(parts or Parts(), with_masters)
        self.dicts = StateDicts(self.stepped)
        self._swapped: list[_Swapped] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []  # the groups' lists, and what belongs in them
        self._state: Any = None
        # Whether the gradients are those that this step is for; before the closure has run they are the last step's.
        self._stepping = False
        self._sent: set[int] = set()  # ids of parameters that are on their way while the others are stepped on
        for param in params_of(optimizer):
            self.dicts.take_in(optimizer, param)
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(lambda _: self.restore(), prepend=True),
            optimizer.register_state_dict_post_hook(self.dicts.write),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.restore(), prepend=True),
            optimizer.register_load_state_dict_pre_hook(self.dicts.before_load),
            optimizer.register_load_state_dict_post_hook(self.dicts.after_load),
        ]
        _swaps[optimizer] = self

    def master(self, param: Tensor) -> Tensor | None:
        """A parameter's fp32 master, of the shape and strides of this rank's part; None if it has none (yet)."""
        return self.stepped.master(param)

    def refresh(self) -> None:
        """Let masters follow parameters that were changed through ``.data`` since the last step.

        An element whose master rounds to the parameter keeps its master; the others take the parameter's value.
        """
        self.stepped.refresh()

    def restore(self) -> None:
        """Give the optimizer its parameters back if a step that raised has left other tensors in it.

        What that step has changed until then is written back. Does nothing at any other time.
        """
        changed = any(swapped.written for swapped in self._swapped)
        self._swap_out()
        if changed:
            self.stepped.parts.half_updated()

    def restored_after(self) -> AbstractContextManager[object]:
        """For whoever calls ``optimizer.step``: :meth:`restore` also when it raises."""
        stack = ExitStack()
        stack.callback(self.restore)
        return stack

    def close(self) -> None:
        """Remove the hooks, and give the optimizer its parameters back. State remains that of this rank's parts."""
        self.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for optimizer in [it for it, swap in list(_swaps.items()) if swap is self]:
            del _swaps[optimizer]

    # -- around a step -------------------------------------------------------------------------------

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
        closure = self._outside(optimizer, closure)
        return (args, {**kwargs, "closure": closure}) if by_name else ((args[0], closure, *args[2:]), kwargs)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._groups:
            return  # around a step within it, which has seen to everything
        self._swap_out()
        self.stepped.updated([param for param in params_of(optimizer) if id(param) not in self._sent])

    def _outside(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure, run on the module's parameters."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            self._swap_out()
            result = closure(*args, **kwargs)  # if it raises, so does the step: the parameters stay where they belong
            self._stepping = True
            self._swap_in(optimizer)
            return result

        return outside

    @torch.no_grad()
    def _swap_in(self, optimizer: Optimizer) -> None:
        if self._groups:
            return  # a step that calls another hooked one; the closure that both were given has just been run
        self.stepped.parts.before_update()
        self._sent.clear()
        state = self._state = optimizer.state
        for group in optimizer.param_groups:
            params = group["params"]
            # Noted before anything moves, so that an interrupt leaves nothing behind that restore() does not find.
            self._groups.append((params, list(params)))
            present: list[Tensor] = []
            for param in params:
                tensor = self.stepped.tensor_for(param, state)
                if tensor is None:
                    continue
                if tensor is not param:
                    self._swapped.append(_Swapped(param, tensor, tensor.grad, version_of(tensor)))
                    if param in state:
                        state[tensor] = state.pop(param)
                present.append(tensor)
            params[:] = present  # in place: LBFGS keeps the list
        if self._stepping:
            self._step_on_first_stages(optimizer)

    def _step_on_first_stages(self, optimizer: Optimizer) -> None:
        """Step on what forward needs first, so that it is on its way while the rest is stepped on.

        The step that was called goes on with what is left in the groups.
        """
        step = plain_step(optimizer)
        if step is None:
            return
        stages = self.stepped.parts.in_stages([param for _, belonging in self._groups for param in belonging])
        if len(stages) < 2:
            return
        tensors = {id(tensor): tensor for params, _ in self._groups for tensor in params}
        tensors |= {id(swapped.param): swapped.tensor for swapped in self._swapped}

        def leave(chosen: Container[int]) -> None:
            for params, belonging in self._groups:
                params[:] = [tensors[id(param)] for param in belonging if id(param) in chosen]

        for stage in stages[:-1]:
            chosen = tensors.keys() & {id(param) for param in stage}
            if chosen:
                leave(chosen)
                step(optimizer)
            self._write_back([swapped for swapped in self._swapped if id(swapped.param) in chosen])
            self._sent.update(id(param) for param in stage)
            self.stepped.updated(stage, complete=False)
        leave(tensors.keys() - self._sent)

    @torch.no_grad()
    def _swap_out(self) -> None:
        swapped, self._swapped = self._swapped, []
        groups, self._groups = self._groups, []
        state, self._state = self._state, None
        for params, belonging in groups:
            params[:] = belonging
        for swap in swapped:
            if swap.tensor in state:
                state[swap.param] = state.pop(swap.tensor)
            if swap.grad is not None and swap.tensor.grad is None:
                swap.param.grad = None  # the optimizer has cleared it
            swap.tensor.grad = None
        self._write_back([swap for swap in swapped if id(swap.param) not in self._sent])

    def _write_back(self, swapped: Sequence[_Swapped]) -> None:
        # A fused optimizer's writes are not counted: what had a gradient may have been stepped on.
        self.stepped.write_back(
            [swap.param for swap in swapped if (self._stepping and swap.grad is not None) or swap.written]
        )


def master_params(optimizer: Optimizer) -> Swap:
    """The optimizer's master parameters; attached to it in the first call.

    Args:
        optimizer: A torch optimizer.

    Returns:
        The same object in every call, until it is closed.

    Raises:
        TypeError: If it is no torch optimizer, but a wrapper around one, which has no hooks and state of its own.
    """
    require_optimizer(optimizer)
    return swap_of(optimizer) or Swap(optimizer)


def holders_of_masters(params: Container[int]) -> list[Optimizer]:
    """The optimizers that step on fp32 masters of some whole parameters, which are given by id."""
    return [
        it for it, swap in list(_swaps.items()) if any(id(param) in params for param in swap.stepped.whole_masters())
    ]


def restart_masters(params: Iterable[Tensor]) -> None:
    """Have masters of whole parameters made anew, in the next step, from the parameters.

    For ranks that got one rank's rounded parameters: that rank's masters know more than the others'.
    """
    chosen = {id(param) for param in params}
    for swap in list(_swaps.values()):
        for param in swap.stepped.whole_masters():
            if id(param) in chosen:
                swap.stepped.set_master(param, None)


def prepare_at_first_step(
    params: Callable[[], Container[int]], prepare: Callable[[Optimizer], object] = master_params
) -> RemovableHandle:
    """Prepare every optimizer that steps on some parameters, in its first step.

    Through torch's global step hook, so that an optimizer nobody has handed over steps on masters or shards too. A
    state dict that is loaded into one *before* its first step is loaded as torch does, in the parameters' dtype and
    without masters: where training is resumed, prepare the optimizer first.

    Args:
        params: Gives the ids of the parameters, which may change.
        prepare: Called once with the optimizer, when it has such parameters. It has to attach a :class:`Swap`, unless
            there is one.

    Returns:
        A handle that ends it; optimizers that were prepared stay so.
    """
    prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch calls the optimizer's own hooks after the global ones, and so the one that is registered here.
        if optimizer in prepared:
            return
        ours = params()
        if any(id(param) in ours for param in params_of(optimizer)):
            prepare(optimizer)
            prepared.add(optimizer)

    return register_optimizer_step_pre_hook(look)
