"""In processes of their own: scripts in plain PyTorch print no warnings, and gradients exist once in memory."""

import ctypes
import gc
import os
import re
import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.inside import views_of
from tests.models import MODELS
from tests.plain_script import train

PARAMETERS = 24
ELEMENTS = 1024 * 1024  # of fp32: 4 MiB each
M_MMAP_THRESHOLD = -3  # of <malloc.h>
ROOT = Path(__file__).parent.parent


def run_processes(commands: list[list[str]], **environment: str) -> list[tuple[str, str]]:
    """Runs the commands at once; all must end well. Returns what each wrote to stdout and stderr."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return outputs


def train_all() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in MODELS:
            train(name, dist.get_rank())
    return len(MODELS)


def test_plain_training_warns_of_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, train_all) == [len(MODELS)] * 2


@pytest.mark.slow
def test_a_script_trains_without_warnings(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    outputs = run_processes([["-W", "error", "-m", "tests.plain_script", str(rank), "2", store] for rank in (0, 1)])
    for rank, (printed, errors) in enumerate(outputs):
        assert re.fullmatch(rf"rank {rank} trained [0-9]+ models\n", printed)
        assert errors == ""


class Wide(nn.Module):
    """Much memory and little compute."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.full((ELEMENTS,), 0.5) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.mean() * x for row in self.rows]).sum()


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory(kind: str) -> tuple[float, float]:
    """The growth of this process by gradients, and the storages that can be reached, in parts of the parameters."""
    # Without this, glibc may keep freed blocks of several MiB, and the growth would not be what is in use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    wrap = BucketDDP if kind == "bucketddp" else DistributedDataParallel
    small = wrap(nn.Linear(1, 1))  # brings in the code, and starts the threads
    small(torch.ones(1, 1)).backward()
    module = Wide()
    size = PARAMETERS * ELEMENTS * 4
    before = resident_bytes()
    model = wrap(module)
    grown = []
    for step in range(4):
        model.zero_grad()
        model(torch.tensor(float(step + dist.get_rank()))).backward()
        assert module.rows[0].grad[0].item() == torch.tensor((step + 0.5) / ELEMENTS).item()
        if step >= 2:  # by then both have found their order
            grown.append((resident_bytes() - before) / size)
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in module.parameters()}
    if isinstance(model, BucketDDP):
        for view in views_of(model).values():
            storages[view.untyped_storage().data_ptr()] = view.untyped_storage().nbytes()
    return statistics.median(grown), sum(storages.values()) / size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@pytest.mark.parametrize(
    ("kind", "least", "most"), [("bucketddp", 0.95, 1.1), pytest.param("ddp", 1.9, 2.2, marks=pytest.mark.slow)]
)
def test_gradients_exist_once_where_ddp_has_them_twice(
    run_ranks: Callable[..., list[Any]], kind: str, least: float, most: float
) -> None:
    for grown, reachable in run_ranks(2, memory, kind, fresh=True):
        assert least < grown < most
        assert kind == "ddp" or 0.99 < reachable < 1.01
