"""How much the process grows by the gradients of a data-parallel module; run by test_scripts.py, one process per rank.

Prints the growth, and what ours keeps, in parts of the parameters' size.
"""

import gc
import resource
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.inside import views_of

PARAMETERS = 24
ELEMENTS = 2 * 1024 * 1024  # of fp32: 8 MiB each
STEPS = 5


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


def main() -> None:
    kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    module = Wide()
    size = PARAMETERS * ELEMENTS * 4
    before = resident_bytes()
    model = BucketDDP(module) if kind == "bucketddp" else DistributedDataParallel(module)
    grown = []
    for step in range(STEPS):
        model.zero_grad()
        model(torch.tensor(float(step + rank))).backward()
        assert module.rows[0].grad[0].item() == torch.tensor((step + 0.5) / ELEMENTS).item()
        if step >= 2:  # by then both have found their order
            grown.append((resident_bytes() - before) / size)
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in module.parameters()}
    if kind == "bucketddp":
        for view in views_of(model).values():
            storages[view.untyped_storage().data_ptr()] = view.untyped_storage().nbytes()
    print(f"grown {statistics.median(grown):.4f} reachable {sum(storages.values()) / size:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
