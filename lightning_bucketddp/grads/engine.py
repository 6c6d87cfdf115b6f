"""Private parts of autograd: a callback at the end of backward, and a search of the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge


class BackwardEnd:
    """A callback that the engine runs once, when the present backward has ended.

    If backward raises, the engine drops its callbacks without a call. This object notices that when it is deleted, so
    only the engine may hold it.

    Args:
        ended: Called at the end of backward.
        dropped: Called instead if backward raised.
    """

    __slots__ = ("_dropped", "_ended", "_queued")

    def __init__(self, ended: Callable[[], None], dropped: Callable[[], None]) -> None:
        self._ended = ended
        self._dropped = dropped
        self._queued = False

    def queue(self) -> None:
        """Queue this callback in the backward that runs in this thread.

        Raises:
            RuntimeError: If no backward is running.
        """
        # Private, but torch's own FSDP and DDP use it, and nothing public runs before backward() returns.
        torch.autograd.Variable._execution_engine.queue_callback(self)
        self._queued = True

    def __call__(self) -> None:
        """End the backward; called by the engine."""
        self._queued = False
        self._ended()

    def __del__(self) -> None:
        if self._queued:
            self._dropped()


def reachable_leaves(root: Tensor) -> set[int] | None:
    """The ids of the leaf tensors into which ``root.backward()`` will accumulate.

    Args:
        root: The loss.

    Returns:
        None if the graph contains a function written in Python. Such a function may run a backward of its own, as
        re-entrant checkpointing does, and the graph does not show its leaves.
    """
    leaves: set[int] = set()
    seen = set()
    stack = [get_gradient_edge(root).node] if root.requires_grad else []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return None
        if (variable := getattr(node, "variable", None)) is not None:  # only AccumulateGrad nodes have one
            leaves.add(id(variable))
        seen.add(node)
        stack += [successor for successor, _ in node.next_functions if successor is not None]
    return leaves
