"""``exact_evaluation``: validation and test on several ranks have the numbers of one process."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SubsetRandomSampler
from torchmetrics import CatMetric, MeanMetric

from lightning_bucketddp.trainer.exact_evaluation import ExactBatches
from tests.lightning_models import Regression, data, ddp, ours, trainer
from tests.pool import on_ranks


def every_nth(samples: int, ranks: int = 1, rank: int = 0) -> DistributedSampler[Any]:
    return DistributedSampler(range(samples), ranks, rank, shuffle=False)  # type: ignore[arg-type]


def test_each_sample_is_in_one_batch_and_ranks_have_equally_many() -> None:
    random_numbers = torch.get_rng_state()
    for samples, ranks, size, drop_last in product(range(1, 40), range(1, 6), range(1, 7), (False, True)):
        used = samples - drop_last * (samples % size)
        if used < ranks:
            continue
        case = (samples, ranks, size, drop_last)
        one_process = BatchSampler(every_nth(samples), size, drop_last)
        samplers = [ExactBatches(one_process, rank, ranks) for rank in range(ranks)]
        batches = [list(one) for one in samplers]
        assert sorted(at for own in batches for batch in own for at in batch) == list(range(used)), case
        (count,) = {len(own) for own in batches} | {len(one) for one in samplers}
        assert count == (used // ranks if size == 1 else -(-used // (ranks * size))), case
        smaller = 2 if 0 < used % (ranks * size) < ranks and size > 1 else 1
        for rank, own in enumerate(batches):
            as_with_ddp = list(BatchSampler(every_nth(used, ranks, rank), size, drop_last=False))
            assert own[:-smaller] == as_with_ddp[: count - smaller], case
            assert all(0 < len(batch) <= max(size, 2) for batch in own), case
    assert torch.equal(torch.get_rng_state(), random_numbers)


class Numbered(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.inputs, self.targets = torch.randn(101, 12, generator=torch.Generator().manual_seed(7)).split([8, 4], 1)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[at], self.targets[at], at


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int = 5) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(Numbered(101).__getitem__, range(self.samples))


class Evaluated(Regression):
    records = False

    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.metrics = nn.ModuleList(MeanMetric() for _ in range(loaders))
        self.numbers = nn.ModuleList(CatMetric() for _ in range(loaders))

    def errors(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.net(inputs) - targets).square().mean(1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        errors = self.errors(batch[0], batch[1])
        self.metrics[dataloader_idx].update(errors)
        self.numbers[dataloader_idx].update(batch[2])
        self.log("mean", errors.mean(), sync_dist=True)
        self.log("metric", self.metrics[dataloader_idx])

    def on_validation_epoch_end(self) -> None:
        self.seen = [sorted(numbers.compute().int().tolist()) for numbers in self.numbers]
        for numbers in self.numbers:
            numbers.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[2]


def evaluate(strategy: Any, loaders: Any, stage: str = "validate", count: int = 1) -> tuple[Evaluated, Any]:
    """Returns the model, and by loader the epoch's mean and metric."""
    model, runs = Evaluated(count), trainer(strategy, use_distributed_sampler=True, num_sanity_val_steps=1)
    torch.manual_seed(dist.get_rank())  # as without `seed_everything`
    given = (data(2), loaders) if stage == "fit" else (loaders, None, False)
    getattr(runs, stage)(model, *given)
    found, ends = runs.callback_metrics, [""] if count == 1 else [f"/dataloader_idx_{at}" for at in range(count)]
    return model, [[float(found.get(name + end, 0)) for name in ("mean", "metric")] for end in ends]


@torch.no_grad()
def assert_as_in_one_process(model: Evaluated, found: list[list[float]], *numbers: Sequence[int]) -> None:
    dataset = Numbered(101)
    assert model.seen == [list(its_numbers) for its_numbers in numbers]
    for its_numbers, its_found in zip(numbers, found, strict=True):
        mean = float(model.errors(*dataset[list(its_numbers)][:2]).double().mean())
        assert its_found == pytest.approx([mean, mean], rel=1e-6, abs=0)


COUNTED = [("fit", 101, 8, False), ("fit", 97, 1, False), ("validate", 97, 8, False), ("validate", 3, 1, False)]
COUNTED += [("test", 101, 1, False), ("test", 3, 8, False), ("fit", 97, 1, True)]


@on_ranks(
    2, 3, cases=COUNTED, quick=["fit, 101, 8, False", "validate, 3, 1, False", "test, 3, 8, False", "fit, 97, 1, True"]
)
def test_each_sample_counts_once(stage: str, samples: int, size: int, sharded: bool) -> None:
    strategy = ours(exact_evaluation=True, shard_optimizer=sharded)
    with warnings.catch_warnings(record=True, action="always") as warned:
        assert_as_in_one_process(*evaluate(strategy, DataLoader(Numbered(samples), size), stage), range(samples))
    assert not any("replicates some samples" in str(warning.message) for warning in warned)


DIVIDED: dict[str, tuple[Callable[[], Any], list[range]]] = {
    "drop_last": (lambda: DataLoader(Numbered(101), 8, drop_last=True), [range(96)]),
    "shuffled": (lambda: DataLoader(Numbered(101), 8, shuffle=True), [range(101)]),
    "drawn": (lambda: DataLoader(Numbered(101), 8, sampler=SubsetRandomSampler(range(20, 61))), [range(20, 61)]),
    "several": (lambda: [DataLoader(Numbered(97), 8), DataLoader(Numbered(4), 3)], [range(97), range(4)]),
}


@on_ranks(2, 3, cases=DIVIDED)
def test_the_dataloaders_that_lightning_divides_are_exact(loaders: Callable[[], Any], numbers: list[range]) -> None:
    given = CombinedLoader(loaders(), "sequential")
    for _ in range(2):  # Lightning puts the dataloaders that it makes into this one
        model, found = evaluate(ours(exact_evaluation=True), given, count=len(numbers))
        assert_as_in_one_process(model, found, *numbers)


AS_WITH_DDP: dict[str, tuple[bool, Callable[[], Any], str]] = {
    "fit": (False, lambda: DataLoader(Numbered(101), 8), "fit"),
    "uneven": (False, lambda: DataLoader(Stream(2 + 4 * dist.get_rank()), 2), "validate"),
    "own sampler": (True, lambda: DataLoader(Numbered(5), sampler=DistributedSampler(range(5))), "validate"),
    "a stream": (True, lambda: DataLoader(Stream(), 2), "validate"),
    "no batch": (True, lambda: DataLoader(Numbered(5), 8, drop_last=True), "validate"),
}


@on_ranks(2, 3, cases=AS_WITH_DDP)
def test_without_it_and_with_other_dataloaders_the_numbers_are_ddps(exact: bool, loaders: Any, stage: str) -> None:
    given, strategies = loaders(), (ours(exact_evaluation=exact), ddp())
    (model, found), (with_ddp, expected) = (evaluate(strategy, given, stage) for strategy in strategies)
    assert (found, getattr(model, "seen", None)) == (expected, getattr(with_ddp, "seen", None))


class Special(BatchSampler): ...


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "too few samples": (lambda: DataLoader(Numbered(2)), "found 2 samples on 3 ranks. Use at most 2 devices"),
    "batches of another kind": (
        lambda: DataLoader(Numbered(5), batch_sampler=Special(range(5), 2, False)),
        "found one with a Special, whose batches cannot be made smaller",
    ),
    "no batch size": (lambda: DataLoader(Numbered(5), batch_size=None), "found one with batch_size=None, whose"),
}


@on_ranks(3, cases=REFUSED, quick=["too few samples", "no batch size"], fresh=True)
def test_what_cannot_be_divided_is_an_error(loader: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(ours(exact_evaluation=True), loader(), "fit")


@on_ranks(2)
def test_training_and_prediction_are_as_with_ddp() -> None:
    model, runs = Evaluated(), trainer(ours(exact_evaluation=True), use_distributed_sampler=True)
    runs.fit(model, DataLoader(Numbered(7), 1))
    assert runs.train_dataloader.sampler.num_replicas == 2
    assert runs.global_step == 4
    (predicted,) = runs.predict(model, DataLoader(Numbered(7), 8))
    assert predicted.tolist() == list(range(7))[dist.get_rank() :: 2]
