"""A dataloader that ends on all ranks together: a rank that runs out repeats its last batch."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

_END = object()
_NO_LENGTH = -1
_NOTHING, _REPEATS, _OWN, _PAUSES = range(4)
"""States of a rank: without any batch, repeating its last one, with a batch of its own, and with None for a batch."""
_STATES = 4


class EvenedLoader:
    """Repeats a rank's last batch for as long as another rank has batches.

    A repeated batch keeps the rank in step with the others, in the user's own collectives too. The caller makes sure
    that it does not count. Before each batch the ranks tell one another who has one.

    Args:
        loader: This rank's batches.
        exchange: Sends a number to the other ranks and returns all numbers by rank. All ranks must call it.
        rank: This rank.

    Attributes:
        started: Whether an iteration has begun.

    Raises:
        RuntimeError: While iterating, if a rank never had a batch, or has left the iteration and begun the next one.
    """

    def __init__(self, loader: Iterable[Any], exchange: Callable[[int], list[int]], rank: int) -> None:
        self._loader, self._exchange, self._rank = loader, exchange, rank
        self._last: Any = None
        self._iteration = -1
        self.started = False
        self._active: deque[tuple[int, ...]] = deque()
        for name in ("state_dict", "load_state_dict"):  # Lightning looks for these without __getattr__
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))
        try:
            length = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = _NO_LENGTH
        self._lengths = exchange(length)

    def __len__(self) -> int:
        """The number of batches on the rank that has most. There is none unless all ranks' loaders have a length."""
        if _NO_LENGTH in self._lengths:
            raise TypeError(f"the dataloader has no length on rank {self._lengths.index(_NO_LENGTH)}")
        return max(self._lengths)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, then the last one until all ranks have run out."""
        self._active.clear()
        self.started = True
        self._iteration += 1
        return self._evened(iter(self._loader))  # begins now: a DataLoader draws a random number

    def _evened(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            batch = next(batches, _END)
            state = self._state_of(batch)
            states = self._tell(state)
            active = tuple(rank for rank, its_state in enumerate(states) if its_state == _OWN)
            if active:
                self._require_batches(state, states)
                if state == _OWN:
                    self._last = _copied(batch)
                else:
                    batch = _copied(self._last)
            elif _PAUSES in states:
                active, batch = tuple(range(len(states))), None  # Lightning skips None; let all ranks skip
            else:
                return
            self._active.append(active)
            yield batch

    def _state_of(self, batch: Any) -> int:
        if batch is _END:
            return _NOTHING if self._last is None else _REPEATS
        return _PAUSES if batch is None else _OWN

    def _tell(self, state: int) -> list[int]:
        """Exchange states. Each travels with the number of the iteration that its rank is in."""
        told = [divmod(value, _STATES) for value in self._exchange(self._iteration * _STATES + state)]
        iterations = [iteration for iteration, _ in told]
        if min(iterations) < max(iterations):
            raise RuntimeError(
                f"rank {self._rank}: expected all ranks to leave an epoch after the same batch, found rank "
                f"{iterations.index(max(iterations))} in the next one and rank {iterations.index(min(iterations))} "
                "waiting for another batch; look for code that ends an epoch on some ranks only"
            )
        return [state for _, state in told]

    def _require_batches(self, state: int, states: list[int]) -> None:
        """Require that each rank has a batch to train on: its own, or one to repeat."""
        if _NOTHING in states:
            raise RuntimeError(
                f"rank {self._rank}: expected at least one training batch on each rank, found none on rank "
                f"{states.index(_NOTHING)}, which has no batch to repeat; give each rank some data"
            )
        if state == _PAUSES and self._last is None:
            raise RuntimeError(
                f"rank {self._rank}: expected a first batch, as another rank has one, found None; with uneven_inputs a "
                "rank without a batch repeats its last one, which this rank does not have yet"
            )

    def take(self) -> tuple[int, ...]:
        """Return the ranks for which the next batch is their own. Call it when that batch is about to be trained on."""
        return self._active.popleft()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._loader, name)  # sampler, batch_sampler, dataset, ...


def _copied(batch: Any) -> Any:
    # Hooks may pop and replace a batch's entries; the repeated batch must have them again.
    return copy.copy(batch) if isinstance(batch, MutableMapping | MutableSequence) else batch


def require_countable_batches(module: pl.LightningModule, earlier: EvenedLoader | None) -> None:
    """Require that the strategy knows which batches ``training_step`` trains on.

    Args:
        module: The LightningModule.
        earlier: The last dataloader that was evened; None for the first.

    Raises:
        ValueError: If ``training_step`` takes the batches itself, or there are several dataloaders at once.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "expected a training_step that gets a batch, as uneven_inputs is given; found one that takes batches from "
            "`dataloader_iter`, which hides which of them count. Use training_step(self, batch, batch_idx)"
        )
    if earlier is not None and not earlier.started:
        raise ValueError(
            "expected one training dataloader, as uneven_inputs is given; found several. Combine them in one dataset"
        )
