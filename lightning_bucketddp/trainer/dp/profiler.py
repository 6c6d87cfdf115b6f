"""Profilers in the steps of replicas: the first one's actions are recorded, as all of them start the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import nn


class _FirstReplicasProfiler:
    """Hands on what the first replica records; not a Profiler itself, which would close the other's file in the end."""

    def __init__(self, profiler: Profiler, is_first: Callable[[], bool]) -> None:
        self._profiler = profiler
        self._is_first = is_first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_profiler"], name)

    def start(self, action_name: str) -> None:
        if self._is_first():
            self._profiler.start(action_name)

    def stop(self, action_name: str) -> None:
        if self._is_first():
            self._profiler.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[str]:
        return self._profiler.profile(action_name) if self._is_first() else nullcontext(action_name)


@contextmanager
def first_replicas_profiler(trainer: Any, is_first: Callable[[], bool]) -> Iterator[None]:
    """Inside, the Trainer's profiler records what the first replica's thread does.

    Args:
        trainer: The Trainer.
        is_first: Whether the calling thread is the first replica's.
    """
    profiler = trainer.profiler
    trainer.profiler = _FirstReplicasProfiler(profiler, is_first)
    try:
        yield
    finally:
        trainer.profiler = profiler


def without_profilers(replica: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """What to put where in a replica, so that profilers that are its attributes record nothing."""
    namespace = vars(replica)
    return [(namespace, name, PassThroughProfiler()) for name, held in namespace.items() if isinstance(held, Profiler)]
