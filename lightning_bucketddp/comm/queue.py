"""The wrapper queue: which of several wrappers on one process group may launch."""

from __future__ import annotations

import weakref

import torch.distributed as dist

_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[WrapperQueue, None]] = weakref.WeakKeyDictionary()


class WrapperQueue:
    """One wrapper's place among the wrappers that have a pass open in one backward. The pass that ends first is first.

    The program decides the order in which backward reaches wrappers' outputs and the engine ends their passes. It does
    not decide when gradients are ready. So only the pass that ends first may launch early. Otherwise the collectives
    of different wrappers would come in another order on other ranks.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._queue = _queues.setdefault(group, {})

    def line_up(self) -> None:
        """Note that a synchronised pass of this wrapper has begun."""
        self._queue.setdefault(self)

    def is_first(self) -> bool:
        """Whether no pass of another wrapper will end before this one's."""
        return next(iter(self._queue), self) is self

    def leave(self) -> None:
        """Note that the pass of this wrapper has ended, if there was one."""
        self._queue.pop(self, None)
