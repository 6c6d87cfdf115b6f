"""Plain PyTorch: training prints no warnings, and gradients exist once in memory."""

import ctypes
import gc
import resource
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.inside import views_of
from tests.models import MODELS, batch, build, loss_of

PARAMETERS = 24
ELEMENTS = 1024 * 1024  # of fp32: 4 MiB each
M_MMAP_THRESHOLD = -3  # of <malloc.h>


def train(name: str, rank: int) -> None:
    model = BucketDDP(build(name), bucket_cap_mb=25, find_unused_parameters=name == "shared_weights")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(4):
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                inputs, target = batch(2 * step + micro, rank)
                loss_of(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    if name != "checkpoint_reentrant":  # torch warns of it itself: without gradients it is of no use
        with torch.no_grad():
            model(batch(99, rank)[0])
    model.load_state_dict(model.state_dict())
    assert model.passes == 4
    if name != "shared_weights":
        model.close()  # a script may leave it open too


def train_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in MODELS:
            train(name, dist.get_rank())


def test_plain_training_warns_of_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(2, train_all)


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


def memory() -> tuple[float, float]:
    """The growth of this process by gradients, and the storages that can be reached, in parts of the parameters."""
    # Without this, glibc may keep freed blocks of several MiB, and the growth would not be what is in use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    BucketDDP(nn.Linear(1, 1))(torch.ones(1, 1)).backward()  # brings in the code, and starts the threads
    module = Wide()
    size = PARAMETERS * ELEMENTS * 4
    before = resident_bytes()
    model = BucketDDP(module)
    grown = []
    for step in range(4):
        model.zero_grad()
        model(torch.tensor(float(step + dist.get_rank()))).backward()
        assert module.rows[0].grad[0].item() == torch.tensor((step + 0.5) / ELEMENTS).item()
        if step >= 2:  # by then it has found its order
            grown.append((resident_bytes() - before) / size)
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in module.parameters()}
    for view in views_of(model).values():
        storages[view.untyped_storage().data_ptr()] = view.untyped_storage().nbytes()
    return statistics.median(grown), sum(storages.values()) / size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_gradients_exist_once_in_memory(run_ranks: Callable[..., list[Any]]) -> None:
    for grown, reachable in run_ranks(2, memory, fresh=True):
        assert 0.95 < grown < 1.1, "torch DDP's grow twice as much"
        assert 0.99 < reachable < 1.01
