"""The batches of a dataloader's sampler, which can be taken from the middle of an epoch on.

The ranks together take the samples of an epoch in one order. Batch by batch they have taken a prefix of it, so that one
number says what is left. It does not depend on the number of ranks::

    order of the epoch        7 2 | 5 0 | 3 6 | 1 4      2 ranks, batch_size=1
    taken = 4                         ^ 3 6 1 4 are left: rank 0 takes 3 1, rank 1 takes 6 4
    the same on 3 ranks                 3 6 1 | 4 7 2: 7 and 2 are taken once more, so that all ranks have a batch
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_bucketddp.trainer.random_state import random_state, seed_generators


class ResumableBatches:
    """Stands in the place of a dataloader's batch sampler.

    Data loading workers seed their generators for each batch by its place in the epoch, so that it does not matter
    which worker loads it, nor how far ahead.

    Args:
        loader: A dataloader of samples by index, with a batch sampler.
        rank: This rank.
        world_size: The number of ranks.
        epoch: Returns the epoch.

    Attributes:
        batches: The user's, or Lightning's, batch sampler.
        sampler: The sampler in it.
        batch_size: Of each batch but the last; None if that is not known.
    """

    def __init__(self, loader: Any, rank: int, world_size: int, epoch: Callable[[], int]) -> None:
        self.batches = loader.batch_sampler
        self.sampler = getattr(self.batches, "sampler", self.batches)
        self.batch_size: Any = getattr(self.batches, "batch_size", None)
        self._rank, self._world_size, self._epoch = rank, world_size, epoch
        globally = partial(random_state, torch.device("cpu"))
        self._sources: list[Any] = [(globally, globally)]  # get and set the states on which an epoch's order depends
        found = dict.fromkeys(getattr(each, "generator", None) for each in (loader, self.sampler, self.batches))
        self._sources += [(each.get_state, each.set_state) for each in found if isinstance(each, torch.Generator)]
        if has_state(self.sampler):
            self._sources.append((self.sampler.state_dict, self.sampler.load_state_dict))
        self._began, self._seed = list[Any](), 0  # of this epoch: those states, and the seed of workers
        self._offset = 0  # samples that all ranks have taken, less those of the epoch's batches as they are now
        self._resumes: tuple[int, int, int] | None = None  # an epoch; samples and batches to pass over

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["batches"], name)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_ordered(self) -> bool:
        """Whether the order of an epoch is known for any number of ranks."""
        of_all = type(self.sampler) is DistributedSampler and self.sampler.num_replicas == self._world_size
        return of_all and type(self.batches) is BatchSampler

    @property
    def says_its_order(self) -> bool:
        """Whether the sampler is a library's, or says where it is, or follows the epoch."""
        library = type(self.sampler).__module__.startswith(("torch", "lightning", "pytorch_lightning"))
        return library or has_state(self.sampler) or hasattr(self.sampler, "set_epoch")

    def state(self, batches: int | None) -> dict[str, Any]:
        """Where this epoch is, for checkpoints.

        Args:
            batches: How many batches of the epoch have been trained; None if it has ended.
        """
        taken = self._offset + (batches or 0) * self.batch_size * self._world_size if self.is_ordered else 0
        place = {"ordered": self.is_ordered, "taken": taken, "batch_size": self.batch_size, "workers_seed": self._seed}
        states = self._states() if batches is None else self._began
        return {**place, "seed": getattr(self.sampler, "seed", 0), "states": states}

    def resume(self, state: dict[str, Any], batches: int | None) -> int:
        """Begin the next iteration where an epoch was.

        Args:
            state: Where it was.
            batches: How many batches had been trained; None if it had ended.

        Returns:
            How many batches of this epoch count as trained.

        Raises:
            ValueError: If batches have another size, and the order of all ranks is not known.
        """
        self._began, self._seed = state["states"], state["workers_seed"]
        if self.is_ordered:
            self.sampler.seed = state["seed"]
        if batches is None:
            self._set_states(self._began)
            return 0
        if self.is_ordered:
            batches = len(self.batches) - len(self._left(state["taken"]))
            self._offset = state["taken"] - batches * self.batch_size * self._world_size
        elif self.batch_size != state["batch_size"]:
            raise ValueError(
                f"expected batches of {state['batch_size']} samples, as when the checkpoint was saved, found "
                f"{self.batch_size}: only with the Trainer's sampler may the size change in the middle of an epoch"
            )
        self._resumes = self._epoch(), state["taken"], batches
        return batches

    def count_repeated(self, taken: int) -> int:
        """How many of the samples that are left are taken twice, as the ranks have equally many."""
        return 0 if self.sampler.drop_last else -max(len(self.sampler.dataset) - taken, 0) % self._world_size

    def _left(self, taken: int) -> BatchSampler:
        """The batches of an ordered epoch that are left for this rank."""
        alone = copy(self.sampler)
        alone.num_replicas, alone.rank, alone.num_samples = 1, 0, len(alone.dataset)
        alone.total_size = alone.num_samples
        order = list(alone)
        left = order[taken:]
        if alone.drop_last:
            left = left[: len(left) - len(left) % self._world_size]
        else:
            left += islice(cycle(order), self.count_repeated(taken))
        return BatchSampler(left[self._rank :: self._world_size], self.batch_size, self.batches.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        # All of this when the first batch is asked for: then samplers draw, and a DataLoader may make more iterators.
        (epoch, at, batches), self._resumes = self._resumes or (-1, 0, 0), None  # at: samples of all ranks before
        if epoch != self._epoch():
            self._offset = at = 0
            # A copy draws: random numbers are those of a run without the option.
            self._seed = int(torch.randint(2**62, (), generator=torch.default_generator.clone_state()))
            self._began = self._states()
            entries = iter(self.batches)
        elif self.is_ordered:
            entries = iter(self._left(at))
        else:
            with isolate_rng(include_cuda=False):
                self._set_states(self._began)
                entries = iter(self.batches)
                at = sum(len(entry) for entry in islice(entries, batches)) * self._world_size
        for entry in entries:
            # Hashes of whole numbers are the same in each process.
            seed = hash((self._seed, self._epoch(), at + self._rank)) % 2**63
            at += len(entry) * self._world_size
            yield _Seeded(entry, seed)

    def _states(self) -> list[Any]:
        """The states on which an epoch's order depends, beside the epoch's number."""
        return [] if self.is_ordered else [state() for state, _ in self._sources]

    def _set_states(self, states: list[Any]) -> None:
        for (_, set_state), state in zip(self._sources, states, strict=False):
            set_state(state)


def has_state(source: object) -> bool:
    """Whether a dataloader, or a sampler, says where it is."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


class _Seeded(list[int]):
    """Indices of a batch. A worker that gets them has its generators seeded."""

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self._seed = seed

    def __reduce__(self) -> Any:
        return _arrived, ([*self], self._seed)


def _arrived(indices: list[int], seed: int) -> list[int]:
    seed_generators(seed)
    return indices
