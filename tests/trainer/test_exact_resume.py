"""With ``exact_resume`` a resumed run takes the samples that were left, and ends as the undisturbed run did."""

import os
import signal
import warnings
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_bucketddp import BatchSizeFinder, PreemptionCheckpoint
from lightning_bucketddp.reducer import skipping
from tests.lightning_models import ddp, ours
from tests.pool import ROOT, RunRanks, on_ranks
from tests.sampling import some_slow
from tests.trainer.resume_matrix import (
    ELSEWHERE,
    LOADERS,
    PLACES,
    STRATEGIES,
    TORCHDATA,
    Augmented,
    Remembers,
    Run,
    Saves,
    both,
    compared,
    fit,
    run,
    table,
    trainer,
)

KEY = "bucketddp_exact_resume"
SAMPLER = "the Trainer's sampler"
CASES = [(loader, workers, place) for loader, numbers in LOADERS.items() for workers, place in product(numbers, PLACES)]
CASES += [(SAMPLER, 0, place) for place in ELSEWHERE]
QUICK = [
    *((SAMPLER, 0, "first batch"), (SAMPLER, 1, "in a window"), (SAMPLER, 0, "epoch's end, steps")),
    *(("RandomSampler on each rank", 2, "middle"), ("with state_dict()", 0, "in validation")),
]


def require_same(undisturbed: Run, resumed: Run, loader: str = SAMPLER, told: bool = True) -> None:
    assert undisturbed.before, "it was saved"
    assert resumed.taken == [batches[undisturbed.before :] for batches in undisturbed.taken], "with the same losses"
    assert compared(undisturbed, resumed, loader) == (0, 0, 0)
    if told:  # metrics and learning rates of each epoch that ends after the resume
        assert resumed.told == undisturbed.told[-len(resumed.told) :]


@pytest.mark.parametrize(("loader", "workers", "place"), some_slow(CASES, QUICK))
def test_a_resumed_run_ends_as_the_undisturbed_one(
    run_ranks: RunRanks, tmp_path: Path, loader: str, workers: int, place: str
) -> None:
    runs = both(run_ranks, tmp_path, "bucketddp", loader, workers, place)
    require_same(*runs, loader, told=place != "in a window")


@pytest.mark.slow
def test_the_table_of_the_page(run_ranks: RunRanks) -> None:
    page = (ROOT / "docs" / "preemption.md").read_text()
    for row in table(run_ranks, ["bucketddp"]):
        assert row in page


def test_torchdatas_loader_goes_on_where_it_was(run_ranks: RunRanks, tmp_path: Path) -> None:
    require_same(*both(run_ranks, tmp_path, "bucketddp", TORCHDATA, 0, "middle"), TORCHDATA)


# Strategies that order sums, or change gradients, by what earlier steps have taught; and the place of the checkpoint.
CARRIED: dict[str, tuple[dict[str, Any], str]] = {
    "the learned order": ({"bucket_cap_mb": 1}, "middle"),
    "PowerSGD": ({"comm_hook": "powersgd"}, "second epoch"),
    "norms": ({"skip_norm_above": 2.0, "max_skipped": 100}, "middle"),
    "shards in a directory": ({"shard_optimizer": True, "state_dict_type": "sharded", "bucket_cap_mb": 1}, "middle"),
}


@pytest.mark.parametrize("name", some_slow(CARRIED, ["PowerSGD", "norms"]))
def test_three_ranks_go_on_bit_for_bit(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    (undisturbed, skipped), (resumed, _) = (run_ranks(3, run_with, tmp_path, name, resumes)[0] for resumes in (0, 1))
    require_same(undisturbed, resumed)
    assert skipped == (name == "norms")


@patch.object(skipping, "NORMS_FOR_MEDIAN", 2)
def run_with(folder: Path, name: str, resumes: bool) -> tuple[Run, bool]:
    """A run, and whether it has skipped a step."""
    options, place = CARRIED[name]
    if name == "PowerSGD":  # a state of its own for each run, which compresses from the third step on
        state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1.1, orthogonalization_epsilon=1e-8)
        options = {**options, "comm_hook_state": state}

    def loss(model: Remembers, batch: Any) -> torch.Tensor:
        return original(model, batch) * (1 + 9 * (model.trainer.global_step % 2))

    original = Remembers.loss
    grows = patch.object(Remembers, "loss", loss if name == "norms" else original)
    with grows, warnings.catch_warnings(record=True) as heard:
        warnings.filterwarnings("always", "rank 0: all ranks skip")
        found = run(folder, "bucketddp", SAMPLER, 0, place, resumes, **options)
    return found, any("all ranks skip" in str(each.message) for each in heard)


class Normalised(Remembers):
    """Has module buffers, and a batch size that can be searched for. Forgets the steps of trials."""

    batch_size = 2

    def __init__(self, folder: Path, *place: Any) -> None:
        super().__init__(folder, *place)
        self.norm = torch.nn.BatchNorm1d(8)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0], self.norm(batch[1])))

    def on_train_start(self) -> None:
        self.taken.clear()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Augmented(28), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:  # of trials
        return DataLoader(Augmented(8), 2)


BESIDE: dict[str, dict[str, Any]] = {
    "async_save": {"state_dict_type": "sharded", "async_save": True},
    "module_buffers='mean'": {"module_buffers": "mean"},
    "module_buffers='off'": {"module_buffers": "off"},
    "BatchSizeFinder": {},
}


@pytest.mark.parametrize("name", some_slow(BESIDE, BESIDE.keys() - {"module_buffers='mean'"}))
@on_ranks(2)
def test_a_run_with_other_features_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    def one(model: Normalised, seed: int, path: Path | None) -> Normalised:
        torch.manual_seed(seed)
        finder = [BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=2)] if name == "BatchSizeFinder" else []
        given = {"limit_val_batches": 0, "use_distributed_sampler": True, "max_epochs": 1, "default_root_dir": tmp_path}
        fits = trainer(ours(exact_resume=True, **BESIDE[name]), callbacks=[*finder, Saves()], **given)
        fits.fit(model, ckpt_path=path)
        return model

    undisturbed = one(Normalised(tmp_path, "batch", 2), 10, None)
    resumed = one(Normalised(tmp_path), 20, tmp_path / "saved.ckpt")
    assert len(undisturbed.taken[0][1]) == (4 if name == "BatchSizeFinder" else 2)
    assert resumed.taken == undisturbed.taken[2:] != []
    assert all(map(torch.equal, undisturbed.state_dict().values(), resumed.state_dict().values()))


class SavesAnywhere(Saves):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.come("epoch begins")


GENERATED = [("batch", 2), ("epoch begins", 6), ("epoch", 6)]


@pytest.mark.parametrize(("place", "batch"), some_slow(GENERATED, GENERATED[:2]))
@on_ranks(2)
def test_a_generator_of_the_users_goes_on(place: str, batch: int, tmp_path: Path) -> None:
    def one(model: Remembers, seed: int, path: Path | None = None) -> Remembers:
        torch.manual_seed(seed)
        loader = DataLoader(Augmented(12), 2, shuffle=True, generator=torch.Generator().manual_seed(seed))
        fits = trainer(ours(exact_resume=True), max_epochs=3, limit_val_batches=0, callbacks=[SavesAnywhere()])
        fits.fit(model, loader, ckpt_path=path)
        return model

    undisturbed = one(Remembers(tmp_path, place, batch), 10 + dist.get_rank())
    resumed = one(Remembers(tmp_path), 20 + dist.get_rank(), tmp_path / "saved.ckpt")
    assert resumed.taken == undisturbed.taken[batch:] != []
    assert all(map(torch.equal, undisturbed.parameters(), resumed.parameters()))


class LessEachStep(Remembers):
    """Has a scheduler that takes the loss of each step, and lowers the rate."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("now", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "now", "interval": "step"}}


@on_ranks(1)
def test_a_scheduler_that_follows_each_step_misses_none(tmp_path: Path) -> None:
    undisturbed, resumed = LessEachStep(tmp_path, "batch", 2), LessEachStep(tmp_path)
    for model, path in ((undisturbed, None), (resumed, resumed.path)):
        fits = trainer(ours(exact_resume=True), max_epochs=1, limit_val_batches=0, callbacks=[Saves()])
        fits.fit(model, DataLoader(Augmented(8), 2), ckpt_path=path)
    assert resumed.taken == undisturbed.taken[2:] != []
    assert resumed.told[0][-1] == undisturbed.told[0][-1]


@on_ranks(1)
def test_persistent_workers_of_a_validation_change_no_random_numbers(tmp_path: Path) -> None:
    undisturbed, resumed = Remembers(tmp_path, "batch", 4), Remembers(tmp_path)
    for model, path in ((undisturbed, None), (resumed, resumed.path)):
        fits = trainer(ours(exact_resume=True), max_epochs=1, val_check_interval=2, callbacks=[Saves()])
        samples = TensorDataset(torch.arange(4), torch.ones(4, 8))
        validation = DataLoader(samples, 2, num_workers=1, persistent_workers=True)
        fits.fit(model, DataLoader(Augmented(12), 2, shuffle=True), validation, ckpt_path=path)
    assert resumed.taken == undisturbed.taken[4:] != []
    assert resumed.told == undisturbed.told


def in_order(taken: list[Any], batches: range) -> list[int]:
    """The samples of all ranks, in the order in which they take them."""
    steps = [zip(*(of_rank[at][1] for of_rank in taken), strict=True) for at in batches]
    return [sample for step in steps for row in step for sample in row]


def test_another_number_of_ranks_takes_each_sample_that_is_left_once(run_ranks: RunRanks, tmp_path: Path) -> None:
    undisturbed = run_ranks(2, run, tmp_path, "bucketddp", SAMPLER, 0, "middle", False)[0]
    resumed, told = run_ranks(3, run_and_hear, tmp_path)[0]
    left, found = in_order(undisturbed.taken, range(2, 6)), in_order(resumed.taken, range(3))
    assert len(left) == 14
    assert found[:14] == left
    assert len(found) == 15, "3 ranks have equally many"
    assert [epoch for epoch, *_ in resumed.taken[0]] == [0] * 3 + [1] * 4
    assert "resumed on 3 ranks a run of 2: a batch of all ranks has 6 instead of 4 samples; 1 of those that are" in told


class Notes(Saves):
    """Notes torch's generator where an epoch begins."""

    state = torch.empty(0)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.state = torch.get_rng_state()


def with_the_generators_of_its_rank(folder: Path) -> None:
    notes, rank, path = Notes(), dist.get_rank(), folder / "saved.ckpt"
    given = {"ckpt_path": path, "callbacks": [notes], "max_epochs": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "resumed on 3 ranks")
        fit(Remembers(folder), ours(exact_resume=True), SAMPLER, 0, "epoch's end", 20, **given)
    saved = [of_rank["generators"][2] for of_rank in torch.load(path, weights_only=True)[KEY]["ranks"]]
    assert [torch.equal(notes.state, state) for state in saved] == [rank == 0, rank == 1]


def test_at_another_number_ranks_that_were_there_go_on_with_their_random_numbers(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(2, run, tmp_path, "bucketddp", SAMPLER, 0, "epoch's end", False)
    run_ranks(3, with_the_generators_of_its_rank, tmp_path)


def run_and_hear(folder: Path) -> tuple[Run, str]:
    with warnings.catch_warnings(record=True, action="always") as heard:
        found = run(folder, "bucketddp", SAMPLER, 0, "middle", True)
    return found, " ".join(str(each.message) for each in heard)


@on_ranks(2)
def test_a_checkpoint_holds_simple_types_and_only_with_the_option(tmp_path: Path) -> None:
    for strategy, name in ((ours(exact_resume=True), "with"), (ours(), "without"), (ddp(), "ddp")):
        folder = tmp_path / name
        fit(Remembers(folder, "batch", 2), strategy, SAMPLER, 0, "middle", 10, max_epochs=1)
        dist.barrier()
    found = {name: torch.load(tmp_path / name / "saved.ckpt", weights_only=True) for name in ("with", "without", "ddp")}
    assert KEY in found["with"]
    assert found["without"].keys() == found["ddp"].keys()


def other_ranks_with_a_state(folder: Path) -> None:
    with pytest.raises(ValueError, match="expected 2 ranks for this checkpoint, as when it was saved, found 1: only"):
        run(folder, "bucketddp", "with state_dict()", 0, "middle", True)


def test_states_of_dataloaders_go_to_as_many_ranks_alone(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, run, tmp_path, "bucketddp", "with state_dict()", 0, "middle", False)
    run_ranks(1, other_ranks_with_a_state, tmp_path)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Augmented()[index] for index in range(8)])


class Moody(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


@on_ranks(1)
def test_what_is_not_resumed_exactly_is_named_at_the_first_start(tmp_path: Path) -> None:
    def told(loader: Any, **options: Any) -> str:
        with warnings.catch_warnings(record=True, action="always") as heard:
            trainer(ours(exact_resume=True, **options), limit_train_batches=2).fit(Remembers(tmp_path), loader)
        return " ".join(str(each.message) for each in heard if "exact_resume" in str(each.message))

    start = "exact_resume: a resumed run will not go on exactly, as "
    assert (
        told(DataLoader(Endless(), 2))
        == f"{start}DataLoader gives no samples by index in batches, and has no state_dict()"
    )
    order = "Moody has neither state_dict() nor set_epoch(): its order must be fixed"
    assert told(DataLoader(Augmented(), 2, sampler=Moody())) == start + order
    assert told(DataLoader(Augmented(), 2, shuffle=True)) == ""
    for carried in ({"comm_hook": "powersgd"}, {"skip_norm_above": 9.0}):
        assert told(DataLoader(Augmented(), 2, shuffle=True), **carried) == ""
    state = "the state of the communication hook is not saved"
    own = {"comm_hook": lambda state, bucket: allreduce_hook(None, bucket), "comm_hook_state": object()}
    assert told(DataLoader(Augmented(), 2, shuffle=True), **own) == start + state
    with pytest.raises(ValueError, match="exact_resume=True goes by batches that all ranks have alike"):
        ours(exact_resume=True, uneven_inputs="world_size")


@on_ranks(2)
def test_a_preempted_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def preempted(folder: Path, batches: int, seed: int, **options: Any) -> Remembers:
        model = Remembers(folder)
        saves = PreemptionCheckpoint(folder, resume=True)
        callbacks = [Signals(batches), saves]
        fit(model, ours(exact_resume=True), SAMPLER, 0, "middle", seed, callbacks=callbacks, **options)
        return model

    class Signals(Saves):
        def __init__(self, batches: int) -> None:
            self.batches = batches

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if len(pl_module.taken) == self.batches and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    undisturbed = preempted(tmp_path / "a", -1, 10)
    with pytest.raises(SIGTERMException):
        preempted(tmp_path / "b", 2, 10)
    dist.barrier()
    resumed = preempted(tmp_path / "b", -1, 20)
    assert resumed.taken == undisturbed.taken[3:]
    assert all(map(torch.equal, undisturbed.parameters(), resumed.parameters()))


class Step(NamedTuple):
    epoch: int
    batch: int
    before: int  # steps
    samples: tuple[int, ...]
    drawn: float


class Follows(pl.LightningModule):
    """Remembers each step, and a random number that was drawn in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = torch.nn.Linear(8, 4), list[Step]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples, drawn = tuple(batch[0].tolist()), torch.rand(()).item()
        self.steps.append(Step(self.current_epoch, batch_idx, self.global_step, samples, drawn))
        return self.layer(batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def undisturbed_and_resumed(kind: str, folder: Path, workers: int, **options: Any) -> tuple[list[Step], list[Step]]:
    """The steps of a run of two epochs, and those of one that resumes it from the checkpoint of its third step."""
    runs = []
    for path in (None, folder / "step=3.ckpt"):
        torch.manual_seed(0 if path is None else 1)
        callbacks = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
        given = {"callbacks": callbacks, "enable_checkpointing": True, "use_distributed_sampler": True, "max_epochs": 2}
        model, loader = Follows(), DataLoader(Augmented(), 2, shuffle=True, num_workers=workers)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint|Checkpoint directory")
            trainer(STRATEGIES[kind](), **given, **options).fit(model, loader, ckpt_path=path)
        runs.append(model.steps)
    return runs[0], runs[1]


# https://github.com/Lightning-AI/pytorch-lightning/issues/19764 asks for the samples, 18780 for the random numbers too.
@pytest.mark.parametrize("kind", some_slow(STRATEGIES, ["bucketddp"]))
@on_ranks(2)
def test_in_the_middle_of_an_epoch_samples_batches_and_random_numbers_go_on(kind: str, tmp_path: Path) -> None:
    undisturbed, resumed = undisturbed_and_resumed(kind, tmp_path, 0)
    if kind == "bucketddp":
        assert resumed == undisturbed[3:]
        return
    assert (resumed[0].batch, resumed[0].before) == (3, 3), "the right batch by number"
    assert resumed[0].samples == undisturbed[0].samples, "the epoch's first"
    assert undisturbed[5].samples not in [step.samples for step in resumed if step.epoch == 0], "its last are left out"
    assert resumed[0].drawn != undisturbed[3].drawn


# https://github.com/Lightning-AI/pytorch-lightning/issues/21938: each restart trains on the same slice of the data.
@pytest.mark.parametrize("kind", some_slow(STRATEGIES, ["bucketddp"]))
@on_ranks(2)
def test_with_a_worker_the_epoch_after_a_resume_has_an_order_of_its_own(kind: str, tmp_path: Path) -> None:
    undisturbed, resumed = undisturbed_and_resumed(kind, tmp_path, 1, limit_train_batches=3)
    assert [step.epoch for step in resumed] == [1] * 3
    wanted = undisturbed[3:] if kind == "bucketddp" else undisturbed[:3]
    assert [step.samples for step in resumed] == [step.samples for step in wanted]
