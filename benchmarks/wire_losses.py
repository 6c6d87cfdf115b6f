"""Train with gradients that travel in fp32, in bf16 and in 8 bits, and compare the losses.

    python benchmarks/wire_losses.py [--seeds 3] [--steps 200]

Two CPU ranks train through a Trainer with ``bucketddp``: a small transformer on the bytes of the standard library's
source text, by AdamW; and a convolutional net on scikit-learn's handwritten digits, by SGD with momentum. Every run of
a seed has the same initial weights and batches. Losses are of held-out data. The deviation over seeds is the noise.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from bf16_masters import BATCH, HELD_OUT, LENGTH, RANKS, Curves, described, fit, windows
from byte_model import ByteTransformer, LanguageModel
from peers import StartedRanks
from ranks import prepare, run_ranks
from report import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bucketddp import BucketDDPStrategy

WIRES: dict[str, Any] = {
    "fp32": {},
    'wire_dtype="bfloat16"': {"wire_dtype": "bfloat16"},
    'wire_dtype="int8"': {"wire_dtype": "int8"},
}
TASKS = {
    "bytes": ("AdamW with learning rate 0.001, a transformer on bytes", "byte"),
    "digits": ("SGD with learning rate 0.02, a convolutional net on digits", "image"),
}


class Digits(pl.LightningModule):
    """A convolutional net with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)]
        end = [nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(64 * 16, 10)]
        self.net = nn.Sequential(*layers, *end)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("held-out loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def digits(count: int, seed: int) -> list[tuple[Tensor, ...]]:
    """Held-out images and labels, and so many to train on, each in turn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.images).float().unsqueeze(1) / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(seed)
    held_out, train = torch.randperm(len(images), generator=generator).tensor_split([HELD_OUT])
    rounds = [train[torch.randperm(len(train), generator=generator)] for _ in range(-(-count // len(train)))]
    return [(images[chosen], labels[chosen]) for chosen in (held_out, torch.cat(rounds)[:count])]


def worker(device: torch.device, seeds: int, steps: int) -> dict[str, Curves]:
    """One rank: trains all, one after the other. Returns the held-out losses by task."""
    found: dict[str, Curves] = {task: {wire: [] for wire in WIRES} for task in TASKS}
    for task, seed, wire in product(TASKS, range(seeds), WIRES):
        found[task][wire].append(trained(task, wire, seed, steps, max(1, steps // 10)))
        if dist.get_rank() == 0:
            print(f"{task}, seed {seed}, {wire}: {found[task][wire][-1][-1][1]:.4f}", file=sys.stderr, flush=True)
    return found


def trained(task: str, wire: str, seed: int, steps: int, every: int) -> list[tuple[int, float]]:
    """Train once. Returns the held-out loss by step."""
    count = steps * RANKS * BATCH
    make = partial(BucketDDPStrategy, cluster_environment=StartedRanks(), **WIRES[wire])
    torch.manual_seed(seed)
    if task == "digits":
        return fit(Digits(), digits(count, seed), make, "32-true", steps, every)
    model = LanguageModel(ByteTransformer(width=64, layers=2, length=LENGTH), 1e-3)
    return fit(model, windows(HELD_OUT + count, seed).tensor_split([HELD_OUT]), make, "32-true", steps, every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps: shows that it runs; saves nothing"
    )
    arguments = parser.parse_args()
    seeds, steps = (1, 20) if arguments.quick else (arguments.seeds, arguments.steps)
    prepare()
    figures = run_ranks(worker, seeds, steps, size=RANKS)[0]
    text = "\n".join(f"{task}: {described(figures[task], *words)}" for task, words in TASKS.items())
    print(text, flush=True)
    if not arguments.quick:
        print(save("wire-losses", {"held_out_loss_by_step": figures}, text))


if __name__ == "__main__":
    main()
