"""Every way in which processes are started; a failure on one rank ends all; a killed job resumes where it was."""

import copy
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.trainer import launchers
from lightning_bucketddp.trainer.launchers import TellingLauncher
from tests import failing_script
from tests.launchers import ROOT, assert_trained, free_port, run_elastic, run_script, two_networks
from tests.lightning_models import QUIET, PoolEnvironment, Regression
from tests.pool import RunRanks
from tests.reference import WHERE
from tests.trainer.test_preemption import Loader

Process = subprocess.Popen[str]


def start(*command: str, **environment: str) -> Process:
    """Starts a command as a user would, Python's if it begins with an option."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command) if command[0].startswith("-") else command
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A session of its own, so that what it starts can be found, and ended, with it.
    return subprocess.Popen(command, cwd=ROOT, env={**known, **environment}, text=True, start_new_session=True, **pipes)


def left_over(process: Process) -> list[int]:
    """Processes of the session that a command was started in."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # has ended
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(session) == process.pid and state != "Z":
                found.append(int(entry.parent.name))
    return found


def finish(*processes: Process) -> list[tuple[str, str]]:
    """Of each process its output and its errors; nothing may be left of it."""
    deadline = time.monotonic() + 200
    try:
        results = [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in processes]
        while left := [pid for process in processes for pid in left_over(process)]:
            assert time.monotonic() < deadline, f"processes are left: {left}"
            time.sleep(0.1)
        return results
    finally:
        for process in processes:
            for pid in left_over(process):
                os.kill(pid, 9)
            process.kill()
            process.wait(timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [["bucketddp"], ["bucketddp_spawn", "forkserver"]])
def test_every_start_method_trains_from_a_script(strategies: list[str]) -> None:
    ((output, errors),) = finish(start("-m", "tests.trainer.launch_script", *strategies))
    assert_trained(output, errors, fits=len(strategies))
    assert "process group open at exit: False" in output
    assert "process group open at exit: True" not in output, "which aborts a gloo process now and then"
    assert "process groups alive at exit: 0" in output
    assert "process groups alive at exit: 1" not in output
    assert ("the main process saves a file: True" in output) == ("forkserver" in strategies)


def assert_learned(output: str, errors: str) -> None:
    assert re.search(r"test accuracy +0\.[89]", output), errors[-3000:]
    assert "2 ranks on cpu" in output
    assert re.search(r"largest difference of a weight between ranks +0  ", output)


SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] && shift
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done
wait
"""


@pytest.mark.slow
def test_the_slurm_job_takes_its_ranks_from_slurms_variables(tmp_path: Path) -> None:
    """``srun`` is a stand-in."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    values = {"NNODES": 1, "NTASKS": 2, "NTASKS_PER_NODE": 2, "JOB_ID": 7, "JOB_NAME": "digits", "NODEID": 0}
    environment = {f"SLURM_{name}": str(value) for name, value in values.items()}
    environment |= {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    assert_learned(*finish(start("bash", "examples/launch/slurm.sbatch", "--epochs", "2", **environment))[0])


@pytest.mark.slow
def test_torchrun_on_two_machines() -> None:
    with two_networks() as machines:
        nodes = []
        for rank, (name, _, interface) in enumerate(machines):
            command = ["ip", "netns", "exec", name, "examples/launch/torchrun_two_nodes.sh", "--epochs", "2"]
            environment = {"NODE_RANK": str(rank), "MASTER_ADDR": machines[0][1], "GLOO_SOCKET_IFNAME": interface}
            nodes.append(start(*command, **environment))
        assert_learned(*finish(*nodes)[0])


SOME_PLACES = ["backward:0", "sigterm:1", "training_step killed:0"]
OTHER_PLACES = [
    *("setup:0", "validation_step:1", "training_step:1", "on_train_batch_end:0", "on_save_checkpoint:0", "stuck:0"),
    "sigterm:0",
]


def assert_told(folder: Path, place: str) -> None:
    where, _, failed = place.partition(":")
    rank = 1 - int(failed)
    said = (folder / f"{place} at rank {rank}").read_text()
    if not where.endswith("killed"):  # of which the launcher tells
        what = "got SIGTERM" if where == "sigterm" else rf"raised ArithmeticError( in backward)?: no {where} today"
        assert re.search(rf"rank {failed}{WHERE} {what}", said), place
    if where == "sigterm":  # an exit without words, but for these
        said_there = (folder / f"{place} at rank {failed}").read_text()
        assert len(re.findall(rf"rank {failed}{WHERE} got SIGTERM", said_there)) == 1
    assert "terminate called" not in said, place


@pytest.mark.parametrize("places", [SOME_PLACES, pytest.param(OTHER_PLACES, marks=pytest.mark.slow)])
def test_a_failure_ends_the_others_who_say_why(run_ranks: RunRanks, tmp_path: Path, places: list[str]) -> None:
    arguments = ("tests/failing_script.py", "bucketddp_fork", str(tmp_path), *places)
    (output,) = run_ranks(1, run_script, *arguments, bare=True)
    ended = dict(re.findall(r"^(.+) ended after ([\d.]+) s$", output, re.MULTILINE))
    for place in places:
        assert float(ended[place]) < 60, place
        assert_told(tmp_path, place)


@pytest.mark.slow
def test_popen_and_torchrun_end_the_ranks_of_a_failed_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    finish(start("-m", "tests.failing_script", "bucketddp", str(tmp_path), "on_train_batch_end:0"))
    assert_told(tmp_path, "on_train_batch_end:0")
    assert time.time() - float((tmp_path / "failed").read_text()) < 60
    elastic = (run_elastic, 0, failing_script.train, "bucketddp", tmp_path, "on_train_epoch_end", 1)
    assert run_ranks(1, *elastic, bare=True) == [False]
    assert_told(tmp_path, "on_train_epoch_end:1")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_of_lightnings_launcher_is_an_error_on_the_other(tmp_path: Path, killed: int) -> None:
    place, other = f"training_step killed:{killed}", 1 - killed
    finish(start("-m", "tests.failing_script", "bucketddp", str(tmp_path), place))
    said = (tmp_path / f"{place} at rank {other}").read_text()
    lost = "the process that serves the store has ended without a word: rank 0"
    cause = f"rank 1{WHERE} has ended with signal SIGKILL" if killed else f"{lost}{WHERE} or the launcher"
    error = [
        line for line in said.splitlines() if line.startswith(f"[rank{other}]: ")
    ]  # Lightning tells of a save, too
    assert [bool(re.search(cause, line)) for line in error[-3:]] == [False, False, True], said
    assert len(error) < 30, "where this rank waited, and why it stops"
    assert said.count("[c10d]") <= 2, "pages of torch, one for each request to a store that is gone"
    assert "terminate called" not in said
    failed = float((tmp_path / "failed").read_text())
    for moment in ("on_exception", "finally"):  # Lightning's own observer kills rank 0 within five seconds
        assert float((tmp_path / f"{moment} at rank {other}").read_text()) - failed < 5, moment


@pytest.mark.parametrize("make", [pl.Trainer, Fabric])
@pytest.mark.parametrize("listens", [True, False])
def test_the_launcher_tells_of_an_ended_rank_and_kills_where_nobody_listens(make: Any, listens: bool) -> None:
    code = "import sys; sys.stdin.read(); raise SystemExit(3)"
    ended = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)
    observer, done, told = subprocess_script._ChildProcessObserver, threading.Event(), []
    ours = launchers._TellsOfEndedRanks

    def tell(*words: object) -> bool:
        told.append(words)
        if listens:
            done.set()
        return listens

    with (
        patch.dict(os.environ),
        patch.object(launchers, "tell_end_of_rank", tell),
        patch.object(subprocess_script, "time", Mock(sleep=lambda seconds: ended.wait(20))),
        patch.object(observer, "_terminate_all") as lightning_kills,
        patch.object(ours, "_end_all", Mock(side_effect=done.set)) as killed,
    ):
        launcher = make(strategy="bucketddp", accelerator="cpu", devices=2).strategy.launcher
        launcher._call_children_scripts = lambda: launcher.procs.append(ended)
        assert launcher.launch(lambda: (ended.stdin.close(), done.wait(20))[1])  # it ends when the ranks run
        launcher.procs.clear()  # nothing is left to look for
        for thread in threading.enumerate():
            if isinstance(thread, observer) or thread.name == "bucketddp-ended-ranks":
                thread.join(20)
                assert not thread.is_alive()
    assert told[0] == (1, ended.pid, "has ended with exit code 3; its output tells why")
    assert killed.called is not listens
    assert not lightning_kills.called


PREEMPTED_SCRIPT = """
import atexit, os, signal, sys, time
import lightning.pytorch as pl
from lightning_bucketddp import PreemptionCheckpoint
from lightning_bucketddp.trainer import launchers
from tests.lightning_models import QUIET
from tests.trainer.test_preemption import STEP, Loader, Preempted

saves = PreemptionCheckpoint(sys.argv[1], exit_code=75)
fits = pl.Trainer(strategy="bucketddp", accelerator="cpu", devices=2, callbacks=saves, **QUIET)


def outlive() -> None:  # the process group is destroyed then, and the launcher's thread looks at the other rank
    print("the other rank ends with", fits.strategy.launcher.procs[0].wait(60))
    time.sleep(3 * launchers._LOOK_SECONDS)


if "LOCAL_RANK" not in os.environ:
    atexit.register(outlive)
fits.fit(Preempted(STEP, 2, (1,), signal.SIGTERM), Loader())
"""


@pytest.mark.slow
def test_a_preempted_script_ends_with_the_exit_code_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PREEMPTED_SCRIPT)
    process = start(sys.executable, str(tmp_path / "train.py"), str(tmp_path))
    ((output, errors),) = finish(process)
    assert "the other rank ends with 75" in output, errors[-3000:]
    assert process.returncode == 75


class Killed(Regression):
    """Rank 1 kills itself in the middle of the second epoch, the first time round."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 9 and self.global_rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step((batch[0] + self.global_rank, batch[1]), batch_idx)


def resume(folder: Path, *plugins: Any) -> None:
    """Trains two epochs of six steps, from the last checkpoint on where there is one, and saves what comes out."""
    torch.manual_seed(1)
    saves = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True)
    options = {**QUIET, "accelerator": "cpu", "devices": 2, "max_epochs": 2, "enable_checkpointing": True}
    trainer, model = pl.Trainer(strategy="bucketddp", callbacks=saves, plugins=list(plugins), **options), Killed()
    trainer.fit(model, Loader(), ckpt_path="last")
    torch.save((len(model.before_step), model.state_dict()), folder / f"rank {trainer.global_rank}")


@pytest.mark.slow
def test_a_killed_job_resumes_as_if_nothing_had_happened(run_ranks: RunRanks, tmp_path: Path) -> None:
    folders = tmp_path / "killed", tmp_path / "undisturbed"
    for folder in folders:
        folder.mkdir()
    assert run_ranks(1, run_elastic, 1, resume, folders[0], bare=True) == [True]
    run_ranks(2, resume, folders[1], PoolEnvironment())
    for rank in (0, 1):
        (steps, found), (_, expected) = (torch.load(folder / f"rank {rank}") for folder in folders)
        assert steps == 4, "from the checkpoint on"
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("raised", "code"), [(SIGTERMException(), 1), (SystemExit(), 1), (SystemExit(3), 3)])
def test_a_rank_that_ends_early_has_an_exit_code(raised: SystemExit, code: int) -> None:
    # With code 0 the main process takes it for done, and waits for its result without end, as under ddp_spawn.
    launcher = TellingLauncher(BucketDDPStrategy(start_method="spawn"), "spawn")
    raises = patch.object(_MultiProcessingLauncher, "_wrapping_function", side_effect=raised)
    with raises, pytest.raises(SystemExit) as caught:
        launcher._wrapping_function(0)
    assert caught.value.code == code


@pytest.mark.parametrize("kind", [launchers.ScriptLauncher, launchers.FabricScriptLauncher])
def test_a_copied_launcher_has_started_no_process(kind: Any) -> None:
    launcher = kind(PoolEnvironment(), num_processes=2, num_nodes=1)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        launcher.procs = [process]
        for copied in (copy.deepcopy(launcher), pickle.loads(pickle.dumps(launcher))):
            assert (copied.procs, copied.num_processes) == ([], 2)
        assert launcher.procs == [process]
