"""Three ranks in plain PyTorch, without a Trainer: one fails or is killed, and the others say so within seconds.

As a script: <folder> [<what happens>:<to which rank>:<where the others wait> ...]
"""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP
from tests.launchers import free_port
from tests.models import Mlp, batch, loss_of
from tests.pool import ROOT

RANKS = range(3)
STEP = 3
SECONDS = 5.0
QUICK = ["killed:0:pass", "raises:2:broadcast", "ends:0:nowhere"]
SLOW = ["raises:0:pass", "sleeps:0:pass"]


def end(what: str) -> None:
    print(f"failed {time.time()}", flush=True)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises":
        raise ArithmeticError("no data today")
    if what == "ends":
        sys.exit(0)
    time.sleep(2)


def train(rank: int, port: int, what: str, which: int, where: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=len(RANKS), timeout=timedelta(seconds=60))
    model = BucketDDP(Mlp())
    for step in range(6):
        inputs, target = batch(step, rank)
        loss = loss_of(model(inputs), target)
        if step == STEP and rank == which:
            end(what)
        if step == STEP and where == "nowhere" and rank != which:
            time.sleep(2)  # and need nobody any more
            return
        if step == STEP and where == "broadcast":  # rank 1 waits for rank 0, which waits for nobody that fails
            dist.broadcast(torch.zeros(1), src=0)
        loss.backward()


def main() -> None:
    folder = Path(sys.argv[1])
    for scenario in sys.argv[2:]:
        what, which, where = scenario.split(":")
        port = free_port()
        pids: dict[int, int] = {}
        for rank in RANKS:
            if (pid := os.fork()) == 0:
                for number, name in ((1, "out"), (2, "err")):
                    with (folder / f"{scenario} {name} of rank {rank}").open("w") as file:
                        os.dup2(file.fileno(), number)
                try:
                    train(rank, port, what, int(which), where)
                finally:
                    print(f"left {time.time()}", flush=True)
                return
            pids[pid] = rank
        deadline = time.monotonic() + 40
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                code = folder / f"{scenario} code of rank {pids.pop(pid)}"
                code.write_text(str(os.waitstatus_to_exitcode(status)))
            elif time.monotonic() > deadline:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def time_of(what: str, output: str) -> float:
    found = re.search(rf"^{what} ([\d.]+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize("scenarios", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_a_rank_that_fails_ends_the_others_with_its_name(scenarios: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.test_plain_processes", str(tmp_path), *scenarios]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    for scenario in scenarios:
        what, which, _ = scenario.split(":")
        codes, outputs, errors = (
            [(tmp_path / f"{scenario} {kind} of rank {rank}").read_text() for rank in RANKS]
            for kind in ("code", "out", "err")
        )
        for rank in RANKS:
            at = f"{scenario}, rank {rank}: {errors[rank][-3000:]}"
            if what in ("ends", "sleeps"):  # which harms nobody
                assert (codes[rank], errors[rank]) == ("0", ""), at
                continue
            assert codes[rank] != "0", at
            if str(rank) != which:
                assert time_of("left", outputs[rank]) - time_of("failed", outputs[int(which)]) < SECONDS, at
                assert f"rank {which}" in errors[rank] or f"rank(s) {which}" in errors[rank], at
                assert what != "raises" or f"rank {which} raised ArithmeticError: no data today" in errors[rank], at


if __name__ == "__main__":
    main()
