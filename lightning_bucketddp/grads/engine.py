"""What this package needs of autograd's engine: a callback at the end of backward, and who will be reached."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle


class BackwardEnd:
    """Called once by the engine when the backward in which it was queued has ended.

    The engine drops its callbacks uncalled when backward raises; that is noticed here by the object's end of life.

    Args:
        ended: Called at the end of backward.
        dropped: Called instead when the engine gave the callback up.
    """

    __slots__ = ("_called", "_dropped", "_ended")

    def __init__(self, ended: Callable[[], None], dropped: Callable[[], None]) -> None:
        self._ended = ended
        self._dropped = dropped
        self._called = False

    def queue(self) -> None:
        """Queues this callback in the backward that is running in this thread.

        Raises:
            RuntimeError: If torch no longer has the engine's ``queue_callback``, or no backward is running.
        """
        # Private, but what torch's own FSDP and DDP use, and there is no public way to run something before
        # backward() returns. A test notices its removal.
        engine = getattr(torch.autograd.Variable, "_execution_engine", None)
        queue = getattr(engine, "queue_callback", None)
        if queue is None:
            self._called = True
            raise RuntimeError(
                f"torch {torch.__version__} has no autograd queue_callback, which lightning_bucketddp needs to finish "
                "a pass before backward() returns; use a torch version that this release names as supported"
            )
        try:
            queue(self)
        except BaseException:
            self._called = True
            raise

    def __call__(self) -> None:
        """What the engine calls."""
        self._called = True
        self._ended()

    def __del__(self) -> None:
        if not self._called:
            self._called = True
            self._dropped()


def hook_gradient(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle | None:
    """Hooks what autograd accumulates into a parameter, also one that is frozen now and may be unfrozen later.

    Returns:
        None for a parameter that can never have a gradient (integers, inference tensors).
    """
    if param.is_inference() or not (param.is_floating_point() or param.is_complex()):
        return None
    trainable = param.requires_grad
    param.requires_grad_(True)  # torch refuses hooks on a parameter that is frozen at the moment
    handle = param.register_post_accumulate_grad_hook(hook)
    param.requires_grad_(trainable)
    return handle


def reachable_leaves(root: Tensor) -> set[int] | None:
    """The ids of the leaf tensors into which ``root.backward()`` will accumulate, if the graph shows them all.

    Args:
        root: The loss.

    Returns:
        None if there is a function written in Python on the way: it may run a backward of its own, as re-entrant
        checkpointing does, whose leaves are not visible from outside.
    """
    if root.grad_fn is None:
        return {id(root)} if root.requires_grad else set()
    leaves: set[int] = set()
    seen = {root.grad_fn}
    stack = [root.grad_fn]
    while stack:
        node = stack.pop()
        if isinstance(node, BackwardCFunction):
            return None
        variable = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if variable is not None:
            leaves.add(id(variable))
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return leaves
