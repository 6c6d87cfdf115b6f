"""What an optimizer steps on: tensors that stand in for the module's parameters while a step runs.

Outside of a step ``param_groups`` and ``state`` hold the module's parameters, so that toggling, schedulers,
``zero_grad``, clipping, unscaling and state dicts see what they expect::

    step pre-hook     swap in    group["params"][i]: param -> stand-in, state[param] -> state[stand-in]
      closure         swap out, forward and backward on the module's parameters, swap in again
      update          of the stand-ins, with the gradients of the parameters
    step post-hook    swap out   parameters and state back in place, then the parameters are updated from the stand-ins

Hooks are torch's public ones. They do not run when ``step`` raises, hence :meth:`SteppedParams.restored_after`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to in place, as autograd counts it; None if torch no longer tells.

    ``_version`` is private by its name. It misses writes through ``.data`` and those of fused optimizers, so it may
    only ever add to what is known otherwise.
    """
    return getattr(tensor, "_version", None)


def refuse_dcp(instead: str) -> None:
    """Refuses ``optimizer.state_dict()`` to torch's ``get_optimizer_state_dict``, which would drop a part of it.

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


LEFT_OUT = object()
"""Instead of a stand-in: the optimizer does not step on the parameter at all."""


@dataclass(slots=True)
class Swap:
    """One parameter whose stand-in is in the optimizer now.

    Attributes:
        param: The module's parameter.
        stand_in: What the optimizer steps on.
        grad: The stand-in's gradient when it was swapped in.
        version: The stand-in's version when it was swapped in.
    """

    param: Tensor
    stand_in: Tensor
    grad: Tensor | None
    version: int | None


class SteppedParams(ABC):
    """Makes an optimizer step on other tensors than the parameters that it holds.

    Holds no reference to the optimizer outside of a step, so that both go when the last user lets go of them.
    Copies of the optimizer (``copy.deepcopy``, ``pickle``) are plain: torch leaves the hooks behind.

    Args:
        optimizer: Any torch optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._swaps: list[Swap] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []  # the groups' lists, and what belongs in them
        self._state: Any = None
        # Whether the gradients are those that this step is for; before the closure has run they are the last step's.
        self._stepping = False
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(lambda _: self.restore(), prepend=True),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.restore(), prepend=True),
        ]

    @abstractmethod
    def _stand_in(self, param: Tensor, state: Any) -> Tensor | object | None:
        """What to step on instead of a parameter.

        Args:
            param: One of the optimizer's parameters.
            state: The optimizer's state, which holds the parameter's under the parameter.

        Returns:
            The stand-in with its gradient bound; None if the optimizer steps on the parameter itself, and
            :data:`LEFT_OUT` if it does not step on it.
        """

    @abstractmethod
    def _write_back(self, swaps: Sequence[Swap]) -> None:
        """Updates the parameters from their stand-ins, after the optimizer has got its parameters back."""

    def restore(self) -> None:
        """Gives the optimizer its parameters back if a step that raised has left the stand-ins in it.

        What that step has changed until then is written back. Does nothing at any other time.
        """
        self._swap_out()

    @contextmanager
    def restored_after(self) -> Generator[None, None, None]:
        """For whoever calls ``optimizer.step``: :meth:`restore` also when it raises."""
        try:
            yield
        finally:
            self.restore()

    def close(self) -> None:
        """Removes the hooks, and gives the optimizer its parameters back."""
        self.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- around a step -------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.restore()
        by_name = len(args) < 2  # args[0] is the optimizer
        closure = kwargs.get("closure") if by_name else args[1]
        self._stepping = not callable(closure)
        self._swap_in(optimizer)
        if not callable(closure):
            return None
        closure = self._outside(optimizer, closure)
        return (args, {**kwargs, "closure": closure}) if by_name else ((args[0], closure, *args[2:]), kwargs)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._swap_out()

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
        state = self._state = optimizer.state
        for group in optimizer.param_groups:
            params = group["params"]
            # Noted before anything moves, so that an interrupt leaves nothing behind that restore() does not find.
            self._groups.append((params, list(params)))
            present: list[Tensor] = []
            for param in params:
                stand_in = self._stand_in(param, state)
                if isinstance(stand_in, Tensor):
                    self._swaps.append(Swap(param, stand_in, stand_in.grad, version_of(stand_in)))
                    if param in state:
                        state[stand_in] = state.pop(param)
                    present.append(stand_in)
                elif stand_in is None:
                    present.append(param)
            params[:] = present  # in place: LBFGS keeps the list

    @torch.no_grad()
    def _swap_out(self) -> None:
        swaps, self._swaps = self._swaps, []
        groups, self._groups = self._groups, []
        state, self._state = self._state, None
        for params, belonging in groups:
            params[:] = belonging
        for swap in swaps:
            if swap.stand_in in state:
                state[swap.param] = state.pop(swap.stand_in)
            if swap.grad is not None and swap.stand_in.grad is None:
                swap.param.grad = None  # the optimizer has cleared it
            swap.stand_in.grad = None
        if swaps:
            self._write_back(swaps)

    def _was_stepped(self, swap: Swap) -> bool:
        """Whether the optimizer may have changed a stand-in: it had a gradient, or was written to (LBFGS)."""
        return (self._stepping and swap.grad is not None) or version_of(swap.stand_in) != swap.version
