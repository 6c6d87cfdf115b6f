"""A training script in plain PyTorch, one process per rank; run by test_scripts.py with warnings as errors."""

import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP
from tests.models import MODELS, batch, build, loss_of


def train(name: str, rank: int) -> None:
    module = build(name)
    model = BucketDDP(
        module,
        process_group=dist.group.WORLD,
        bucket_cap_mb=25,
        find_unused_parameters=name == "shared_weights",
        init_sync=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(4):
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                inputs, target = batch(2 * step + micro, rank)
                loss_of(model(inputs), target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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


def main() -> None:
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    for name in MODELS:
        train(name, rank)
    print(f"rank {rank} trained {len(MODELS)} models")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
