"""One hook per parameter tells the reducer that a gradient is ready."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.engine import hook_gradient
from lightning_bucketddp.grads.slots import SlotTable

HOOK_NAME = "GradientHooks.on_gradient"
"""The qualified name of every hook."""


def is_reducers_own(hook: object) -> bool:
    """Whether a post-accumulate-grad hook is a reducer's."""
    return getattr(hook, "__qualname__", None) == HOOK_NAME


class GradientHooks:
    """A post-accumulate-grad hook on each parameter.

    They keep ``on_gradient`` and its owner alive, so the owner's owner removes them.

    Args:
        table: The parameters and their slots.
        buckets: The buckets.
        on_gradient: Called with a parameter's index and the parameter when its gradient is ready, unless only marking
            it was left to do.

    Attributes:
        removed: Whether the hooks were removed, for good.
    """

    def __init__(self, table: SlotTable, buckets: Buckets, on_gradient: Callable[[int, Tensor], None]) -> None:
        self._slot_of, self._buckets, self._on_gradient = table.slot_of_index, buckets, on_gradient
        handles = [hook_gradient(param, self._hook(index)) for index, param in enumerate(table.all_params)]
        self._handles = [handle for handle in handles if handle is not None]
        self.removed = False

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        """The hook of the parameter at ``index``.

        Autograd calls it for every parameter in every pass. It marks gradients itself, as each further call of a
        Python function costs as much again.
        """
        slot_of, buckets, tell = self._slot_of, self._buckets, self._on_gradient

        def on_gradient(param: Tensor) -> None:
            slot = slot_of.get(index)
            if slot in buckets.settled or not param.requires_grad:
                return  # or frozen since forward: autograd calls the hook and accumulates nothing
            if buckets.marks_only and slot is not None:
                bucket = buckets.of_slot[slot]
                if not bucket.launched:
                    buckets.pending.add(slot)
                    bucket.missing.discard(slot)
                    if bucket.missing:
                        return
            tell(index, param)

        on_gradient.__qualname__ = HOOK_NAME
        return on_gradient

    def remove(self) -> None:
        """Remove all hooks, for good."""
        self.removed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
