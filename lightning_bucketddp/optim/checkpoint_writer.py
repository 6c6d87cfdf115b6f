"""A thread that writes sharded checkpoints while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from lightning_bucketddp.comm.devices import use_in_this_thread
from lightning_bucketddp.comm.groups import abort
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase

_log = logging.getLogger("lightning_bucketddp")


class CheckpointWriter:
    """Writes checkpoints and removes old ones in a thread, in the order of the calls.

    All ranks must make it, and call :meth:`begin`, :meth:`save` and :meth:`settle` alike. The thread's collectives have
    a gloo group of their own, so that they do not mix with those of training.

    torch's ``async_save`` does not do: each call has a thread of its own, where nothing can follow the writing, as the
    checkpoint's name and the removal of old ones do here. And a rank that cannot copy its values leaves the others'
    threads waiting.

    Args:
        ranks: The ranks.

    Attributes:
        group: The thread's group.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, collectives, what = ranks, ranks.collectives, "the process group of checkpoints"
        ranks.objects(None, what)  # torch makes a group without hearing that another rank has failed
        self.group = collectives.split([range(ranks.world_size)], backend="gloo").group
        ranks.objects(None, what)  # a thread that fails aborts the group; other ranks have connected by then
        device = (collectives.device,)  # for whose copies it waits
        self._thread = ThreadPoolExecutor(1, "bucketddp-checkpoint-writer", use_in_this_thread, device)
        self._step = -1
        self._paths: list[Path] = []
        self._tasks: list[Future[None]] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a strategy writes nothing

    def begin(self, path: Path, step: int) -> None:
        """Wait until a checkpoint may be saved: until those of earlier steps are there, and those of the same name.

        Args:
            path: Its path.
            step: How many steps were made. A checkpoint of the same step as the last one need not wait for it.

        Raises:
            Exception: As :meth:`settle`.
        """
        if step != self._step or path in self._paths:
            self.settle()
        self._step = step

    def save(self, path: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint in the thread.

        Args:
            path: Its path.
            write: Writes it, with collectives in :attr:`group`.
        """
        self._paths.append(path)
        self._start(write)

    def is_writing(self, path: Path) -> bool:
        """Whether a checkpoint of that name may not be there yet; the same on every rank."""
        return path in self._paths

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove an old checkpoint as soon as all are there that were saved before this call; not if one has failed."""
        before = tuple(self._tasks)
        self._start(lambda: None if any(task.exception() for task in before) else remove())

    def _start(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except CheckpointException:  # torch raises it on every rank
                raise
            except BaseException:
                abort(self.group)  # the others' threads may wait for this one
                raise

        self._tasks.append(self._thread.submit(run))

    def settle(self) -> None:
        """Wait until all checkpoints are there.

        Raises:
            Exception: On all ranks, if one could not be written; says where and why.
        """
        if not self._paths:
            return
        what, tasks = f"saving to {', '.join(map(str, self._paths))}", self._tasks
        self._paths, self._tasks = [], []

        def await_thread() -> None:
            with self._ranks.peers.here.waiting("checkpoints that are being written", Phase.RUNS):
                for task in tasks:
                    task.result()

        self._ranks.together(what, await_thread)

    def end(self) -> None:
        """Wait for what this rank writes, whatever the other ranks do. Log what has failed, and end the thread."""
        self._thread.shutdown()
        for error in filter(None, (task.exception() for task in self._tasks)):
            what = ", ".join(map(str, self._paths))
            _log.error("rank %d: saving to %s failed: %s", self._ranks.rank, what, error)
