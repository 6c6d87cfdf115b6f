"""Train bf16 parameters with and without fp32 masters: with them they learn as well as fp32 ones, without they do not.

    python benchmarks/bf16_masters.py [--seeds 3] [--steps 400] [--lr 2e-4]

A small transformer learns the standard library's source text on two CPU
ranks, through a Trainer. Every run has the same initial weights and batches: by ddp in fp32, in
``precision="bf16-mixed"`` and in ``"bf16-true"``; and in ``"bf16-true"`` with fp32 gradients and sharded fp32 masters
(``grad_dtype="float32", shard_optimizer=True``). The learning rate is small: most updates are less than half of the
distance between a weight and the next bf16 number, and are lost if they are added in bf16.

Losses are of held-out text. The noise is the standard deviation of fp32's last loss over seeds.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch as pl
import torch
from byte_model import ByteTransformer, LanguageModel
from lightning.pytorch.strategies import DDPStrategy
from peers import StartedRanks
from ranks import prepare, run_ranks
from report import plots, save, table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy

RANKS, BATCH, LENGTH, HELD_OUT = 2, 16, 64, 128
FP32, MIXED, BF16 = "ddp, fp32", "ddp, bf16-mixed", "ddp, bf16-true"
MASTERS = "bucketddp_sharded, bf16-true, fp32 masters"
COLOURS = {FP32: "tab:orange", MIXED: "tab:green", BF16: "tab:red", MASTERS: "tab:blue"}


def strategies() -> dict[str, tuple[Callable[[], Any], str]]:
    """By peer: a function that makes the strategy, and the precision."""

    def masters() -> BucketDDPStrategy:
        return BucketDDPStrategy(cluster_environment=StartedRanks(), grad_dtype="float32", shard_optimizer=True)

    def ddp() -> DDPStrategy:
        return DDPStrategy(cluster_environment=StartedRanks())

    return {
        FP32: (ddp, "32-true"),
        MIXED: (ddp, "bf16-mixed"),
        BF16: (ddp, "bf16-true"),
        MASTERS: (masters, "bf16-true"),
    }


class _Losses(pl.Callback):
    """The held-out loss by step."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.found.append((trainer.global_step, float(trainer.callback_metrics["held-out loss"])))


def windows(count: int, seed: int) -> Tensor:
    """Windows of source text as bytes: (count, length + 1)."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    cut = text.unfold(0, LENGTH + 1, LENGTH)
    chosen = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))[:count]
    return cut[chosen].long()


def worker(device: torch.device, name: str, seed: int, steps: int, every: int, lr: float) -> list[tuple[int, float]]:
    """One rank: trains once. Returns the held-out loss by step."""
    make, precision = strategies()[name]
    found = windows(HELD_OUT + steps * RANKS * BATCH, seed)
    torch.manual_seed(seed)
    model = LanguageModel(ByteTransformer(width=64, layers=2, length=LENGTH), lr)
    return fit(model, found.tensor_split([HELD_OUT]), make, precision, steps, every)


def fit(
    model: pl.LightningModule,
    data: Sequence[Tensor] | Sequence[tuple[Tensor, ...]],
    make: Callable[[], Any],
    precision: str,
    steps: int,
    every: int,
) -> list[tuple[int, float]]:
    """Train on one rank, once through the data.

    Args:
        model: Logs its held-out loss.
        data: What is held out, and what it is trained on: tensors with an entry per sample.
        make: Makes the strategy.
        precision: The Trainer's.
        steps: Steps of the optimizer.
        every: After how many of them the loss is taken.

    Returns:
        The held-out loss by step.
    """
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses = _Losses()
    trainer = pl.Trainer(
        strategy=make(),
        accelerator="cpu",
        devices=RANKS,
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    parts = (TensorDataset(*(part if isinstance(part, tuple) else (part,))) for part in data)
    held_out, train = (DataLoader(part, batch_size=BATCH) for part in parts)
    trainer.fit(model, train, held_out)
    return losses.found


Curves = dict[str, list[list[tuple[int, float]]]]
"""By peer and seed, the loss by step."""


def described(curves: Curves, what: str, unit: str = "byte") -> str:
    """The table of last losses. The first peer is the reference."""
    reference = next(iter(curves))
    last = {name: [curve[-1][1] for curve in of_seeds] for name, of_seeds in curves.items()}
    rows = [["peer", "first loss", "last loss", "deviation over seeds", "above fp32's", "most"]]
    for name, losses in last.items():
        above = [loss - reference for loss, reference in zip(losses, last[reference], strict=True)]
        first = fmean(curve[0][1] for curve in curves[name])
        cells = [first, fmean(losses), pstdev(losses), fmean(above), max(above, key=abs)]
        rows.append([name, *(f"{cell:.4f}" for cell in cells)])
    steps = curves[reference][0][-1][0]
    return (
        f"{steps} steps of {what}, {len(last[reference])} seeds; held-out loss in nats per {unit}\n"
        f"above fp32's: of the same seed, the mean and the largest\n{table(rows)}\n"
    )


def plot(curves: Curves, lr: float) -> Any:
    """The loss by step, as mean and range over seeds; and the same for its distance from fp32's loss."""
    pyplot = plots()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    reference = curves[FP32]
    for name, of_seeds in curves.items():
        steps = [step for step, _ in of_seeds[0]]
        values = [[curve[at][1] for curve in of_seeds] for at in range(len(steps))]
        above = [
            [curve[at][1] - other[at][1] for curve, other in zip(of_seeds, reference, strict=True)]
            for at in range(len(steps))
        ]
        for axis, each in ((left, values), (right, above)):
            style = "--" if name == MASTERS else "-"  # fp32's shows through
            axis.plot(steps, [fmean(one) for one in each], style, color=COLOURS[name], label=name)
            axis.fill_between(
                steps, [min(one) for one in each], [max(one) for one in each], color=COLOURS[name], alpha=0.2
            )
    left.set_xlabel("training step")
    right.set_xlabel("training step")
    left.set_ylabel("held-out loss in nats per byte")
    right.set_ylabel("held-out loss above that of\nfp32 with the same seed")
    left.legend(frameon=False)
    figure.suptitle(
        f"bf16 parameters with and without fp32 masters, learning rate {lr:g}, {len(reference)} seeds "
        "(lines: means, bands: smallest to largest): lower is better"
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps: shows that it runs; saves nothing"
    )
    arguments = parser.parse_args()
    seeds, steps = (1, 20) if arguments.quick else (arguments.seeds, arguments.steps)
    prepare()
    curves: Curves = {name: [] for name in strategies()}
    for seed in range(seeds):
        for name, of_seeds in curves.items():
            of_seeds.append(run_ranks(worker, name, seed, steps, max(1, steps // 10), arguments.lr, size=RANKS)[0])
            print(f"seed {seed}, {name}: {of_seeds[-1][-1][1]:.4f}", file=sys.stderr, flush=True)
    text = described(curves, f"AdamW with learning rate {arguments.lr:g}")
    print(text, flush=True)
    if not arguments.quick:
        figures = {"lr": arguments.lr, "held_out_loss_by_step": curves}
        print(save("bf16-masters", figures, text, plot(curves, arguments.lr)))


if __name__ == "__main__":
    main()
