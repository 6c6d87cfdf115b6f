"""Ranks with batches of different sizes in a Trainer, and the batch size that all ranks find."""

import copy
import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder as LightningsFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lightning_bucketddp import BatchSizeFinder
from tests import reference
from tests.lightning_models import Regression, close_to, ddp, ours, trainer
from tests.models import batch
from tests.pool import case, on_ranks
from tests.reference import WHERE, everyones, raises_soon

SIZES = (5, 2, 3)


class Samples(Regression):
    """Trains on batches of another size on each rank, in mean losses."""

    records = False
    batches = (6, 6, 6)  # by rank

    def train_dataloader(self) -> Any:
        rank = dist.get_rank()
        mine = [batch(step, rank, size=SIZES[rank]) for step in range(self.batches[rank])]
        return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]


class ByHand(Samples):
    """Runs two backwards per batch in manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


def alone(model: Samples, accumulate: int = 1, per_batch: int = 1) -> Samples:
    """What one process makes of the model on all ranks' batches."""
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()
    for step in range(6):
        ranks = [rank for rank in range(dist.get_world_size()) if step < model.batches[rank]]
        parts = [batch(step, rank, size=SIZES[rank]) for rank in ranks]
        inputs, target = (torch.cat(each) for each in zip(*parts, strict=True))
        for _ in range(per_batch):
            (nn.functional.mse_loss(model.net(inputs), target) / accumulate).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


@on_ranks(2, 3, cases={"plain": {}, "sharded": {"shard_optimizer": True}})
def test_a_trainer_trains_as_one_process_does_on_all_samples(options: dict[str, Any]) -> None:
    for accumulate in (1, 2):
        with case(options, accumulate):
            model = Samples(optimizer="adamw")
            expected = alone(model, accumulate)
            strategy = ours(gradient_divide_by="samples", **options)
            trainer(strategy, accumulate_grad_batches=accumulate).fit(model)
            close_to(model, expected)
    if not options:
        model = Samples(optimizer="adamw")
        trainer(ddp(), accumulate_grad_batches=2).fit(model)
        with pytest.raises(AssertionError, match="not close"):
            close_to(model, expected)
        model = ByHand()
        expected = alone(model, per_batch=2)
        trainer(ours(gradient_divide_by="samples")).fit(model)
        close_to(model, expected)


@on_ranks(2, cases=({}, {"shard_optimizer": True}))
def test_the_samples_of_a_repeated_batch_do_not_count(options: dict[str, Any]) -> None:
    model = Samples()
    model.batches = (4, 6, 6)
    expected = alone(model)
    trainer(ours(gradient_divide_by="samples", uneven_inputs="world_size", **options)).fit(model)
    close_to(model, expected)


class Ragged(Samples):
    """Its batches have tensors of two lengths. May count the samples; may leave out the first batch on rank 1."""

    counts, skips = True, False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.skips and batch_idx == 0 and dist.get_rank() == 1:
            return None
        inputs, target, _ = batch
        if self.counts:
            self.trainer.strategy.count_samples(len(inputs))
        return super().training_step((inputs, target), batch_idx)

    def train_dataloader(self) -> Any:
        extra = torch.ones(1) if self.counts or dist.get_rank() == 1 else torch.ones(SIZES[0])
        mine = super().train_dataloader().dataset
        return DataLoader([(*tensors, extra) for tensors in mine], batch_size=None)  # type: ignore[arg-type]


@on_ranks(2)
def test_samples_that_a_batch_does_not_show_are_counted_by_the_user() -> None:
    model = Ragged()
    expected = alone(model)
    trainer(ours(gradient_divide_by="samples")).fit(model)
    close_to(model, expected)


@on_ranks(2)
def test_the_samples_of_a_batch_without_a_loss_do_not_count() -> None:
    model, first = Ragged(), Samples()
    model.skips = True
    with warnings.catch_warnings(record=True):
        trainer(ours(gradient_divide_by="samples"), max_steps=1).fit(model)
    inputs, target = batch(0, 0, size=SIZES[0])
    nn.functional.mse_loss(first.net(inputs), target).backward()
    first.configure_optimizers().step()
    close_to(model, first)


@on_ranks(2, fresh=True)
def test_samples_that_are_not_known_are_an_error_on_all_ranks() -> None:
    model = Ragged()
    model.counts = False  # on rank 0 all tensors have one length
    own = r"rank 1: expected a batch whose tensors all have one length.*found lengths \[1, 2\]. Call self.trainer.str"
    with raises_soon(
        RuntimeError, match=own if dist.get_rank() else f"rank 1{WHERE} raised RuntimeError: rank 1: expected"
    ):
        trainer(ours(gradient_divide_by="samples")).fit(model)


class Hungry(Regression):
    """Runs out of memory where a batch is too large for its rank, and logs what all ranks reduce.

    Args:
        limits: By rank, the largest batch that it can take.
        where: What runs out of memory.
    """

    records = False

    def __init__(self, limits: tuple[int, ...], where: str, samples: int = 96) -> None:
        super().__init__("conv", "adamw")
        self.limit, self.where, self.batch_size, self.samples = limits[dist.get_rank()], where, 3, samples
        self.sizes, self.ran_out, self.gathered = set[int](), 0, 0
        next(self.net.children()).register_forward_hook(self._middle_of_backward)

    def _eat(self, inputs: Tensor, where: str) -> Tensor:
        self.sizes.add(len(inputs))
        if where == self.where and len(inputs) > self.limit:
            self.ran_out += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return inputs

    def _middle_of_backward(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: self._eat(grad, "backward"))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step((self._eat(batch[0], "training_step"), batch[1]), batch_idx)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.gathered += len(self.all_gather(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validated", self.net(self._eat(batch[0], "validation_step")).mean(), sync_dist=True)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(11)
        dataset: Dataset[Any] = TensorDataset(
            torch.randn(self.samples, 8, generator=generator), torch.randn(self.samples, 4, generator=generator)
        )
        return DataLoader(dataset, self.batch_size, sampler=DistributedSampler(dataset, shuffle=False))

    val_dataloader = train_dataloader


def found_with(finder: BatchSizeFinder, model: Hungry, **options: Any) -> int | None:
    """What the finder finds before this rank trains."""
    trainer(ours(**options), callbacks=[finder], default_root_dir=tempfile.mkdtemp()).fit(model)
    return finder.optimal_batch_size


def find_and_train(where: str, mode: str = "power", steps: int = 2, **options: Any) -> None:
    """Rank 1 has memory for batches of 11, the others for more."""
    model = Hungry((40, 11, 70), where)
    untouched = copy.deepcopy(model)
    finder = BatchSizeFinder(mode, steps_per_trial=steps, margin=0.0)
    found, size = found_with(finder, model, **options), 8 if mode == "power" else 11
    assert everyones((found, model.batch_size)) == [(size, size)] * dist.get_world_size()
    assert (model.ran_out > 0) == (dist.get_rank() == 1)
    assert max(model.sizes) > size
    assert model.gathered > 0
    untouched.batch_size = size
    trainer(ours(**options)).fit(untouched)
    close_to(model, untouched)  # as if nothing had been tried
    torch.testing.assert_close(model.trainer.callback_metrics, untouched.trainer.callback_metrics)
    assert reference.drift(model) == 0


@on_ranks(2, 3)
def test_all_ranks_find_the_size_of_the_one_with_the_least_memory_and_train_with_it() -> None:
    find_and_train("training_step")


@on_ranks(2)
def test_memory_that_runs_out_in_validation_counts() -> None:
    find_and_train("validation_step", steps=3, gradient_divide_by="samples")  # 3 batches of 16 are an epoch


@on_ranks(2, 3)
def test_memory_that_runs_out_in_the_middle_of_backward_counts() -> None:
    find_and_train("backward", "binsearch")


@on_ranks(2, cases={"plain": {}, "in parts": {"state_dict_type": "sharded"}}, quick=["in parts"])
def test_a_size_is_found_with_a_sharded_optimizer(options: dict[str, Any]) -> None:
    find_and_train("backward", shard_optimizer=True, **options)


@on_ranks(2, cases=["training_step", "backward"], quick=["backward"])
def test_a_trial_that_runs_out_of_memory_is_no_skipped_step(where: str) -> None:
    find_and_train(where, skip_step_on=["oom", "nonfinite"])


@on_ranks(2)
def test_a_size_is_found_for_validation_alone() -> None:
    model, finder = Hungry((40, 11), "validation_step"), BatchSizeFinder(steps_per_trial=2)
    trainer(ours(), callbacks=[finder], default_root_dir=tempfile.mkdtemp()).validate(model)
    assert everyones((finder.optimal_batch_size, model.batch_size)) == [(8, 8)] * 2


class Unlike(Hungry):
    def train_dataloader(self) -> DataLoader[Any]:
        self.samples = 96 + dist.get_rank()
        return super().train_dataloader()


@on_ranks(2)
def test_what_ranks_cannot_agree_on_is_refused() -> None:
    def fit(model: pl.LightningModule, finder: LightningsFinder, **options: Any) -> None:
        trainer(ours(), callbacks=[finder], default_root_dir=tempfile.mkdtemp(), **options).fit(model)

    by_hand = ByHand()
    by_hand.batch_size = 2
    with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
        fit(by_hand, LightningsFinder())
    with pytest.raises(MisconfigurationException, match="expected automatic optimisation and no SyncBatchNorm"):
        fit(by_hand, BatchSizeFinder())
    with pytest.raises(MisconfigurationException, match="expected automatic optimisation and no SyncBatchNorm"):
        fit(Hungry((9, 9), "training_step"), BatchSizeFinder(), sync_batchnorm=True)
    with pytest.raises(MisconfigurationException, match=r"of one length.*found \[\[96, 16\], \[97, 17\]\] samples"):
        fit(Unlike((9, 9), "training_step"), BatchSizeFinder())
    unequal = Hungry((9, 9), "training_step")
    unequal.batch_size += 3 * dist.get_rank()
    with pytest.raises(MisconfigurationException, match=r"Begin with one batch size"):
        fit(unequal, BatchSizeFinder())
    for finder in (LightningsFinder(), BatchSizeFinder()):
        with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
            trainer(ddp(), callbacks=[finder]).fit(Hungry((9, 9), "training_step"))
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(trainer(ddp())).scale_batch_size(Hungry((9, 9), "training_step"))
