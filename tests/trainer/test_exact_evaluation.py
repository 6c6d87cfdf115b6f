"""``exact_evaluation``: validation and test on several ranks have the numbers of one process."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)
from torchmetrics import CatMetric, MeanMetric

from lightning_bucketddp.trainer.exact_evaluation import ExactBatches
from tests.lightning_models import data, ddp, ours, trainer
from tests.models import Mlp
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
        samplers = [ExactBatches(every_nth(samples), size, drop_last, rank, ranks) for rank in range(ranks)]
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
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(101, 8, generator=generator)[:samples]
        self.targets = torch.randn(101, 4, generator=generator)[:samples]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[at], self.targets[at], at


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int = 5) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(Numbered(101).__getitem__, range(self.samples))


class Evaluated(pl.LightningModule):
    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Mlp()
        self.metrics = nn.ModuleList(MeanMetric() for _ in range(loaders))
        self.numbers = nn.ModuleList(CatMetric() for _ in range(loaders))

    def errors(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.net(inputs) - targets).square().mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.errors(batch[0], batch[1]).mean()

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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def evaluate(strategy: Any, loaders: Any, stage: str = "validate", count: int = 1) -> tuple[Evaluated, Any]:
    """Returns the model, and by loader the epoch's mean and metric."""
    model, runs = Evaluated(count), trainer(strategy, use_distributed_sampler=True, num_sanity_val_steps=1)
    torch.manual_seed(dist.get_rank())  # as without `seed_everything`
    if stage == "fit":
        runs.fit(model, data(2), loaders)
    else:
        getattr(runs, stage)(model, loaders, verbose=False)
    found, ends = runs.callback_metrics, [""] if count == 1 else [f"/dataloader_idx_{at}" for at in range(count)]
    return model, [[float(found.get(name + end, 0)) for name in ("mean", "metric")] for end in ends]


@torch.no_grad()
def assert_as_in_one_process(model: Evaluated, found: list[list[float]], *numbers: Sequence[int]) -> None:
    dataset = Numbered(101)
    assert model.seen == [list(its_numbers) for its_numbers in numbers]
    for its_numbers, its_found in zip(numbers, found, strict=True):
        mean = float(model.errors(*dataset[list(its_numbers)][:2]).double().mean())
        assert its_found == pytest.approx([mean, mean], rel=1e-6, abs=0)


COUNTED = [*product(("fit", "validate", "test"), (97, 101, 2), (8, 1)), ("fit sharded", 101, 8), ("fit sharded", 97, 1)]


@on_ranks(2, 3, cases=COUNTED, timeout=150)
def test_each_sample_counts_once(stage: str, samples: int, size: int) -> None:
    strategy = ours(exact_evaluation=True, shard_optimizer="sharded" in stage)
    loader = DataLoader(Numbered(samples), size)
    stage = stage.split()[0]
    if samples < dist.get_world_size():
        return  # an error, see below
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert_as_in_one_process(*evaluate(strategy, loader, stage), range(samples))
    assert not any("replicates some samples" in str(warning.message) for warning in warned)


@on_ranks(2, 3)
def test_without_it_the_numbers_are_those_of_ddp() -> None:
    uneven = DataLoader(Stream(2 + 3 * dist.get_rank()), 2)
    divided = [
        (DataLoader(Numbered(samples), 8), stage) for samples in (97, 101) for stage in ("fit", "validate", "test")
    ]
    for loader, stage in [*divided, (uneven, "validate")]:
        (model, found), (with_ddp, expected) = (evaluate(each(), loader, stage) for each in (ours, ddp))
        assert (model.seen, found) == (with_ddp.seen, expected)
        assert len(set(model.seen[0])) < len(model.seen[0])


def own_part(samples: int) -> DataLoader[Any]:
    dataset = Numbered(samples)
    return DataLoader(dataset, 2, sampler=DistributedSampler(dataset, shuffle=False))


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


LEFT_ALONE: dict[str, Callable[[], Any]] = {
    "a sampler of the user's own": lambda: own_part(5),
    "a stream": lambda: DataLoader(Stream(), 2),
    "no batch": lambda: DataLoader(Numbered(5), 8, drop_last=True),
}


@on_ranks(2, 3, cases=LEFT_ALONE)
def test_other_dataloaders_are_left_alone(loaders: Callable[[], Any]) -> None:
    given = loaders()
    (model, found), (with_ddp, expected) = (evaluate(each, given) for each in (ours(exact_evaluation=True), ddp()))
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


@on_ranks(3, cases=REFUSED, fresh=True)
def test_what_cannot_be_divided_is_an_error(loader: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(ours(exact_evaluation=True), loader(), "fit")


@on_ranks(2, 3)
def test_epoch_means_weigh_by_samples() -> None:
    """Those of 2 and 5 samples, on two ranks 3.5 on average."""
    samples = 2 + 3 * dist.get_rank()
    _, [[mean, metric]] = evaluate(ours(exact_evaluation=True), DataLoader(Stream(samples), 2))
    assert mean == pytest.approx(metric, rel=1e-6)


@on_ranks(2)
def test_training_and_prediction_are_as_with_ddp() -> None:
    model, runs = Evaluated(), trainer(ours(exact_evaluation=True), use_distributed_sampler=True)
    runs.fit(model, DataLoader(Numbered(7), 1))
    assert runs.train_dataloader.sampler.num_replicas == 2
    assert runs.global_step == 4
    (predicted,) = runs.predict(model, DataLoader(Numbered(7), 8))
    assert predicted.tolist() == list(range(7))[dist.get_rank() :: 2]
