"""One hook per parameter notes that its gradient is ready, or tells the reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.slots import SlotTable

LARGE_BYTES = 256 * 1024
"""From this size on, gradients in the host's memory are packed as they come: autograd can use their memory again."""

HOOK_NAME = "GradientHooks.on_gradient"
"""The qualified name of every hook."""


def is_reducers_own(hook: object) -> bool:
    """Whether a post-accumulate-grad hook belongs to a reducer."""
    return getattr(hook, "__qualname__", None) == HOOK_NAME


def has_other_hooks(param: Tensor) -> bool:
    """Whether somebody has added a post-accumulate-grad hook to a parameter that has a reducer's."""
    # Private, but there is no public way to ask. Should it go, such hooks may find no gradient.
    return len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) > 1


class GradientHooks:
    """A post-accumulate-grad hook on each parameter that can have a gradient.

    Parameters share one function: autograd calls it for every parameter in every pass, and a function for each would
    not stay in the processor's caches. The hooks keep ``on_gradient`` and its owner alive until :meth:`remove`.

    Args:
        table: The parameters and their slots.
        buckets: The buckets.
        on_gradient: :meth:`Reducer.on_gradient`. Not called for gradients that only have to be noted.

    Attributes:
        removed: Whether the hooks were removed.
    """

    def __init__(self, table: SlotTable, buckets: Buckets, on_gradient: Callable[..., None]) -> None:
        self._buckets, self._on_gradient = buckets, on_gradient
        self.removed = False
        self._handles = []
        self._refs = []  # with them torch refuses to swap a parameter's content, as hooks would go with it
        hook, hook_of_large = self._hook(large=False), self._hook(large=True)
        for param in table.all_params:
            if not param.is_inference() and (param.is_floating_point() or param.is_complex()):
                self._refs.append(weakref.ref(param))
                trainable = param.requires_grad
                param.requires_grad_(True)  # torch refuses hooks on frozen parameters
                large = param.device.type == "cpu" and param.nbytes >= LARGE_BYTES
                self._handles.append(param.register_post_accumulate_grad_hook(hook_of_large if large else hook))
                param.requires_grad_(trainable)

    def _hook(self, large: bool) -> Callable[[Tensor], None]:
        """A hook for parameters whose gradients are large, or for those whose gradients are not."""
        buckets, noted, tell = self._buckets, self._buckets.noted, self._on_gradient

        def on_gradient(param: Tensor) -> None:
            if not buckets.enough:
                tell(param, False, large)
            else:
                noted.append(param)
                if large or len(noted) >= buckets.enough:
                    tell(param, True, large)

        on_gradient.__qualname__ = HOOK_NAME
        return on_gradient

    def remove(self) -> None:
        """Remove all hooks for good."""
        self.removed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._refs.clear()
