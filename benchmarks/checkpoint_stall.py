"""Measure how long training stands still for a checkpoint: one file, parts, and parts that a thread writes.

    python benchmarks/checkpoint_stall.py [--megaparameters 32] [--saves 3] [--rounds 3]

Two CPU ranks train with AdamW through a Trainer. A step sleeps, as if an accelerator computed, and the optimizer's step
runs on the processor. Rank 0 writes one file alone (``ddp``, and ``state_dict_type="full"``); with
``state_dict_type="sharded"`` each rank writes its parts, and with ``async_save=True`` a thread writes them.

"stands still" is how long the call takes, on the slower rank. "later steps" is how much longer the ``STEPS`` steps that
follow take together than the ``STEPS`` steps after those, as the thread uses memory, disk and processor. "there after"
is the time from the call until the checkpoint has its name.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from models import mlp
from peers import StartedRanks, adamw
from ranks import prepare, run_ranks
from report import plots, save, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPStrategy

RANKS, WIDTH, WARM_UP, STEPS, SLEEP_SECONDS = 2, 1024, 4, 10, 0.1
STILL, LATER, THERE = "stands still", "later steps", "there after"


def strategies() -> dict[str, Callable[[], Any]]:
    """By peer, a function that makes the strategy."""
    found: dict[str, Callable[[], Any]] = {"ddp, one file": lambda: DDPStrategy(cluster_environment=StartedRanks())}
    ways: dict[str, dict[str, Any]] = {
        "one file": {},
        "parts": {"state_dict_type": "sharded"},
        "parts, async_save": {"state_dict_type": "sharded", "async_save": True},
    }
    for name, shard in (("bucketddp", False), ("bucketddp_sharded", True)):
        for way, options in ways.items():
            given = {"cluster_environment": StartedRanks(), "shard_optimizer": shard, **options}
            found[f"{name}, {way}"] = lambda given=given: BucketDDPStrategy(**given)  # type: ignore[misc]
    return found


class _Model(pl.LightningModule):
    """Sleeps as if it computed."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(WIDTH, layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class _Saves(pl.Callback):
    """Saves a checkpoint before every second stretch of steps."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._paths: list[tuple[Path, float]] = []
        self._last = 0.0
        self.still: list[float] = []
        self.stretches: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now, step = time.perf_counter(), trainer.global_step - WARM_UP
        if step > 0:
            self.stretches[-1] += now - self._last
        if step >= 0 and step % STEPS == 0:
            self.stretches.append(0.0)
        if step >= 0 and step % (2 * STEPS) == 0 and trainer.global_step < trainer.max_steps:
            self._paths.append((self._folder / f"{step}.ckpt", time.time()))
            trainer.save_checkpoint(self._paths[-1][0])
            self.still.append(time.perf_counter() - now)
        self._last = time.perf_counter()

    def there(self) -> list[float]:
        """Seconds until each checkpoint had its name: a rename changes the ctime."""
        return [path.stat().st_ctime - begin for path, begin in self._paths]


def worker(device: torch.device, name: str, layers: int, saves: int, folder: str) -> dict[str, Any]:
    """One rank: bytes of parameters and optimizer state, and seconds."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback, model, steps = _Saves(folder), _Model(layers), WARM_UP + saves * 2 * STEPS
    trainer = pl.Trainer(
        strategy=strategies()[name](),
        accelerator="cpu",
        devices=RANKS,
        max_steps=steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(torch.randn(steps, WIDTH), batch_size=1))
    size = sum(param.nbytes for param in model.parameters())
    return {"bytes": 3 * size, "still": callback.still, "stretches": callback.stretches[:-1], "there": callback.there()}


def measured(name: str, layers: int, saves: int) -> dict[str, Any]:
    """Train with a peer; seconds of each checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(worker, name, layers, saves, folder, size=RANKS)
    still, stretches = (
        [max(each) for each in zip(*(one[key] for one in found), strict=True)] for key in ("still", "stretches")
    )
    return {
        "bytes": found[0]["bytes"],
        "step": median(stretches[1::2]) / STEPS,
        STILL: still,
        LATER: [after - usual for after, usual in zip(stretches[::2], stretches[1::2], strict=True)],
        THERE: found[0]["there"],
    }


Results = dict[str, list[dict[str, Any]]]
"""By peer, what each round found."""


def medians(results: Results) -> dict[str, dict[str, float]]:
    """By peer, the median seconds over all checkpoints."""
    return {
        name: {what: median([one for each in rounds for one in each[what]]) for what in (STILL, LATER, THERE)}
        for name, rounds in results.items()
    }


def described(results: Results) -> str:
    """The table."""
    rows = [["peer", *(f"{what}, ms" for what in (STILL, LATER, THERE))]]
    for name, found in medians(results).items():
        rows.append([name, *(f"{seconds * 1e3:.0f}" for seconds in found.values())])
    each = [one for rounds in results.values() for one in rounds]
    mib, step_ms = each[0]["bytes"] / 2**20, median([one["step"] for one in each]) * 1e3
    count = sum(len(one[STILL]) for one in each) // len(results)
    return (
        f"{mib:.0f} MiB of parameters and AdamW's state, {RANKS} ranks, steps of {step_ms:.0f} ms, medians of {count} "
        f"checkpoints\n{table(rows)}\n"
    )


def plot(results: Results) -> Any:
    """How long training stands still, and how much longer later steps take."""
    pyplot = plots()
    figure, axis = pyplot.subplots(figsize=(7.5, 3.2), constrained_layout=True)
    found, left = medians(results), [0.0] * len(results)
    for what, colour in ((STILL, "tab:red"), (LATER, "tab:orange")):
        widths = [max(0.0, each[what]) * 1e3 for each in found.values()]
        axis.barh(list(found), widths, left=left, color=colour, label=what)
        left = [one + width for one, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("time per checkpoint in ms")
    axis.set_title("What a checkpoint costs training: shorter is better")
    axis.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megaparameters", type=float, default=32, help="millions of parameters")
    parser.add_argument("--saves", type=int, default=3, help="checkpoints of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs; saves nothing")
    arguments = parser.parse_args()
    size, saves, rounds = (
        (2.0, 1, 1) if arguments.quick else (arguments.megaparameters, arguments.saves, arguments.rounds)
    )
    prepare()
    results: Results = {name: [] for name in strategies()}
    for number in range(rounds):
        for name, of_rounds in results.items():
            of_rounds.append(measured(name, max(1, round(size * 1e6 / WIDTH**2)), saves))
            print(f"round {number}, {name}: {median(of_rounds[-1][STILL]) * 1e3:.0f} ms", file=sys.stderr, flush=True)
    text = described(results)
    print(text, flush=True)
    if not arguments.quick:
        print(save("checkpoint-stall", {"peers": results}, text, plot(results)))


if __name__ == "__main__":
    main()
