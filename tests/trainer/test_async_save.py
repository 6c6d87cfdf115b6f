"""``async_save=True``: a thread writes checkpoints while training goes on.

Small models train on two ranks. ``writing_late()`` has the thread write at the last moment, when training waits for it:
so whatever does not wait finds no checkpoint, and whatever is saved by reference has changed by then.
"""

import copy
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_bucketddp import BucketDDPStrategy, PeerFailureError
from lightning_bucketddp.optim import checkpoint_places, checkpoint_writer
from lightning_bucketddp.optim.checkpoint_writer import CheckpointWriter
from lightning_bucketddp.trainer.preemption import PreemptionCheckpoint
from tests import lightning_models
from tests.fixtures.checkpoints import At
from tests.fixtures.checkpoints import held as values_of
from tests.lightning_models import Regression, close_to, data, ddp, trainer
from tests.pool import RunRanks, on_ranks
from tests.reference import all_ranks, group_store, logged, raises_soon
from tests.sampling import some_slow

ours = partial(lightning_models.ours, state_dict_type="sharded", async_save=True)


class Logging(Regression):
    """Counts and logs its steps, and a score that falls."""

    records = False

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        step = float(self.global_step)
        self.log_dict({"at": step, "again": step, "score": -step})
        return super().training_step([each.to(self.dtype) for each in batch], batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.seen)


def trainer_with(*callbacks: pl.Callback, strategy: Any = None, **options: Any) -> pl.Trainer:
    """A Trainer; with ``async_save=True`` and a sharded optimizer unless another strategy is given."""
    strategy = strategy or ours(shard_optimizer=True)
    return trainer(strategy, callbacks=list(callbacks), enable_checkpointing=True, **options)


def saving(folder: Path, every: int = 1, keep: int = -1, name: str = "{step}", **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, name, every_n_train_steps=every, save_top_k=keep, **options)


def complete(folder: Path) -> set[str]:
    """The checkpoints that are there, whole, by their names without a suffix."""
    return {path.stem for path in folder.glob("*.ckpt") if (path / ".metadata").is_file()}


class LateThread(ThreadPoolExecutor):
    """A thread that begins its tasks when somebody waits for a result, or for the thread's end."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.awaited = threading.Event()

    def submit(self, task: Any) -> Future[Any]:  # type: ignore[override]
        def run() -> None:
            assert self.awaited.wait(60), "nobody waits"
            task()

        def result() -> Any:
            self.awaited.set()
            return original()

        self.awaited.clear()
        future = super().submit(run)
        original, future.result = future.result, result  # type: ignore[method-assign,assignment]
        return future

    def shutdown(self, *given: Any, **options: Any) -> None:
        self.awaited.set()
        super().shutdown(*given, **options)


def writing_late() -> AbstractContextManager[object]:
    """Checkpoints of trainings that begin in this context are written by a ``LateThread``."""
    return patch.object(checkpoint_writer, "ThreadPoolExecutor", LateThread)


# -- what is saved, and when -------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "sharded": ({"shard_optimizer": True}, None),
    "sharded masters": ({"shard_optimizer": True, "grad_dtype": "float32"}, "bf16-true"),
}


@pytest.mark.parametrize("kind", some_slow(KINDS, {"plain", "sharded masters"}))
@on_ranks(2)
def test_a_checkpoint_holds_the_values_of_its_moment_though_training_goes_on(kind: str, tmp_path: Path) -> None:
    options, precision = KINDS[kind]
    expected: dict[int, Any] = {}
    there: dict[int, set[str]] = {}

    def note(runs: pl.Trainer) -> None:
        step = runs.global_step
        there[step] = complete(tmp_path)
        if step in (2, 4):  # they are saved after this call
            expected[step] = values_of(runs)

    runs = trainer_with(
        At("on_train_batch_end", note), saving(tmp_path, every=2), strategy=ours(**options), precision=precision
    )
    with writing_late():
        runs.fit(Logging(), data(5))
    assert there == {1: set(), 2: set(), 3: set(), 4: set(), 5: {"step=2"}}, "training has gone on"
    assert complete(tmp_path) == {"step=2", "step=4"}
    dist.barrier()
    for step in expected if dist.get_rank() == 0 else ():
        dcp_to_torch_save(tmp_path / f"step={step}.ckpt", tmp_path / "whole.pt")
        saved = torch.load(tmp_path / "whole.pt", weights_only=False)
        optimizer, names = saved["optimizers"][0], [name for name, _ in Logging().named_parameters()]
        state, masters = (
            {names[index]: value for index, value in expected[step][part].items()} for part in ("state", "masters")
        )
        found = saved["model"], optimizer["state"], optimizer.get("master_params", {})
        torch.testing.assert_close(found, (dict(expected[step]["weights"]), state, masters), rtol=0, atol=0)


@on_ranks(2)
def test_each_rank_writes_its_own_parts(tmp_path: Path) -> None:
    trainer_with(saving(tmp_path)).fit(Logging(), data(1))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step=1.ckpt").glob("*.distcp")}
    assert sorted(sizes) == ["__0_0.distcp", "__1_0.distcp"]
    assert min(sizes.values()) > 0.4 * max(sizes.values())


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
@on_ranks(2)
def test_callbacks_keep_the_same_checkpoints_as_without_the_option(asynchronous: bool, tmp_path: Path) -> None:
    rising = saving(tmp_path, keep=2, monitor="at", mode="max", save_last=True)
    falling = saving(tmp_path, keep=2, monitor="score", mode="max", save_last=True)  # the same names at the same steps
    unnumbered = saving(tmp_path, keep=2, monitor="again", mode="max", name="best")
    replaced = saving(tmp_path, keep=1, name="only")
    callbacks = rising, falling, unnumbered, replaced
    runs = trainer_with(*callbacks, strategy=ours(shard_optimizer=True, async_save=asynchronous))
    with writing_late():
        runs.fit(Logging(), data(3))
    dist.barrier()
    kept = {"step=2", "step=3", "last", "step=1-v1", "step=2-v1", "last-v1", "best", "best-v1", "only"}
    assert {path.stem for path in tmp_path.iterdir()} == complete(tmp_path) == kept
    paths = [(each.best_model_path, each.last_model_path, *sorted(each.best_k_models)) for each in callbacks]
    assert [[Path(path).stem for path in of_callback] for of_callback in paths] == [
        ["step=3", "last", "step=2", "step=3"],
        ["step=1-v1", "last-v1", "step=1-v1", "step=2-v1"],
        ["best", "", "best-v1", "best"],
        ["only", ""],
    ]
    assert not any("file_exists" in vars(each) for each in callbacks), "each has its own method again"
    assert runs.test(ckpt_path="best", verbose=False, dataloaders=data(1)) == [{"seen": 3}]


@on_ranks(2)
def test_an_old_checkpoint_is_removed_when_the_new_one_is_there(tmp_path: Path) -> None:
    there: dict[str, set[str]] = {}  # when a checkpoint was removed

    def remove(strategy: Any, path: str) -> None:
        there[Path(path).stem] = complete(tmp_path)
        original(strategy, path)

    original = pl.strategies.DDPStrategy.remove_checkpoint
    with writing_late(), patch.object(pl.strategies.DDPStrategy, "remove_checkpoint", remove):
        trainer_with(saving(tmp_path, keep=1, monitor="at", mode="max", save_last=True)).fit(Logging(), data(3))
    if dist.get_rank() == 0:
        assert there == {"step=1": {"step=1", "step=2", "last"}, "step=2": {"step=2", "step=3", "last"}}
    dist.barrier()
    assert complete(tmp_path) == {"step=3", "last"}


@on_ranks(2)
def test_a_second_checkpoint_in_a_step_waits_only_if_it_has_the_same_name(tmp_path: Path) -> None:
    def save_three(runs: pl.Trainer) -> None:
        for name, there in [("same", set()), ("other", set()), ("same", {"same", "other"})]:
            runs.save_checkpoint(tmp_path / f"{name}.ckpt")
            assert complete(tmp_path) == there
            runs.lightning_module.seen += 1

    with writing_late():
        trainer_with(At("on_train_batch_end", save_three)).fit(Logging(), data(1))
    (found,) = trainer(ours()).test(Logging(), data(1), ckpt_path=tmp_path / "same.ckpt", verbose=False)
    assert found == {"seen": 3}, "the last one is there"


@on_ranks(2)
def test_loading_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    def save_and_load(runs: pl.Trainer) -> None:
        runs.save_checkpoint(tmp_path / "one.ckpt")
        expected = copy.deepcopy(runs.lightning_module.state_dict())
        runs.lightning_module.seen += 7
        assert complete(tmp_path) == set()
        runs.strategy.load_checkpoint(tmp_path / "one.ckpt")
        torch.testing.assert_close(runs.lightning_module.state_dict(), expected, rtol=0, atol=0)

    with writing_late():
        trainer_with(At("on_train_batch_end", save_and_load)).fit(Logging(), data(1))


@on_ranks(2)
def test_a_checkpoint_outside_of_training_is_there_when_the_call_returns(tmp_path: Path) -> None:
    runs, model, again = trainer_with(), Logging(), Logging()
    with writing_late():
        runs.fit(model, data(1))
        runs.save_checkpoint(tmp_path / "after.ckpt")
    assert complete(tmp_path) == {"after"}
    trainer(ours()).test(again, data(1), ckpt_path=tmp_path / "after.ckpt", verbose=False)
    close_to(again, model)


@on_ranks(2)
def test_training_after_a_search_for_a_learning_rate_has_its_thread_again(tmp_path: Path) -> None:
    """The search saves, trains, and ends that training."""
    there: list[set[str]] = []
    note = At("on_train_batch_end", lambda runs: there.append(complete(tmp_path)))
    runs, model = trainer_with(note, saving(tmp_path), default_root_dir=tmp_path / "root"), Logging()
    with writing_late():
        Tuner(runs).lr_find(model, data(3), num_training=3, early_stop_threshold=None)
        assert complete(tmp_path) == set()
        there.clear()
        runs.fit(model, data(2))
    assert there == [set(), set()], "training has gone on"
    assert complete(tmp_path) == {"step=1", "step=2"}


# -- when something fails ----------------------------------------------------------------------------------------------

FULL = OSError("no space left")


def fail_on(rank: int, name: str) -> AbstractContextManager[object]:
    """Make the writing of one checkpoint fail on a rank."""

    def write(writer: Any, *given: Any) -> Any:
        if dist.get_rank() == rank and Path(writer.checkpoint_id).name == f"{name}.ckpt.partial":
            raise FULL
        return original(writer, *given)

    original = FileSystemWriter.write_data
    return patch.object(FileSystemWriter, "write_data", write)


def fail_to_name() -> AbstractContextManager[object]:
    """Make the renaming of each checkpoint fail that is complete."""
    return patch.object(checkpoint_places, "put_in_place", side_effect=FULL)


@pytest.mark.parametrize(
    ("fails", "kept"),
    [
        pytest.param(partial(fail_on, 1, "step=2"), set(), id="on one rank, found at the next save"),
        pytest.param(partial(fail_on, 0, "step=4"), {"step=2"}, id="on the first rank, found at the end"),
        pytest.param(fail_to_name, set(), id="when the checkpoint gets its name", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_a_failed_write_is_raised_on_all_ranks_and_the_checkpoint_before_stays(
    fails: Any, kept: set[str], tmp_path: Path
) -> None:
    runs = trainer_with(saving(tmp_path, every=2, keep=1))
    with fails(), raises_soon(RuntimeError, match=r"^saving to .*/step=\d.ckpt failed on rank \d: OSError: no space"):
        runs.fit(Logging(), data(4))
    assert runs.global_step == 4
    assert complete(tmp_path) == kept
    dist.barrier()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("bucketddp-checkpoint") for name in names), "the thread has ended"


def fail_in_step(step: int, rank: int | None = None) -> At:
    """Raise at the beginning of a step; on one rank or on all."""

    def fail(runs: pl.Trainer) -> None:
        if runs.global_step == step - 1 and rank in (None, dist.get_rank()):
            raise ArithmeticError("no batch today")

    return At("on_train_batch_start", fail)


@on_ranks(2)
def test_a_failed_write_is_logged_where_an_exception_comes_first(tmp_path: Path) -> None:
    with fail_on(1, "step=2"), logged("lightning_bucketddp") as said, pytest.raises(ArithmeticError):
        trainer_with(fail_in_step(4), saving(tmp_path, every=2)).fit(Logging(), data(4))
    assert any("rank" in text and "step=2.ckpt failed" in text and "no space left" in text for text in said), said


@on_ranks(2, fresh=True)
def test_an_exception_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    with writing_late(), raises_soon(ArithmeticError if dist.get_rank() == 1 else PeerFailureError):
        trainer_with(fail_in_step(4, rank=1), saving(tmp_path, every=2)).fit(Logging(), data(4))
    assert complete(tmp_path) == {"step=2"}


@on_ranks(2)
def test_a_preempted_job_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    def preempt(runs: pl.Trainer) -> None:
        if runs.global_step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks = PreemptionCheckpoint(tmp_path), At("on_train_batch_start", preempt), saving(tmp_path, every=2)
    at_the_exception: list[set[str]] = []
    look = At("on_exception", lambda runs: at_the_exception.append(complete(tmp_path)))
    with writing_late(), pytest.raises(SIGTERMException):
        trainer_with(*callbacks, look).fit(Logging(), data(6))
    assert at_the_exception == [{"step=2", "preempted"}]
    assert complete(tmp_path) == {"step=2", "preempted"}


def break_off(kind: str, fault: str, folder: Path) -> None:
    """Break each checkpoint but the first while it is written, after training has gone on."""

    def write(writer: Any, *given: Any, **options: Any) -> Any:
        path = given[1] if kind == "ddp" else writer.checkpoint_id
        if "step=1" not in str(path):
            assert went_on.wait(30), "training waits"
            if fault == "the job is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FULL
        return original(writer, *given, **options)

    went_on = threading.Event()
    note = At("on_train_batch_start", lambda runs: went_on.set() if runs.global_step == 2 else None)
    if kind == "ddp":
        writes, name = TorchCheckpointIO, "save_checkpoint"
        runs = trainer_with(note, saving(folder, keep=1), strategy=ddp(), plugins=[AsyncCheckpointIO()])
    else:
        writes, name = FileSystemWriter, "write_data"
        runs = trainer_with(note, saving(folder, keep=1))
    original = getattr(writes, name)
    with patch.object(writes, name, write), pytest.raises((OSError, RuntimeError)):
        runs.fit(Logging(), data(4))
    os._exit(0)  # with "ddp" the other rank still waits for this one


@pytest.mark.parametrize(
    ("kind", "fault"),
    some_slow(
        product(["bucketddp", "ddp"], ["the job is killed", "the disk is full"]),
        quick=[("bucketddp", "the job is killed")],
    ),
)
def test_the_checkpoint_before_stays_until_the_next_is_there(
    run_ranks: RunRanks, kind: str, fault: str, tmp_path: Path
) -> None:
    run_ranks(2, break_off, kind, fault, tmp_path, may_exit=[0, 1], fresh=True)
    assert complete(tmp_path) == ({"step=1"} if kind == "bucketddp" else set())
    assert {path.stem for path in tmp_path.glob("*.ckpt")} == complete(tmp_path), "with ddp none is left"


def die(folder: Path) -> None:
    """Rank 1 is killed while the third checkpoint is written."""

    def write(writer: Any, *given: Any) -> Any:
        if "step=3" in str(writer.checkpoint_id) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(writer, *given)

    original = FileSystemWriter.write_data
    with patch.object(FileSystemWriter, "write_data", write), raises_soon(PeerFailureError, RuntimeError):
        trainer_with(saving(folder, keep=1), max_epochs=50).fit(Logging(), data())


def go_on(folder: Path) -> float:
    """Train on from the second checkpoint. Return how many steps the model has seen."""
    model = Logging()
    trainer_with(max_steps=4, max_epochs=-1).fit(model, data(), ckpt_path=folder / "step=2.ckpt")
    return model.seen.item()


@pytest.mark.slow
def test_a_job_in_which_a_rank_is_killed_resumes_from_the_last_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(3, die, tmp_path, may_exit=[1], fresh=True)
    assert complete(tmp_path) == {"step=2"}
    for world_size in (1, 2):
        assert run_ranks(world_size, go_on, tmp_path) == [4] * world_size


def test_whole_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match=r'expected state_dict_type="sharded" with async_save=True, found \'full\''):
        BucketDDPStrategy(async_save=True)


@on_ranks(2)
def test_a_link_to_the_last_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected ModelCheckpoint\(save_last=True\) with async_save=True"):
        trainer_with(saving(tmp_path, save_last="link")).fit(Logging(), data(1))


# -- the thread itself -------------------------------------------------------------------------------------------------


@on_ranks(2, fresh=True)
def test_a_thread_that_fails_wakes_those_that_wait_for_it() -> None:
    def write() -> None:
        if dist.get_rank() == 1:
            raise FULL
        dist.barrier(writer.group)

    writer = CheckpointWriter(all_ranks())
    writer.begin(Path("one"), 1)
    writer.save(Path("one"), write)
    with raises_soon(RuntimeError, match=r"^saving to one failed on ranks 0 to 1: "):
        writer.settle()
    writer.end()


@on_ranks(2, fresh=True)
def test_a_thread_begins_after_all_ranks_have_its_group() -> None:
    """One that fails at once would break the group of a rank that still connects."""

    def make(*given: Any, **options: Any) -> Any:
        made = original(*given, **options)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="timeout"):
                store.wait(["the other rank may begin"], timedelta(seconds=0.5))
        return made

    original, store = dist.new_subgroups_by_enumeration, group_store()
    with patch.object(dist, "new_subgroups_by_enumeration", make):
        writer = CheckpointWriter(all_ranks())
    store.set("the other rank may begin", "")
    writer.end()
