"""One rank of three in plain PyTorch, one of which ends in some way; run by test_peers_in_scripts.py.

peers_script.py <rank> <port> <what happens> <to which rank> <where the others wait>
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP
from tests.launchers import free_port
from tests.models import Mlp, batch, loss_of

WORLD_SIZE = 3
STEP = 3


def end(what: str) -> None:
    """End in some way; returns if the rank goes on."""
    print(f"failed {time.time()}", flush=True)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises":
        raise ArithmeticError("no data today")
    if what == "ends":
        sys.exit(0)
    try:
        raise ArithmeticError("caught")
    except ArithmeticError:
        time.sleep(2)


def train(rank: int, port: int, what: str, which: int, where: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    model = BucketDDP(Mlp())
    for step in range(6):
        inputs, target = batch(step, rank)
        loss = loss_of(model(inputs), target)
        if step == STEP and rank == which:
            end(what)
        if step == STEP and where == "nowhere" and rank != which:
            time.sleep(2)  # and need nobody any more
            print(f"rank {rank} has done its work")
            return
        if step == STEP and where == "broadcast":  # rank 1 waits for rank 0, which waits for nobody that fails
            dist.broadcast(torch.zeros(1), src=0)
        loss.backward()
    print(f"rank {rank} has run {model.passes} passes")


def start(folder: Path, scenario: str) -> tuple[int, int] | None:
    """Forks the ranks of a scenario, and waits for them; in a rank, its number and the port."""
    port = free_port()
    ranks: dict[int, int] = {}
    for rank in range(WORLD_SIZE):
        if (pid := os.fork()) == 0:
            for number, name in ((1, "out"), (2, "err")):
                with (folder / f"{scenario} {name} of rank {rank}").open("w") as file:
                    os.dup2(file.fileno(), number)
            return rank, port
        ranks[pid] = rank
    deadline = time.monotonic() + 40
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            (folder / f"{scenario} code of rank {ranks.pop(pid)}").write_text(str(os.waitstatus_to_exitcode(status)))
        elif time.monotonic() > deadline:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return None


def main() -> None:
    folder, *scenarios = sys.argv[1:]
    for scenario in scenarios:
        if (found := start(Path(folder), scenario)) is not None:
            what, which, where = scenario.split(":")
            try:
                train(*found, what, int(which), where)
            finally:
                print(f"left {time.time()}", flush=True)
            return


if __name__ == "__main__":
    main()
