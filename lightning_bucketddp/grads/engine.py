"""Private parts of autograd: a callback at the end of backward, and whether backward accumulates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch._dynamo import compiled_autograd


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
            RuntimeError: If no backward is running, or it is a compiled one, or torch lacks ``queue_callback``.
        """
        if getattr(compiled_autograd, "in_compiled_autograd_region", False):  # private; nothing public tells
            raise RuntimeError(
                "expected a backward that is not compiled, found one with torch._dynamo.config.compiled_autograd=True, "
                "which drops the gradients of a BucketDDP; set it to False"
            )
        # Private, but torch's own FSDP and DDP use it, and nothing public runs before backward() returns.
        engine = torch.autograd.Variable._execution_engine
        if not hasattr(engine, "queue_callback"):
            raise RuntimeError(
                f"expected queue_callback() of autograd's engine, found none in torch {torch.__version__}; use a "
                "version of torch that this release supports"
            )
        engine.queue_callback(self)
        self._queued = True

    def __call__(self) -> None:
        """End the backward; called by the engine."""
        self._queued = False
        self._ended()

    def __del__(self) -> None:
        if self._queued:
            self._dropped()


def accumulates() -> bool:
    """Whether the backward that runs in this thread adds to ``.grad`` of leaves; ``torch.autograd.grad`` does not.

    Called in a hook of a tensor: looks at the leaves behind it. Whatever functions written in Python hide, a backward
    that accumulates shows it: some leaf made their outputs require grad.
    """
    # Private, but torch's own checkpointing and multi-grad hooks use them. Without them each backward counts.
    current = getattr(torch._C, "_current_autograd_node", lambda: None)()
    executes = getattr(torch._C, "_will_engine_execute_node", None)
    if current is None or executes is None:
        return True
    seen, stack = set[Any](), [current]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                with suppress(RuntimeError):  # autograd.grad is asked for this leaf
                    if executes(node):
                        return True
            stack += [successor for successor, _ in node.next_functions if successor is not None]
    return False
