"""Three ranks in plain PyTorch, one of which ends in some way; run by test_plain_processes.py.

peers_script.py <folder> [<what happens>:<to which rank>:<where the others wait> ...]
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
            return
        if step == STEP and where == "broadcast":  # rank 1 waits for rank 0, which waits for nobody that fails
            dist.broadcast(torch.zeros(1), src=0)
        loss.backward()


def main() -> None:
    folder, *scenarios = sys.argv[1:]
    for scenario in scenarios:
        what, which, where = scenario.split(":")
        port = free_port()
        ranks: dict[int, int] = {}
        for rank in range(WORLD_SIZE):
            if (pid := os.fork()) == 0:
                for number, name in ((1, "out"), (2, "err")):
                    with (Path(folder) / f"{scenario} {name} of rank {rank}").open("w") as file:
                        os.dup2(file.fileno(), number)
                try:
                    train(rank, port, what, int(which), where)
                finally:
                    print(f"left {time.time()}", flush=True)
                return
            ranks[pid] = rank
        deadline = time.monotonic() + 40
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                code = Path(folder) / f"{scenario} code of rank {ranks.pop(pid)}"
                code.write_text(str(os.waitstatus_to_exitcode(status)))
            elif time.monotonic() > deadline:
                for pid in ranks:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


if __name__ == "__main__":
    main()
