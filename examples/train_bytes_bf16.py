"""Trains a small bf16 language model of bytes on several ranks, with fp32 gradients and masters, in plain PyTorch.

Reads the standard library's source text, or any folder of *.py files. Lines differ in length, so ranks see different
numbers of tokens in each step. The loss is a sum over tokens, and gradients are divided by the tokens of all ranks and
micro-batches. One process with all batches would compute the same.

    torchrun --nproc-per-node 2 examples/train_bytes_bf16.py
    torchrun --nproc-per-node 2 examples/train_bytes_bf16.py --bf16-gradients    # for comparison
"""

import argparse
import random
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bucketddp import BucketDDP

PAD = 0  # no text holds this byte


class ByteModel(nn.Module):
    """Predicts the next byte of a line."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(text))[0])


def read_lines(folder: Path, least: int = 8, most: int = 64) -> list[bytes]:
    lines = (line for path in sorted(folder.glob("*.py")) for line in path.read_bytes().splitlines())
    return [line[:most] for line in lines if len(line) >= least and PAD not in line]


def batch_of(lines: list[bytes]) -> Tensor:
    """Lines, padded to the longest: (lines, bytes), int64."""
    rows = [torch.tensor(list(line)) for line in lines]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def loss_of(model: nn.Module, text: Tensor, reduction: str) -> Tensor:
    logits = model(text[:, :-1]).float()
    return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), ignore_index=PAD, reduction=reduction)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of *.py files")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--bf16-gradients", action="store_true", help="no fp32 gradients, no masters")
    arguments = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group()
    rank = dist.get_rank()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        device = torch.device(device.type, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    lines = read_lines(arguments.text)
    random.Random(0).shuffle(lines)
    held_out, lines = lines[:256], lines[256:]

    torch.manual_seed(0)
    model = BucketDDP(
        ByteModel().to(device, torch.bfloat16),
        grad_dtype=None if arguments.bf16_gradients else torch.float32,
        gradient_divide_by="tokens",
        check_ranks_every=100,  # warns if the ranks' weights come apart
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    choose = random.Random(rank + 1)
    for step in range(arguments.steps + 1):
        if step % 50 == 0:
            with torch.no_grad():
                loss = loss_of(model, batch_of(held_out).to(device), "mean")
            if rank == 0:
                print(f"step {step:4}  held-out loss {loss:.3f} nats per byte", flush=True)
        optimizer.zero_grad()
        for micro in range(arguments.micro_batches):
            text = batch_of(choose.sample(lines, 16)).to(device)
            model.count_tokens((text[:, 1:] != PAD).sum())
            with model.no_sync() if micro < arguments.micro_batches - 1 else nullcontext():
                loss_of(model, text, "sum").backward()
        optimizer.step()

    first = [param.detach().clone() for param in model.parameters()]
    for param in first:
        dist.broadcast(param, src=0)
    same = all(torch.equal(a, b) for a, b in zip(first, model.parameters(), strict=True))
    print(f"rank {rank}: parameters equal to rank 0's: {same}", flush=True)
    if rank == 0:
        gradients = {str(param.grad.dtype) for param in model.parameters()}
        masters = len(optimizer.state_dict().get("master_params", {}))
        print(f"gradients in {', '.join(gradients)}, {masters} of {len(first)} parameters with an fp32 master")
        print(model.last_pass())
    model.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
