"""Whose turn it is to send, where several wrappers share a process group in one backward."""

from __future__ import annotations

import weakref

import torch.distributed as dist

_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, list[object]] = weakref.WeakKeyDictionary()


class Turns:
    """The passes of one process group that have begun, in the order in which they will end.

    Backward reaches wrappers' outputs, and the engine ends their passes, in an order that the program decides; when
    their gradients arrive depends on what this rank uses. Only the pass that ends first may therefore launch early: the
    collectives of different wrappers would otherwise come in another order on other ranks.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._queue = _queues.setdefault(group, [])

    def line_up(self) -> None:
        """A synchronised pass of this wrapper has begun."""
        if not any(other is self for other in self._queue):
            self._queue.append(self)

    def is_first(self) -> bool:
        """Whether no pass of another wrapper will end before this one's."""
        return not self._queue or self._queue[0] is self

    def leave(self) -> None:
        """The pass of this wrapper has ended, if there was one."""
        self._queue[:] = [other for other in self._queue if other is not self]
