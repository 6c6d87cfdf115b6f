"""A loader that ends on all ranks together: a rank that runs out of batches goes on with its last one."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

_ENDED = object()
_NO_LENGTH = -1
_NOTHING, _AGAIN, _OWN, _PAUSE = range(4)
_STATES = 4


class EvenedLoader:
    """Repeats a rank's last batch for as long as another rank has batches.

    A repeated batch keeps the rank in step with the others, collectives of the user's own included; whoever trains on
    it sees to it that it does not count. The ranks tell each other before each batch who has one.

    Args:
        loader: This rank's batches. Sized on all ranks or on none.
        exchange: Tells the other ranks a number and returns everybody's, by rank; all ranks must call it.
        rank: This rank.

    Attributes:
        started: Whether anybody has asked for batches.

    Raises:
        RuntimeError: On every rank, if only some of the loaders have a length, or while iterating, if a rank that has
            never had a batch has none, or if a rank has left the iteration and begun the next one.
    """

    def __init__(self, loader: Iterable[Any], exchange: Callable[[int], list[int]], rank: int) -> None:
        self._loader = loader
        self._exchange = exchange
        self._rank = rank
        self._last: Any = None
        self._begun = -1
        self.started = False
        self._active: deque[tuple[int, ...]] = deque()
        try:
            length = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = _NO_LENGTH
        lengths = exchange(length)
        without = [other for other, length in enumerate(lengths) if length == _NO_LENGTH]
        if without and len(without) < len(lengths):
            raise RuntimeError(
                f"rank {rank}: expected training dataloaders that have a length on all ranks or on none, found none "
                f"on ranks {without}"
            )
        self._length = None if without else max(lengths)

    def __len__(self) -> int:
        """The number of batches of the rank that has most."""
        if self._length is None:
            raise TypeError("the dataloader has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, and the last one again until all ranks have run out, or where this one's is None."""
        self._active.clear()
        self.started = True
        self._begun += 1
        iterator = iter(self._loader)
        while True:
            batch = next(iterator, _ENDED)
            ended = _NOTHING if self._last is None else _AGAIN
            state = ended if batch is _ENDED else _PAUSE if batch is None else _OWN
            states = self._tell(state)
            active = tuple(rank for rank, its_state in enumerate(states) if its_state == _OWN)
            if not active and _PAUSE in states:  # Lightning passes over None, on all ranks then
                self._active.append(tuple(range(len(states))))
                yield None
                continue
            if not active:
                return
            if _NOTHING in states:
                raise RuntimeError(
                    f"rank {self._rank}: expected at least one training batch on each rank, found none on rank "
                    f"{states.index(_NOTHING)}; with uneven_inputs a rank that runs out goes on with its last batch"
                )
            if state == _OWN:
                self._last = _copied(batch)
            elif self._last is None:
                raise RuntimeError(
                    f"rank {self._rank}: expected a batch where another rank has its first one, found None; with "
                    "uneven_inputs a rank that has none goes on with its last batch"
                )
            else:
                batch = _copied(self._last)
            self._active.append(active)
            yield batch

    def _tell(self, state: int) -> list[int]:
        """Every rank's state; they are told together with the iteration that a rank is in."""
        told = [divmod(value, _STATES) for value in self._exchange(self._begun * _STATES + state)]
        iterations = [iteration for iteration, _ in told]
        if min(iterations) < max(iterations):
            raise RuntimeError(
                f"rank {self._rank}: expected all ranks to leave an epoch after the same batch, found rank "
                f"{iterations.index(max(iterations))} in the next one and rank {iterations.index(min(iterations))} "
                "waiting for another batch; look for what ends an epoch on some ranks only"
            )
        return [state for _, state in told]

    def take(self) -> tuple[int, ...]:
        """Called as the next batch is about to be trained on, which may be later than it was handed out.

        Returns:
            The ranks for which it is a batch of their own.
        """
        return self._active.popleft()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._loader, name)  # sampler, batch_sampler, dataset, ...


def _copied(batch: Any) -> Any:
    # Hooks may pop and replace what is in a batch, and are to find it when the batch comes again.
    return copy.copy(batch) if isinstance(batch, MutableMapping | MutableSequence) else batch


class StatefulEvenedLoader(EvenedLoader):
    """Of a loader that can be resumed in the middle of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's."""
        state: dict[str, Any] = self._loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the loader's."""
        self._loader.load_state_dict(state_dict)  # type: ignore[attr-defined]


def evened(loader: Iterable[Any], exchange: Callable[[int], list[int]], rank: int) -> EvenedLoader:
    """The loader as one that ends on all ranks together; see :class:`EvenedLoader`."""
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulEvenedLoader if is_stateful else EvenedLoader)(loader, exchange, rank)


def evened_for_training(
    loader: Any,
    module: pl.LightningModule,
    before: EvenedLoader | None,
    exchange: Callable[[int], list[int]],
    rank: int,
) -> EvenedLoader:
    """A Trainer's training dataloader as one that ends on all ranks together.

    Args:
        loader: The dataloader.
        module: The LightningModule that is trained.
        before: What this gave for the dataloader before, if there was one.
        exchange: As for :class:`EvenedLoader`.
        rank: This rank.

    Raises:
        ValueError: If nobody would know which batches count: ``training_step`` takes them itself, or there are several
            dataloaders at once.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "expected a training_step that gets batches where uneven_inputs is given, found one that takes them from "
            "`dataloader_iter`, so that nobody knows which of them count"
        )
    if before is not None and not before.started:
        raise ValueError(
            "expected one training dataloader where uneven_inputs is given, found several; combine them in one dataset"
        )
    return evened(loader, exchange, rank)
