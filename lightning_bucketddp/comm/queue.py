"""The wrapper queue: which of several wrappers on one process group may launch."""

from __future__ import annotations

import weakref

import torch.distributed as dist

_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, None]] = weakref.WeakKeyDictionary()


class WrapperQueue:
    """The wrappers whose passes are open in one backward, in the order in which the passes will end.

    Backward reaches wrappers' outputs, and the engine ends their passes, in an order that the program decides. When
    gradients are ready depends on what this rank uses. Only the pass that ends first may therefore launch early: the
    collectives of different wrappers would otherwise come in another order on other ranks.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._queue = _queues.setdefault(group, {})

    def line_up(self, who: object) -> None:
        """Note that a synchronised pass of ``who`` has begun."""
        self._queue.setdefault(who)

    def is_first(self, who: object) -> bool:
        """Whether no pass of another will end before that of ``who``."""
        return next(iter(self._queue), who) is who

    def leave(self, who: object) -> None:
        """Note that the pass of ``who`` has ended, if there was one."""
        self._queue.pop(who, None)
