"""A script that does not import lightning_bucketddp, run by test_cli.py on two ranks; rank 1 raises in the end."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn


def main() -> None:
    torch.set_num_threads(1)
    fabric = Fabric(strategy="bucketddp", accelerator="cpu", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(net := nn.Linear(8, 4), torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        if step == 2 and fabric.global_rank == 1:
            raise ArithmeticError("no batch today")
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        line = f"rank {fabric.global_rank} of {fabric.world_size}: {sys.argv[1:]}, step {step}\n"
        os.write(1, line.encode())  # in one piece, as both ranks write to the same pipe


if __name__ == "__main__":
    main()
