"""Which parameters tell that their gradient has come: all of them, or some, from which the rest can be seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.engine import hook_gradient


class GradientHooks:
    """Post-accumulate-grad hooks on parameters.

    They keep alive whom they inform, so whoever drops that one removes them.

    Args:
        params: The parameters.
        make_hook: Makes the hook of the parameter at an index.

    Attributes:
        everywhere: Whether every parameter is hooked.
        removed: Whether the hooks were removed, for good.
    """

    def __init__(self, params: Sequence[Tensor], make_hook: Callable[[int], Callable[[Tensor], None]]) -> None:
        self._params = params
        self._make_hook = make_hook
        self._handles: dict[int, RemovableHandle] = {}
        self.everywhere = self.removed = False
        self.hook_all()

    def hook_all(self) -> None:
        """Hooks every parameter; at once, also in the middle of a backward."""
        if not self.everywhere:
            self._hook(range(len(self._params)))
            self.everywhere = True

    def hook_only(self, indices: Collection[int]) -> None:
        """Hooks these parameters and no others."""
        for index in [index for index in self._handles if index not in indices]:
            self._handles.pop(index).remove()
            unhook(self._params[index])
        self._hook(indices)
        self.everywhere = False

    def _hook(self, indices: Collection[int]) -> None:
        for index in indices:
            if index not in self._handles:
                handle = hook_gradient(self._params[index], self._make_hook(index))
                if handle is not None:
                    self._handles[index] = handle

    def remove(self) -> None:
        """Removes all hooks, for good."""
        self.removed = True
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.everywhere = False


def unhook(param: Tensor) -> None:
    """Has autograd forget that a parameter was hooked, if nobody else has hooked it.

    A dictionary of hooks costs as much when it is empty: the engine takes the interpreter's lock to look into it.
    """
    # Private, and there is no public way; without it everything works, only as slowly as before. A test notices its
    # removal.
    if getattr(param, "_post_accumulate_grad_hooks", None) == {}:
        param._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def hooks_can_be_forgotten() -> bool:
    """Whether :func:`unhook` works with this version of torch."""
    param = torch.zeros(1, requires_grad=True)
    param.register_post_accumulate_grad_hook(lambda _: None).remove()
    unhook(param)
    return getattr(param, "_post_accumulate_grad_hooks", ()) is None
