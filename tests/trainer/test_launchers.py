"""Every way in which processes are started; a failure on one rank ends all; a killed job resumes where it was."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launchers import free_port, slurm, two_networks
from tests.lightning_models import PoolEnvironment
from tests.trainer import elastic_script

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*command: str, **environment: str) -> "subprocess.Popen[str]":
    """Starts a command as a user would, Python's if it begins with an option."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    # A session of its own, so that what it starts can be found, and ended, with it.
    return subprocess.Popen(
        [sys.executable, *command] if command[0].startswith("-") else command,
        cwd=ROOT,
        env={**known, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_over(process: "subprocess.Popen[str]") -> list[int]:
    """Processes of the session that a command was started in."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # has ended
            continue
        if int(fields[3]) == process.pid and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def finish(*processes: "subprocess.Popen[str]", timeout: float = 200) -> list[tuple[str, str, float]]:
    """Of each process its output, its errors and when it was seen to have ended, without anything left of it."""
    deadline = time.monotonic() + timeout
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=max(1, deadline - time.monotonic()))
            results.append((output, errors, time.time()))
            while left_over(process):
                assert time.monotonic() < deadline, f"{process.args} has left processes: {left_over(process)}"
                time.sleep(0.1)
        return results
    finally:
        for process in processes:
            for pid in left_over(process):
                os.kill(pid, 9)
            process.kill()
            process.wait(timeout=20)


# -- ways of starting --------------------------------------------------------------------------------

SCRIPT = ["-m", "tests.trainer.launch_script"]


def assert_trained(output: str, errors: str, *ranks: int) -> None:
    for rank in ranks:
        assert f"rank {rank}: 4 passes, difference 0" in output, errors[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bucketddp", "bucketddp_spawn", "forkserver"])
def test_every_start_method_trains_from_a_script(strategy: str) -> None:
    ((output, errors, _),) = finish(start(*SCRIPT, strategy))
    assert_trained(output, errors, 0, 1)
    assert "process group open at exit: False" in output
    assert "process group open at exit: True" not in output, "which aborts a gloo process now and then"
    assert "process groups alive at exit: 0" in output
    assert "process groups alive at exit: 1" not in output


@pytest.mark.slow
def test_a_notebook_trains_on_forked_ranks_and_refuses_others() -> None:
    # `python -i` is what Lightning takes for a notebook.
    interactive, refused = (start("-i", *SCRIPT, strategy) for strategy in ("bucketddp_notebook", "bucketddp"))
    (output, errors, _), (_, refusal, _) = finish(interactive, refused)
    assert_trained(output, errors, 0, 1)
    assert "is not compatible with an interactive environment" in refusal


@pytest.mark.slow
def test_slurms_variables_make_ranks() -> None:
    variables = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "JOB_ID": "7", "JOB_NAME": "training", "NODEID": "0"}
    environment = {f"SLURM_{name}": value for name, value in variables.items()}
    environment |= {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    tasks = [start(*SCRIPT, "bucketddp", **environment, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1")]
    for rank, (output, errors, _) in enumerate(finish(*tasks)):
        assert_trained(output, errors, rank)


def assert_learned(output: str, errors: str) -> None:
    assert re.search(r"test accuracy +0\.[89]", output), errors[-3000:]
    assert "2 ranks on cpu" in output
    assert re.search(r"largest difference of a weight between ranks +0  ", output)


@pytest.mark.slow
def test_the_slurm_job_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm(folder) as environment:
        command = ["sbatch", "--wait", f"--output={folder}/out", "examples/launch/slurm.sbatch", "--epochs", "2"]
        _, errors, _ = finish(start(*command, **environment))[0]
        output = (folder / "out").read_text()
    assert_learned(output, errors + output)


@pytest.mark.slow
def test_torchrun_on_two_machines() -> None:
    with two_networks() as machines:
        address = machines[0][1]
        nodes = [
            start(
                *["ip", "netns", "exec", name, "examples/launch/torchrun_two_nodes.sh", "--epochs", "2"],
                NODE_RANK=str(rank),
                MASTER_ADDR=address,
                GLOO_SOCKET_IFNAME=interface,
            )
            for rank, (name, _, interface) in enumerate(machines)
        ]
        (output, errors, _), _ = finish(*nodes)
    assert_learned(output, errors)


# -- failures ----------------------------------------------------------------------------------------

PLACES = [
    "setup:0",
    "training_step:1",
    "backward:0",
    "backward:1",
    "on_train_batch_end:0",
    "on_train_epoch_end:0",
    "validation_step:1",
    "on_save_checkpoint:0",
    "stuck:0",
    "sigterm:0",
    "sigterm:1",
    "training_step killed:0",
    "training_step killed:1",
]
SOME_PLACES = ["backward:0", "validation_step:1", "sigterm:1", "training_step killed:0"]


@pytest.mark.parametrize("places", [SOME_PLACES, pytest.param(PLACES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_failure_on_one_rank_ends_the_others_who_say_why(tmp_path: Path, places: list[str]) -> None:
    ((output, errors, _),) = finish(start("-m", "tests.failing_script", "bucketddp_fork", str(tmp_path), *places))
    for place in places:
        ended = re.search(rf"^{place} ended after ([\d.]+) s$", output, re.MULTILINE)
        assert ended, f"{place}: {errors[-2000:]}"
        assert float(ended[1]) < 15, place
        where, _, failed = place.partition(":")
        rank = 1 - int(failed)
        said = (tmp_path / f"{place} at rank {rank}").read_text()
        if not where.endswith("killed"):  # of which the launcher tells
            what = "SIGTERMException" if where == "sigterm" else f"ArithmeticError: no {where} today"
            assert f"rank {rank} stops because rank {failed} raised {what}" in said, place


@pytest.mark.slow
def test_every_launcher_ends_the_ranks_of_a_failed_one(tmp_path: Path) -> None:
    launches = {
        "popen": ["-m", "tests.failing_script", "bucketddp", "on_train_batch_end:0"],
        "torchrun": [*TORCHRUN, "-m", "tests.failing_script", "bucketddp", "on_train_epoch_end:1"],
    }
    processes = []
    for name, (*command, strategy, place) in launches.items():
        (tmp_path / name).mkdir()
        processes.append(start(*command, strategy, str(tmp_path / name), place))
    for (name, (*_, place)), (_, errors, ended) in zip(launches.items(), finish(*processes), strict=True):
        where, _, failed = place.partition(":")
        assert ended - float((tmp_path / name / "failed").read_text()) < 20, name
        rank = 1 - int(failed)
        said = (tmp_path / name / f"{place} at rank {rank}").read_text()
        assert f"rank {rank} stops because rank {failed} raised ArithmeticError: no {where} today" in said, name
        assert "terminate called" not in said + errors


def undisturbed(folder: Path) -> dict[str, Any]:
    return elastic_script.train(folder, killed=False, plugins=PoolEnvironment())


@pytest.mark.slow
def test_a_killed_job_resumes_as_if_nothing_had_happened(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    # A torchrun that restarts must not share the store of its own rendezvous with the ranks: they would find the
    # addresses of the killed ones there.
    process = start(
        *[*TORCHRUN, "--max-restarts", "1", "tests/trainer/elastic_script.py", str(tmp_path)],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    ((output, errors, _),) = finish(process)
    for rank in (0, 1):
        assert f"rank {rank} starts at step 0" in output
        assert f"rank {rank} starts at step 8" in output, errors[-3000:]
    for expected in run_ranks(2, undisturbed, tmp_path / "undisturbed"):
        for rank in (0, 1):
            torch.testing.assert_close(torch.load(tmp_path / f"weights of rank {rank}"), expected, rtol=0, atol=0)
