"""Two ranks where torch is installed and no NumPy; run by test_torch_alone.py: torch_alone_script.py <folder>."""

import sys
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from lightning_bucketddp import BucketDDP, check


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert check.run_rank(quick=True, output=None)
    net = BucketDDP(nn.Linear(8, 4), shard_optimizer=True)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    whole = net.optimizer_state_dict(optimizer, every_rank=True)
    assert whole is not None
    torch.testing.assert_close(whole["state"][0]["exp_avg"], torch.full((4, 8), 0.2))
    net.load_optimizer_state_dict(optimizer, whole)
    for call in (net.save_sharded, net.load_sharded):
        try:
            call(f"{folder}/checkpoint", [optimizer])
        except RuntimeError as error:
            print(f"rank {rank}: {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    assert find_spec("numpy") is None
    torch.multiprocessing.spawn(main, sys.argv[1:], nprocs=2)
