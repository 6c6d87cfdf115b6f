"""A thread that writes sharded checkpoints while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import use_in_this_thread
from lightning_bucketddp.comm.groups import abort

_log = logging.getLogger("lightning_bucketddp")

_SAME_ON_ALL_RANKS = (ValueError, TypeError, FileExistsError, RuntimeError)
"""Errors that all ranks raise in the class that one rank raised. Other errors become a RuntimeError."""


def together(collectives: Collectives, what: str, run: Callable[[], Any]) -> Any:
    """Call ``run`` on every rank; if it raises on some, raise on all.

    Args:
        collectives: The ranks. All must call this.
        what: What ``run`` does, for the error.
        run: Returns this function's result.

    Raises:
        Exception: One of the errors that callers expect, with the first rank's text.
        RuntimeError: If it was any other error.
    """
    problem: BaseException | None = None
    try:
        result = run()
    except CheckpointException as error:  # torch raises it on every rank
        problem, _ = error.failures.get(collectives.rank, (None, None))
    except Exception as error:
        problem = error
    kept = next((kind for kind in _SAME_ON_ALL_RANKS if isinstance(problem, kind)), None)
    other = None if problem is None else (RuntimeError, f"{type(problem).__name__}: {problem}")
    mine = other if kept is None else (kept, str(problem))  # not the error itself, which may not be picklable
    failed = {rank: found for rank, found in enumerate(collectives.exchange_objects(mine)) if found is not None}
    if failed:
        kind, message = next(iter(failed.values()))
        raise kind(f"{what} failed on rank {', '.join(map(str, failed))}: {message}") from problem
    return result


class CheckpointWriter:
    """Writes checkpoints and removes old ones in a thread, in the order of the calls.

    All ranks must make it, and call :meth:`begin`, :meth:`save` and :meth:`settle` alike. The thread's collectives have
    a gloo group of their own, so that they do not mix with those of training.

    torch's ``async_save`` does not do: each call has a thread of its own, where nothing can follow the writing, as the
    checkpoint's name and the removal of old ones do here. And a rank that cannot copy its values leaves the others'
    threads waiting.

    Args:
        collectives: The ranks.

    Attributes:
        group: The thread's group.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        collectives.exchange_objects(None)  # torch makes a group without hearing that another rank has failed
        self.group = collectives.split([range(collectives.world_size)], backend="gloo").group
        collectives.exchange_objects(None)  # a thread that fails aborts the group; other ranks have connected by then
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
        together(self._collectives, what, lambda: [task.result() for task in tasks])

    def end(self) -> None:
        """Wait for what this rank writes, whatever the other ranks do. Log what has failed, and end the thread."""
        self._thread.shutdown()
        for error in filter(None, (task.exception() for task in self._tasks)):
            what = ", ".join(map(str, self._paths))
            _log.error("rank %d: saving to %s failed: %s", self._collectives.rank, what, error)
