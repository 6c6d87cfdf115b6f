"""Validation and test in which every sample counts once, on any number of ranks."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import BatchSampler, DistributedSampler
from typing_extensions import override


class EachSampleOnce(DDPStrategy):
    """A ``DDPStrategy`` that evaluates each sample once, if ``exact_evaluation`` is set.

    Lightning asks for ``distributed_sampler_kwargs`` when it makes its sampler. Then it passes the dataloader to
    ``process_dataloader``. In between, the sampler has the samples of all ranks, so that none is repeated.
    """

    def __init__(self, *args: Any, exact_evaluation: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exact_evaluation = exact_evaluation

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._evaluates_exactly():  # with one replica Lightning does not warn of repeated samples
            return {"num_replicas": _OneForAllRanks(1), "rank": 0}
        return super().distributed_sampler_kwargs

    @override
    def process_dataloader(self, dataloader: Any) -> object:
        if self._evaluates_exactly():
            divide_among_ranks(dataloader, self.global_rank, self.world_size)
        return super().process_dataloader(dataloader)

    def _evaluates_exactly(self) -> bool:
        module = self.lightning_module
        return self._exact_evaluation and module is not None and module.trainer.evaluating


class _OneForAllRanks(int):
    """The ``num_replicas`` by which ``divide_among_ranks`` knows Lightning's samplers from a user's own."""


def divide_among_ranks(loader: Any, rank: int, world_size: int) -> None:
    """Make a dataloader yield this rank's batches of :class:`ExactBatches`, if Lightning's sampler is in it.

    Args:
        loader: The dataloader. Lightning has made it anew, with its sampler.
        rank: This rank.
        world_size: The number of ranks.

    Raises:
        ValueError: If there are fewer samples than ranks, or if the batches cannot be made smaller.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", getattr(loader, "sampler", None))
    is_lightnings = isinstance(getattr(sampler, "num_replicas", None), _OneForAllRanks)
    if not is_lightnings or isinstance(batches, ExactBatches) or len(loader) == 0:
        return
    if type(batches) is not BatchSampler:
        found = "batch_size=None" if batches is None else f"a {type(batches).__name__}"
        raise ValueError(
            "expected a dataloader with a batch_size in validation and test, as exact_evaluation is given; found one "
            f"with {found}, whose batches cannot be made smaller. Give it a batch_size, or divide its samples among "
            "the ranks yourself, with Trainer(use_distributed_sampler=False)"
        )
    # A DataLoader takes a batch sampler in its constructor only. A subclass may have another constructor.
    object.__setattr__(loader, "batch_sampler", ExactBatches(batches, rank, world_size))


class ExactBatches(BatchSampler):
    """One rank's batches. Each sample is in one batch of one rank, and all ranks have equally many batches.

    Of ``w`` ranks, rank ``r`` has the samples ``r, r + w, r + 2 * w, ...``. Its batches are full, except the last one.
    The last two are smaller where some ranks would otherwise have no last one::

        16 samples, 2 ranks, batch_size=3    rank 0: 0 2 4 | 6 8 10 | 12 14
                                             rank 1: 1 3 5 | 7 9 11 | 13 15
        13 samples, 2 ranks, batch_size=3    rank 0: 0 2 4 | 6 8    | 10 12
                                             rank 1: 1 3 5 | 7 9    | 11

    ``batch_size=1`` cannot be made smaller: there the last batch of some ranks has two samples.

    Args:
        batches: The batches of one process, with a ``DistributedSampler``. Samples that it leaves out are left out.
        rank: This rank.
        world_size: The number of ranks.

    Raises:
        ValueError: If there are fewer samples than ranks.
    """

    def __init__(self, batches: Any, rank: int, world_size: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        samples = len(batches) * self.batch_size if batches.drop_last else len(batches.sampler)
        if samples < world_size:
            raise ValueError(
                f"rank {rank}: expected at least as many samples as ranks in validation and test, as exact_evaluation "
                f"is given; found {samples} samples on {world_size} ranks. Use at most {samples} devices, or leave "
                "exact_evaluation out"
            )
        self._own = slice(rank, samples, world_size)
        fewest, most = samples // world_size, -(-samples // world_size)  # that a rank has
        full_batches = (fewest - 1) // self.batch_size
        last_batches = 2 if most - full_batches * self.batch_size > self.batch_size > 1 else 1
        remaining = len(range(samples)[self._own]) - full_batches * self.batch_size
        last_sizes = [(remaining + part) // last_batches for part in reversed(range(last_batches))]
        self._sizes = [self.batch_size] * full_batches + last_sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        assert isinstance(self.sampler, DistributedSampler)
        with torch.random.fork_rng(devices=[]):
            # If a user's sampler behind Lightning's draws from torch's generator, it draws the same on all ranks.
            torch.default_generator.manual_seed(self.sampler.seed + self.sampler.epoch)
            own = iter(list(self.sampler)[self._own])
        for size in self._sizes:
            yield list(islice(own, size))
