"""``async_save=True``: checkpoints are those of the moment of the save, are there when they have their names, and fail
on all ranks."""

import copy
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
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
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_bucketddp import BucketDDPStrategy, PeerFailureError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.optim import checkpoint, checkpoint_places
from lightning_bucketddp.optim.checkpoint_writer import CheckpointWriter
from lightning_bucketddp.trainer.preemption import PreemptionCheckpoint
from tests import lightning_models
from tests.fixtures.checkpoints import At
from tests.fixtures.checkpoints import held as values_of
from tests.lightning_models import Regression, close_to, data, ddp, trainer
from tests.pool import RunRanks, on_ranks
from tests.reference import all_ranks, logged, raises_soon
from tests.sampling import some_slow

Options = dict[str, Any]
ours = partial(lightning_models.ours, state_dict_type="sharded", async_save=True)
KINDS: dict[str, tuple[Options, Any]] = {
    "plain": ({}, None),
    "sharded": ({"shard_optimizer": True}, None),
    "sharded masters": ({"shard_optimizer": True, "grad_dtype": "float32"}, "bf16-true"),
}


class Logging(Regression):
    """Logs the step, which grows, and a score, which falls."""

    records = False

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        at = float(self.global_step)
        self.log_dict({"at": at, "again": at, "score": -at})
        return super().training_step((batch[0].to(self.dtype), batch[1].to(self.dtype)), batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.seen)


def saving(folder: Path, **options: Any) -> ModelCheckpoint:
    options = {"every_n_train_steps": 1, "save_top_k": -1, **options}
    return ModelCheckpoint(folder, options.pop("filename", "{step}"), **options)


def fits(callbacks: list[pl.Callback], strategy: Any = None, **options: Any) -> pl.Trainer:
    made = ours(shard_optimizer=True) if strategy is None else strategy
    return trainer(made, callbacks=callbacks, enable_checkpointing=True, **options)


def complete(folder: Path) -> set[str]:
    """Names without a suffix of the checkpoints that are there, whole."""
    return {path.stem for path in folder.glob("*.ckpt") if (path / ".metadata").is_file()}


@contextmanager
def held_back() -> Iterator[list[str]]:
    """Hold the thread that writes until training waits for it. Yields what happens, in order."""
    gate, happened = threading.Event(), list[str]()

    def write(*args: Any, storage_writer: Any, **options: Any) -> Any:
        name = Path(storage_writer.checkpoint_id).name.removesuffix(".ckpt.partial")
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(30), "nobody waits"
        happened.append(f"writes {name}")
        return original["save"](*args, storage_writer=storage_writer, **options)

    def begins(writer: CheckpointWriter, path: Path, *given: Any) -> None:
        gate.clear()
        happened.append(f"saves {path.stem}")
        original["begins"](writer, path, *given)

    def waits(name: str, writer: CheckpointWriter) -> None:
        if writer._paths:
            happened.append("waits")
        gate.set()
        original[name](writer)

    original: dict[str, Any] = {"save": checkpoint.save, "begins": CheckpointWriter.save}
    original |= {name: getattr(CheckpointWriter, name) for name in ("settle", "end")}
    waiting = {name: lambda writer, name=name: waits(name, writer) for name in ("settle", "end")}
    with patch.object(checkpoint, "save", write), patch.multiple(CheckpointWriter, save=begins, **waiting):
        yield happened


@pytest.mark.parametrize("kind", some_slow(KINDS, {"plain", "sharded masters"}))
@on_ranks(2)
def test_what_is_saved_are_the_values_of_the_moment_though_training_goes_on(kind: str, tmp_path: Path) -> None:
    options, precision = KINDS[kind]
    expected: dict[int, Any] = {}
    steps: list[int] = []

    def note(runs: pl.Trainer) -> None:
        steps.append(runs.global_step)
        expected[runs.global_step] = values_of(runs)
        if runs.global_step % 2:  # two or four were made, and steps since
            assert complete(tmp_path) == {f"step={step}" for step in range(2, runs.global_step - 1, 2)}

    with held_back() as happened:
        saves = saving(tmp_path, every_n_train_steps=2)
        fits([At("on_train_batch_end", note), saves], ours(**options), precision=precision).fit(Logging(), data())
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [what for what in happened if what != "waits"] == [
        f"{what} step={step}" for step in (2, 4, 6) for what in ("saves", "writes")
    ]
    dist.barrier()
    for step in (2, 4, 6) if dist.get_rank() == 0 else ():
        dcp_to_torch_save(tmp_path / f"step={step}.ckpt", tmp_path / "one.pt")
        saved = torch.load(tmp_path / "one.pt", weights_only=False)
        torch.testing.assert_close(saved["model"], dict(expected[step]["weights"]), rtol=0, atol=0)
        optimizer = saved["optimizers"][0]
        names = dict(enumerate(name for name, _ in Logging().named_parameters()))
        for part, found in (("state", "state"), ("masters", "master_params")):
            state = {names[index]: value for index, value in expected[step][part].items()}
            torch.testing.assert_close(optimizer.get(found, {}), state, rtol=0, atol=0)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step=2.ckpt").glob("*.distcp")}
    assert sorted(sizes) == ["__0_0.distcp", "__1_0.distcp"]
    assert min(sizes.values()) > 0.4 * max(sizes.values()), "each rank writes its own parts"


def names_and_best(folder: Path, asynchronous: bool) -> list[Any]:
    """What several callbacks leave, all in one folder."""
    folder.mkdir(exist_ok=True)
    callbacks = [
        saving(folder, monitor="at", mode="max", save_top_k=2, save_last=True),
        saving(folder, monitor="score", mode="max", save_top_k=2, save_last=True),  # the same names at the same steps
        saving(folder, filename="best", monitor="again", mode="max", save_top_k=2),
        saving(folder, filename="only", save_top_k=1, every_n_train_steps=2),
    ]
    runs = fits(callbacks, ours(shard_optimizer=True, async_save=asynchronous))
    runs.fit(Logging(), data())
    assert not any("file_exists" in vars(callback) for callback in callbacks)
    dist.barrier()
    assert {path.stem for path in folder.iterdir()} == complete(folder)
    (found,) = runs.test(ckpt_path="best", verbose=False, dataloaders=data())
    paths = [(each.best_model_path, each.last_model_path, sorted(each.best_k_models)) for each in callbacks]
    return [complete(folder), found, repr(paths).replace(str(folder), "")]


@on_ranks(2)
def test_callbacks_keep_the_same_checkpoints_as_without_the_option(tmp_path: Path) -> None:
    expected = names_and_best(tmp_path / "synchronous", False)
    with held_back():
        assert names_and_best(tmp_path / "asynchronous", True) == expected
    assert len(expected[0]) > 6
    assert expected[1] == {"seen": 6}


@on_ranks(2)
def test_an_old_checkpoint_is_removed_when_the_new_one_is_there(tmp_path: Path) -> None:
    """A step's two checkpoints do not wait for each other."""
    removed: list[tuple[str, set[str]]] = []

    def remove(strategy: Any, path: str) -> None:
        removed.append((Path(path).stem, complete(tmp_path)))
        original(strategy, path)

    original = pl.strategies.DDPStrategy.remove_checkpoint
    saves = saving(tmp_path, monitor="at", mode="max", save_top_k=2, save_last=True)
    with held_back() as happened, patch.object(pl.strategies.DDPStrategy, "remove_checkpoint", remove):
        fits([saves]).fit(Logging(), data())
    if dist.get_rank() == 0:
        assert [(name, there - {"last"}) for name, there in removed] == [
            (f"step={step - 2}", {f"step={one}" for one in range(step - 2, step + 1)}) for step in range(3, 7)
        ]
        assert all("last" in there for _, there in removed)
    waits = happened.index("waits", happened.index("saves step=1"))
    assert happened[:waits][-2:] == ["saves step=1", "saves last"]
    dist.barrier()
    assert complete(tmp_path) == {"step=5", "step=6", "last"}


@on_ranks(2)
def test_a_second_checkpoint_of_the_same_name_waits_for_the_first(tmp_path: Path) -> None:
    def save_twice(runs: pl.Trainer) -> None:
        if runs.global_step == 2:
            runs.save_checkpoint(tmp_path / "same.ckpt")
            runs.save_checkpoint(tmp_path / "same.ckpt")

    with held_back() as happened:
        trainer(ours(), callbacks=[At("on_train_batch_end", save_twice)]).fit(Logging(), data())
    assert happened == 2 * ["saves same", "waits", "writes same"]


FULL = OSError("no space left")


def fail_on(rank: int, name: str) -> Any:
    """Make the writing of one checkpoint fail on a rank."""

    def write(writer: Any, *given: Any) -> Any:
        if dist.get_rank() == rank and Path(writer.checkpoint_id).name == f"{name}.ckpt.partial":
            raise FULL
        return original(writer, *given)

    original = FileSystemWriter.write_data
    return patch.object(FileSystemWriter, "write_data", write)


def no_name(path: Path) -> None:
    raise FULL


FAILS: dict[str, tuple[Any, int, set[str]]] = {
    "one rank, before the next save": (partial(fail_on, 1, "step=2"), 4, set()),
    "the first rank, at the end": (partial(fail_on, 0, "step=6"), 6, {"step=4"}),
    "the name": (lambda: patch.object(checkpoint_places, "put_in_place", no_name), 4, set()),
}


@pytest.mark.parametrize("how", FAILS)
@on_ranks(2)
def test_an_error_of_the_thread_is_raised_on_all_ranks(how: str, tmp_path: Path) -> None:
    """At the next save, or at the end. What it was to replace stays."""
    breaks, step, kept = FAILS[how]
    runs = fits([saving(tmp_path, every_n_train_steps=2, save_top_k=1)])
    words = r"^saving to .*/step=\d.ckpt failed on rank \d: OSError: no space"
    with breaks(), raises_soon(RuntimeError, match=words):
        runs.fit(Logging(), data())
    assert runs.global_step == step
    assert complete(tmp_path) == kept
    dist.barrier()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("bucketddp-checkpoint") for name in names), "it has ended"


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

    original, store = dist.new_subgroups_by_enumeration, Collectives(None).store("a test of the writer")
    with patch.object(dist, "new_subgroups_by_enumeration", make):
        writer = CheckpointWriter(all_ranks())
    store.set("the other rank may begin", "")
    writer.end()


LEFT = {"ddp": set(), "bucketddp": {"step=1"}}
"""Checkpoints that are left when the second one could not be written."""


def break_off(kind: str, fault: str, folder: Path) -> None:
    """Break each checkpoint but the first while it is written, after training has gone on."""

    def write(*given: Any, **options: Any) -> Any:
        path = given[2] if kind == "ddp" else given[0].checkpoint_id
        if "step=1" not in str(path):
            assert passed.wait(30), "training waits"
            if fault == "the job is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FULL
        return original(*given, **options)

    def note(runs: pl.Trainer) -> None:
        if runs.global_step == 2:
            passed.set()

    passed = threading.Event()
    writes, name = (TorchCheckpointIO, "save_checkpoint") if kind == "ddp" else (FileSystemWriter, "write_data")
    original = getattr(writes, name)
    strategy, plugins = (ddp(), [AsyncCheckpointIO()]) if kind == "ddp" else (ours(shard_optimizer=True), None)
    callbacks = [At("on_train_batch_start", note), saving(folder, save_top_k=1)]
    with patch.object(writes, name, write), pytest.raises((OSError, RuntimeError)):
        fits(callbacks, strategy, plugins=plugins).fit(Logging(), data())
    os._exit(0)  # with "ddp" the other rank still waits for this one


@pytest.mark.parametrize("fault", ["the job is killed", "the disk is full"])
@pytest.mark.parametrize("kind", some_slow(LEFT, {"bucketddp"}))
def test_the_checkpoint_before_stays_until_the_next_is_there(
    run_ranks: RunRanks, kind: str, fault: str, tmp_path: Path
) -> None:
    run_ranks(2, break_off, kind, fault, tmp_path, may_exit=[0, 1], fresh=True)
    there = {path.stem for path in tmp_path.glob("*.ckpt")}
    assert there == LEFT[kind]
    assert kind == "ddp" or complete(tmp_path) == there


def die(folder: Path) -> str:
    """Rank 1 is killed while the third checkpoint is written."""

    def write(writer: Any, *given: Any) -> Any:
        if "step=3" in str(writer.checkpoint_id) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(writer, *given)

    original = FileSystemWriter.write_data
    with patch.object(FileSystemWriter, "write_data", write), raises_soon(PeerFailureError, RuntimeError) as error:
        fits([saving(folder, save_top_k=1)], max_epochs=50).fit(Logging(), data())
    return str(error.value)


def go_on(folder: Path) -> float:
    model = Logging()
    fits([], max_steps=4, max_epochs=-1).fit(model, data(), ckpt_path=folder / "step=2.ckpt")
    return model.seen.item()


@pytest.mark.slow
def test_a_job_that_is_killed_leaves_the_last_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(3, die, tmp_path, may_exit=[1], fresh=True)
    assert complete(tmp_path) == {"step=2"}
    for world_size in (1, 2):
        assert run_ranks(world_size, go_on, tmp_path) == [4] * world_size


@on_ranks(2)
def test_a_preempted_job_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    def preempt(runs: pl.Trainer) -> None:
        if runs.global_step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [At("on_train_batch_start", preempt), saving(tmp_path, every_n_train_steps=2)]
    with held_back() as happened, pytest.raises(SIGTERMException):
        fits([PreemptionCheckpoint(tmp_path), *callbacks]).fit(Logging(), data())
    assert happened == ["saves step=2", "waits", "writes step=2", "writes preempted"]
    assert complete(tmp_path) == {"step=2", "preempted"}


@on_ranks(2, fresh=True)
def test_an_exception_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    def fail(runs: pl.Trainer) -> None:
        if runs.global_step == 3 and dist.get_rank() == 1:
            raise ArithmeticError("no batch today")

    callbacks = [At("on_train_batch_start", fail), saving(tmp_path, every_n_train_steps=2)]
    with held_back() as happened, raises_soon(ArithmeticError if dist.get_rank() else PeerFailureError):
        fits(callbacks).fit(Logging(), data())
    assert happened == ["saves step=2", "waits", "writes step=2"]
    assert complete(tmp_path) == {"step=2"}


@on_ranks(2)
def test_loading_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    found: list[Tensor] = []

    def load(runs: pl.Trainer) -> None:
        if runs.global_step == 3:
            before = copy.deepcopy(runs.lightning_module.state_dict())
            runs.strategy.load_checkpoint(tmp_path / "step=2.ckpt")
            found.append(runs.lightning_module.seen.clone())
            runs.lightning_module.load_state_dict(before)

    with held_back() as happened:
        fits([At("on_train_batch_end", load), saving(tmp_path, every_n_train_steps=2)]).fit(Logging(), data())
    assert found == [2]
    assert happened[:3] == ["saves step=2", "waits", "writes step=2"]


@on_ranks(2)
def test_checkpoints_are_written_at_once_outside_of_training(tmp_path: Path) -> None:
    """In the search for a learning rate, too, which ends a training; the one that follows has its thread again."""
    with held_back() as happened:
        runs, model = fits([saving(tmp_path, every_n_train_steps=6)], default_root_dir=tmp_path / "root"), Logging()
        Tuner(runs).lr_find(model, data(20), num_training=20, early_stop_threshold=None)
        assert not any("step" in what for what in happened)
        runs.fit(model, data())
        runs.save_checkpoint(tmp_path / "after.ckpt")
    assert [what for what in happened if what != "waits"][-3:] == ["saves step=6", "writes step=6", "writes after"]
    again = Logging()
    trainer(ours()).test(again, data(), ckpt_path=tmp_path / "after.ckpt", verbose=False)
    close_to(again, model)


@on_ranks(2)
def test_a_failed_save_is_logged_where_an_exception_comes_first(tmp_path: Path) -> None:
    def fail(runs: pl.Trainer) -> None:
        if runs.global_step == 3:
            raise ArithmeticError("no batch today")

    callbacks = [At("on_train_batch_start", fail), saving(tmp_path, every_n_train_steps=2)]
    with fail_on(1, "step=2"), logged("lightning_bucketddp") as said, pytest.raises(ArithmeticError):
        fits(callbacks).fit(Logging(), data())
    assert any("rank" in text and "step=2.ckpt failed" in text and "no space left" in text for text in said), said


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r'expected state_dict_type="sharded" with async_save=True, found \'full\''):
        BucketDDPStrategy(async_save=True)


@on_ranks(2)
def test_a_link_to_the_last_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected ModelCheckpoint\(save_last=True\) with async_save=True"):
        fits([saving(tmp_path, save_last="link")]).fit(Logging(), data())
