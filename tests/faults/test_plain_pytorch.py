"""Plain PyTorch: no warnings, gradients once in memory, and failing processes of three ranks.

As a script: <folder>
"""

import ctypes
import gc
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.peers import abort_listener, roll_call
from tests.launchers import free_port
from tests.models import MODELS, Mlp, batch, build
from tests.pool import ROOT, on_ranks
from tests.reference import WHERE, backward, loss_at

PARAMETERS = 12
ELEMENTS = 1024 * 1024  # of fp32: 4 MiB each
M_MMAP_THRESHOLD = -3  # of <malloc.h>


@on_ranks(2)
def test_plain_training_warns_of_nothing() -> None:
    rank = dist.get_rank()
    for name in MODELS:
        with warnings.catch_warnings(action="error"):
            model = BucketDDP(build(name), bucket_cap_mb=25, find_unused_parameters=name == "shared_weights")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(4):
                with model.no_sync():
                    backward(model, 2 * step)
                backward(model, 2 * step + 1)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if name != "checkpoint_reentrant":  # torch warns of it itself: without gradients it is of no use
                with torch.no_grad():
                    model.eval()(batch(99, rank)[0])
            model.load_state_dict(model.state_dict())
            assert model.passes == 4
            if name != "shared_weights":
                model.close()  # a script may leave it open too


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.full((ELEMENTS,), 0.5) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.mean() * x for row in self.rows]).sum()


def own_bytes() -> int:
    """Of memory that is no file's: the system takes pages of files away when it likes."""
    gc.collect()
    (kib,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@on_ranks(2, fresh=True)
def test_gradients_exist_once_in_memory() -> None:
    # Without this, glibc may keep freed blocks of several MiB, and the growth would not be what is in use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    BucketDDP(nn.Linear(1, 1))(torch.ones(1, 1)).backward()  # brings in the code, and starts the threads
    module, size = Wide(), PARAMETERS * ELEMENTS * 4
    before = own_bytes()
    model, grown = BucketDDP(module), []
    for step in range(6):
        model.zero_grad()
        with model.no_sync() if step == 5 else nullcontext():
            model(torch.tensor(float(step + dist.get_rank()))).backward()
        if step >= 2:  # by then it has found its order
            grown.append((own_bytes() - before) / size)
    assert 0.95 < statistics.median(grown) < 1.1, "torch DDP's grow twice as much"


RANKS = range(3)
STEP, SECONDS = 3, 30.0  # half the timeout of collectives
SCENARIOS = ["killed:0:pass", "raises:2:broadcast", "ends:0:nowhere"]
"""What happens to which rank, and where the others wait."""


def end(what: str) -> None:
    print(time.time(), flush=True)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises":
        raise ArithmeticError("no data today")
    sys.exit(0)


def train(rank: int, port: int, what: str, which: int, where: str) -> None:
    torch.set_num_threads(1)
    abort_listener._OWN_ERROR_SECONDS = roll_call.ANSWER_SECONDS = 20  # a busy machine may be late to raise
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=len(RANKS), timeout=timedelta(seconds=60))
    model = BucketDDP(Mlp())
    for step in range(6):
        loss = loss_at(model, step)
        if step == STEP and rank == which:
            end(what)
        if step == STEP and where == "nowhere" and rank != which:
            time.sleep(2)  # and need nobody any more
            return
        if step == STEP and where == "broadcast":  # rank 1 waits for rank 0, which waits for nobody that fails
            dist.broadcast(torch.zeros(1), src=0)
        loss.backward()


def main() -> None:
    gc.freeze()  # else each rank, at its end, takes seconds to go through what was imported
    folder, codes = Path(sys.argv[1]), {}
    for scenario in SCENARIOS:
        what, which, where = scenario.split(":")
        port = free_port()
        for rank in RANKS:
            if (pid := os.fork()) == 0:
                signal.alarm(100)
                for number, name in ((1, "out"), (2, "err")):
                    with (folder / f"{scenario} {name} of rank {rank}").open("w") as file:
                        os.dup2(file.fileno(), number)
                try:
                    train(rank, port, what, int(which), where)
                finally:
                    print(time.time(), flush=True)
                return
            codes[pid] = folder / f"{scenario} code of rank {rank}"
    for _ in range(len(codes)):
        pid, status = os.wait()
        codes[pid].write_text(str(os.waitstatus_to_exitcode(status)))


def test_a_rank_that_fails_ends_the_others_with_its_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.test_plain_pytorch", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    for scenario in SCENARIOS:
        what, which, _ = scenario.split(":")
        codes, outputs, errors = (
            [(tmp_path / f"{scenario} {kind} of rank {rank}").read_text() for rank in RANKS]
            for kind in ("code", "out", "err")
        )
        for rank in RANKS:
            at = f"{scenario}, rank {rank}: {errors[rank][-3000:]}"
            if what == "ends":  # which harms nobody
                assert codes[rank] == "0", at
                assert not re.search("rank |Traceback", errors[rank]), at  # other libraries may complain at exit
                continue
            assert codes[rank] != "0", at
            if str(rank) != which:
                assert float(outputs[rank]) - float(outputs[int(which)].split()[0]) < SECONDS, at
                cause = f"rank {which}{WHERE}" + " raised ArithmeticError: no data today" * (what == "raises")
                assert len(re.findall(cause, errors[rank])) == 1, at
                assert re.search(cause, errors[rank].rstrip().splitlines()[-1]), at
                assert errors[rank].count(f"[rank{rank}]: ") < 20, at
                assert errors[rank].count("[c10d]") <= 2, "pages of torch, one for each request to a store that is gone"


if __name__ == "__main__":
    main()
