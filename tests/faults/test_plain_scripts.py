"""Plain PyTorch: training prints no warnings, and gradients exist once in memory."""

import ctypes
import gc
import resource
import statistics
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.inside import views_of
from tests.models import MODELS, batch, build, loss_of
from tests.pool import on_ranks

PARAMETERS = 24
ELEMENTS = 1024 * 1024  # of fp32: 4 MiB each
M_MMAP_THRESHOLD = -3  # of <malloc.h>


def train(name: str, rank: int) -> None:
    model = BucketDDP(build(name), bucket_cap_mb=25, find_unused_parameters=name == "shared_weights")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                inputs, target = batch(2 * step + micro, rank)
                loss_of(model(inputs), target).backward()
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


@on_ranks(2)
def test_plain_training_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in MODELS:
            train(name, dist.get_rank())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.full((ELEMENTS,), 0.5) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.mean() * x for row in self.rows]).sum()


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@on_ranks(2, fresh=True)
def test_gradients_exist_once_in_memory() -> None:
    # Without this, glibc may keep freed blocks of several MiB, and the growth would not be what is in use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    BucketDDP(nn.Linear(1, 1))(torch.ones(1, 1)).backward()  # brings in the code, and starts the threads
    module = Wide()
    size = PARAMETERS * ELEMENTS * 4
    before = resident_bytes()
    model = BucketDDP(module)
    grown = []
    for step in range(6):
        model.zero_grad()
        with model.no_sync() if step == 5 else nullcontext():
            model(torch.tensor(float(step + dist.get_rank()))).backward()
        if step >= 2:  # by then it has found its order
            grown.append((resident_bytes() - before) / size)
    assert 0.95 < statistics.median(grown) < 1.1, "torch DDP's grow twice as much"
    tensors = [*views_of(model).values(), *(param.grad for param in module.parameters())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert 0.99 < sum(storages.values()) / size < 1.01
