"""How parameters tell that their gradient has come: each with a line of Python, or with none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.grads.engine import hook_gradient

HOOK_NAME = "Reducer.on_gradient"
"""The qualified name of the hook of one parameter."""


class SharedHook(partial):  # type: ignore[type-arg]
    """One callable on many parameters, of which it is told elsewhere what a call does."""


def is_reducers_own(hook: object) -> bool:
    """Whether a post-accumulate-grad hook is a reducer's."""
    return isinstance(hook, SharedHook) or getattr(hook, "__qualname__", None) == HOOK_NAME


class Arrivals:
    """The gradients that have come, kept in a list until somebody looks.

    The engine then calls the list's ``append``, which takes half the time of the shortest function in Python.

    Args:
        told: Called with the parameter where gradients are not kept.

    Attributes:
        hook: The hook of every parameter that nobody waits for in particular.
    """

    def __init__(self, told: Callable[[Tensor], None]) -> None:
        self._told = told
        self._came: list[Tensor] = []
        self.hook = SharedHook(told)

    def keep(self) -> None:
        """From now on gradients are kept."""
        self.hook.__setstate__((self._came.append, (), {}, {}))  # type: ignore[attr-defined]

    def tell(self) -> None:
        """From now on somebody is told of each. What was kept is forgotten."""
        self.hook.__setstate__((self._told, (), {}, {}))  # type: ignore[attr-defined]
        self._came.clear()

    def take(self) -> list[Tensor]:
        """The parameters whose gradients have come since the last time, in order."""
        came = self._came[:]
        self._came.clear()
        return came


class GradientHooks:
    """Post-accumulate-grad hooks on parameters.

    They keep alive whom they inform, so whoever drops that one removes them.

    Args:
        params: The parameters.
        make_hook: Makes the own hook of the parameter at an index.
        shared: The hook of those that have none of their own.

    Attributes:
        everywhere: Whether every parameter has a hook of its own.
        removed: Whether the hooks were removed, for good.
    """

    def __init__(
        self, params: Sequence[Tensor], make_hook: Callable[[int], Callable[[Tensor], None]], shared: SharedHook
    ) -> None:
        self._params = params
        self._make_hook = make_hook
        self._shared = shared
        self._handles: dict[int, RemovableHandle] = {}
        self._own: set[int] = set()
        self.everywhere = self.removed = False
        self.hook_all()

    def hook_all(self) -> None:
        """Gives every parameter a hook of its own; also in the middle of a backward."""
        self.hook_only(range(len(self._params)))
        self.everywhere = True

    def hook_only(self, indices: Collection[int]) -> None:
        """Gives these parameters hooks of their own, and the others the shared one."""
        for index, param in enumerate(self._params):
            own = index in indices
            if index in self._handles:
                if own == (index in self._own):
                    continue
                self._handles.pop(index).remove()
            handle = hook_gradient(param, self._make_hook(index) if own else self._shared)
            if handle is not None:
                self._handles[index] = handle
        self._own = set(indices)
        self.everywhere = False

    def __len__(self) -> int:
        return len(self._own & self._handles.keys())

    def remove(self) -> None:
        """Removes all hooks, for good."""
        self.removed = True
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.everywhere = False
