"""One hook per parameter records that its gradient is ready."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.lane import Streams, current_stream
from lightning_bucketddp.reducer.reducer import Reducer

HOOK_NAME = "GradientHooks.on_gradient"
"""The qualified name of every hook."""


def is_reducers_own(hook: object) -> bool:
    """Whether a post-accumulate-grad hook belongs to a reducer."""
    return getattr(hook, "__qualname__", None) == HOOK_NAME


class GradientHooks:
    """A post-accumulate-grad hook on each parameter that can have a gradient.

    The parameters of a device share one function: autograd calls it for every parameter in every pass, and a function
    for each would not stay in the processor's caches. The hooks keep what they call alive until :meth:`remove`.

    ``module.to()`` swaps the content of quantised weights, and of others that are no plain tensors: with a hook on them
    it would raise. While they are frozen they have none.

    Args:
        reducer: Notified of gradients in an open pass.
        open_pass: Called with the first parameter that gets a gradient while no pass is open.
        streams: The streams on which accelerators make gradients.
    """

    def __init__(self, reducer: Reducer, open_pass: Callable[[Tensor], None], streams: Streams) -> None:
        self._handles: list[RemovableHandle] = []
        # With them torch refuses to swap a parameter's content, as hooks would go with it.
        self._refs: list[weakref.ref[Tensor]] = []
        self._without_hook: list[Tensor] = []  # frozen, and their content may be swapped

        def hook_on(index: int | None) -> Callable[[Tensor], None]:
            """The hook of the device at ``index``; None for the CPU."""

            def on_gradient(param: Tensor) -> None:
                if index is not None:
                    streams.seen.add(current_stream(index))
                this_pass = reducer.this_pass
                if this_pass is None:
                    open_pass(param)
                    return
                this_pass.recorded.append(param)
                if len(this_pass.recorded) >= this_pass.notify_after:
                    reducer.gradients_recorded(param)

            on_gradient.__qualname__ = HOOK_NAME
            return on_gradient

        self._hook_on = cache(hook_on)
        for param in reducer.table.all_params:
            if not param.is_inference() and (param.is_floating_point() or param.is_complex()):
                if param.requires_grad or not _may_be_swapped(param):
                    self._add(param)
                else:
                    self._without_hook.append(param)

    def _add(self, param: Tensor) -> None:
        self._refs.append(weakref.ref(param))
        trainable = param.requires_grad
        param.requires_grad_(True)  # torch refuses hooks on frozen parameters
        self._handles.append(param.register_post_accumulate_grad_hook(self._hook_on(_index_of(param))))
        param.requires_grad_(trainable)

    def add_unfrozen(self) -> None:
        """Add the hooks of parameters that had none while they were frozen. Before their first gradient."""
        if any(param.requires_grad for param in self._without_hook):
            before, self._without_hook = self._without_hook, []
            for param in before:
                if param.requires_grad:
                    self._add(param)
                else:
                    self._without_hook.append(param)

    def remove(self) -> None:
        """Remove all hooks for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._refs.clear()
        self._without_hook.clear()


def _index_of(param: Tensor) -> int | None:
    """The index of an accelerator's device; None for the CPU."""
    return None if param.is_cpu else max(param.get_device(), 0)


def _may_be_swapped(param: Tensor) -> bool:
    """Whether ``module.to()`` may swap a parameter's content, instead of setting ``param.data``."""
    wraps_tensors = hasattr(param, "__tensor_flatten__")  # torch's protocol for subclasses that do
    return wraps_tensors or torch.__future__.get_swap_module_params_on_conversion()
