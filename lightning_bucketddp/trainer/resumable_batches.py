"""The batches of a dataloader's sampler, which can be taken from the middle of an epoch on.

The ranks together take the samples of an epoch in one order. Batch by batch they have taken a prefix of it, so that one
number says what is left. It does not depend on the number of ranks::

    order of the epoch        7 2 | 5 0 | 3 6 | 1 4      2 ranks, batch_size=1
    taken = 4                         ^ 3 6 1 4 are left: rank 0 takes 3 1, rank 1 takes 6 4
    the same on 3 ranks                 3 6 1 | 4 7 2: 7 and 2 are taken once more, so that all ranks have a batch
"""

from collections.abc import Callable, Iterator
from copy import copy
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_bucketddp.trainer.random_state import random_state, seed_generators


class ResumableBatches:
    """Stands in the place of a dataloader's batch sampler.

    Data loading workers seed their generators for each sample by its place in the epoch, so that it does not matter
    which worker loads it, nor how far ahead.

    Args:
        loader: A dataloader of samples by index, with a batch sampler.
        device: The device that trains.
        rank: This rank.
        world_size: The number of ranks.
        epoch: Returns the epoch.

    Attributes:
        batches: The user's, or Lightning's, batch sampler.
        sampler: The sampler in it.
        seed: The seed of this run's workers.
        began: The states of generators and of the sampler when this epoch's sampling began.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, rank: int, world_size: int, epoch: Callable[[], int]
    ) -> None:
        self.batches: Any = loader.batch_sampler
        self.sampler: Any = getattr(self.batches, "sampler", self.batches)
        self.seed = 0
        self.began: dict[str, Any] = {}
        self._device, self._rank, self._world_size, self._epoch = device, rank, world_size, epoch
        self._seeds_workers = loader.num_workers > 0
        found = (getattr(each, "generator", None) for each in (loader, self.sampler, self.batches))
        self._generators = list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))
        self._start = (0, 0, 0)  # an epoch; its samples and batches that were taken before this iteration
        self._resumes: dict[str, Any] | None = None

    @staticmethod
    def fit(loader: object) -> bool:
        """Whether a dataloader's batches can be taken from the middle of an epoch on."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return False
        return loader.batch_sampler is not None and not has_state(loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["batches"], name)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_ordered(self) -> bool:
        """Whether the order of an epoch is known for any number of ranks."""
        sampler = self.sampler
        of_all = type(sampler) is DistributedSampler and sampler.num_replicas == self._world_size
        return of_all and type(self.batches) is BatchSampler

    def place(self, batches: int) -> dict[str, Any]:
        """Where this epoch is, for checkpoints; the same on all ranks.

        Args:
            batches: How many batches of the epoch have been trained.
        """
        epoch, samples, before = self._start
        if epoch != self._epoch():  # nothing was taken so far
            samples = before = 0
        size: Any = getattr(self.batches, "batch_size", None)
        taken = samples + (batches - before) * size * self._world_size if self.is_ordered else 0
        seed = getattr(self.sampler, "seed", 0)
        return {"ordered": self.is_ordered, "taken": taken, "batch_size": size, "seed": seed}

    def resume(self, place: dict[str, Any], began: dict[str, Any], batches: int) -> int:
        """Begin the next iteration in the middle of an epoch.

        Args:
            place: Where the epoch was.
            began: The states when it began, on this rank.
            batches: How many batches had been trained.

        Returns:
            How many batches of this epoch count as trained.

        Raises:
            ValueError: If batches have another size, and the order of all ranks is not known.
        """
        self._resumes = {"epoch": self._epoch(), "began": began, "batches": batches}
        if not self.is_ordered and place["batch_size"] != (size := getattr(self.batches, "batch_size", None)):
            raise ValueError(
                f"expected batches of {place['batch_size']} samples, as when the checkpoint was saved, found {size}: "
                "only with the Trainer's sampler may the size change in the middle of an epoch"
            )
        if self.is_ordered:
            self.sampler.seed = place["seed"]
            left = self._left(place["taken"])
            full, rest = divmod(len(left), self.batches.batch_size)
            batches = len(self.batches) - full - (rest > 0 and not self.batches.drop_last)
        self._start = self._epoch(), place["taken"], batches
        return batches

    def count_repeated(self, taken: int) -> int:
        """How many of the samples that are left are taken twice, as the ranks have equally many."""
        return 0 if self.sampler.drop_last else -max(len(self.sampler.dataset) - taken, 0) % self._world_size

    def _left(self, taken: int) -> list[int]:
        """The samples of an ordered epoch that are left for this rank."""
        alone = copy(self.sampler)
        alone.num_replicas, alone.rank, alone.num_samples = 1, 0, len(alone.dataset)
        alone.total_size = alone.num_samples
        order = list(alone)
        left = order[taken:]
        if alone.drop_last:
            left = left[: len(left) - len(left) % self._world_size]
        else:
            left += islice(cycle(order), self.count_repeated(taken))
        return left[self._rank :: self._world_size]

    def __iter__(self) -> Iterator[list[int]]:
        # All of this when the first batch is asked for: then samplers draw, and a DataLoader may make more iterators.
        resumes, self._resumes = self._resumes, None
        at, world_size = 0, self._world_size  # the samples of all ranks before
        if resumes is None or resumes["epoch"] != self._epoch():
            self._start, self.began = (self._epoch(), 0, 0), {} if self.is_ordered else self._states()
            entries = iter(self.batches)
        elif self.is_ordered:
            at = self._start[1]
            entries = iter(BatchSampler(self._left(at), self.batches.batch_size, self.batches.drop_last))
        else:
            now, self.began = random_state(self._device), resumes["began"]
            self._states(resumes["began"])
            entries = iter(self.batches)
            at = sum(len(entry) for entry in islice(entries, resumes["batches"])) * world_size
            random_state(self._device, now)
        for entry in entries:
            places = range(at + self._rank, at + len(entry) * world_size, world_size)
            at += len(entry) * world_size
            # Hashes of whole numbers are the same in each process.
            seeds = [hash((self.seed, self._epoch(), place)) % 2**63 for place in places]
            yield _Seeded(entry, seeds) if self._seeds_workers else entry

    def _states(self, set_to: dict[str, Any] | None = None) -> dict[str, Any]:
        """The states on which this epoch's order depends; sets them if they are given."""
        if set_to is not None:
            random_state(self._device, set_to["random"])
            for generator, state in zip(self._generators, set_to["generators"], strict=True):
                generator.set_state(state)
            if has_state(self.sampler):
                self.sampler.load_state_dict(set_to["sampler"])
        generators = [generator.get_state() for generator in self._generators]
        of_sampler = self.sampler.state_dict() if has_state(self.sampler) else None
        return {"random": random_state(self._device), "generators": generators, "sampler": of_sampler}


def has_state(source: object) -> bool:
    """Whether a dataloader, or a sampler, says where it is."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


class _Seeded(list[int]):
    """Indices of a batch. Whoever goes through them, as a worker does, has its generators seeded for each."""

    def __init__(self, indices: list[int], seeds: list[int]) -> None:
        super().__init__(indices)
        self._seeds = seeds

    def __iter__(self) -> Iterator[int]:
        for index, seed in zip(super().__iter__(), self._seeds, strict=True):
            seed_generators(seed)
            yield index

    def __reduce__(self) -> Any:
        return _arrived, ([*super().__iter__()], self._seeds)


def _arrived(indices: list[int], seeds: list[int]) -> list[int]:
    """Make a batch's indices in a worker. Data sets with ``__getitems__`` need not go through them one by one."""
    if seeds:
        seed_generators(seeds[0])
    return _Seeded(indices, seeds)
