"""What a run takes again, and what it leaves out, when it is resumed from a checkpoint; against an undisturbed run.

Prints the table of ``docs/preemption.md``::

    python -m tests.trainer.resume_matrix
"""

import importlib
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_bucketddp.comm import gloo
from tests.lightning_models import ddp, ours, trainer
from tests.pool import worker_pool

EPOCHS, SAMPLES, BATCH = 2, 22, 2


class Augmented(Dataset[Any]):
    """Samples that know their number, changed at random."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.values = torch.arange(samples * 8.0).view(samples, 8).sin()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.values[index] * (torch.rand(()) + random.random() + np.random.rand())


class StatefulLoader:
    """Draws an order for each epoch, another one on each rank, and says where it is."""

    def __init__(self, rank: int) -> None:
        self.data, self.generator = Augmented(), torch.Generator().manual_seed(rank)
        self.order: list[int] = []
        self.at, self.goes_on = 0, False

    def __len__(self) -> int:
        return SAMPLES // 2 // BATCH

    def __iter__(self) -> Iterator[Any]:
        if not self.goes_on:
            self.order, self.at = torch.randperm(SAMPLES, generator=self.generator).tolist(), 0
        self.goes_on = False
        return self.rest()

    def rest(self) -> Iterator[Any]:
        while self.at < len(self):
            own = self.order[self.at * BATCH : (self.at + 1) * BATCH]
            self.at += 1
            yield torch.tensor(own), torch.stack([self.data[index][1] for index in own])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self.goes_on = state["order"], state["at"], True
        self.generator.set_state(state["generator"])


class Remembers(pl.LightningModule):
    """Remembers what it trains on, and saves a checkpoint at a place."""

    def __init__(self, folder: Path, place: str = "", batch: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.last, self.first, self.dropout = nn.Linear(16, 4), nn.Linear(8, 16), nn.Dropout(0.3)
        self.mean = MeanMetric()
        self.path, self.place, self.batch = folder / "saved.ckpt", place, batch
        self.taken: list[tuple[int, tuple[int, ...], float]] = []
        self.told: list[tuple[float, ...]] = []
        self.validated = self.before = 0  # before: batches whose steps the checkpoint has

    def come(self, place: str) -> None:
        if (place, len(self.taken)) == (self.place, self.batch) and not self.before:
            self.trainer.save_checkpoint(self.path)
            self.before = self.batch - self.batch % self.trainer.accumulate_grad_batches

    def loss(self, batch: Any) -> Tensor:
        return self.last(self.dropout(self.first(batch[1]).tanh())).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.taken.append((self.current_epoch, tuple(batch[0].tolist()), loss.item()))
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.log("val", self.loss(batch) + random.random(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        found = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        rate = self.optimizers().param_groups[0]["lr"]
        self.told.append((self.current_epoch, found.get("loss", -1), found.get("mean", -1), found.get("val", -1), rate))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.trainer.limit_val_batches:
            return optimizer
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val", "strict": False}}


class Saves(pl.Callback):
    """Tells the module where it is, in the hooks in which checkpoints are saved."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.come("batch")

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.validated % 3 == 1:
            pl_module.come("in validation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.come("validated")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.come("epoch")


QUIET = {"limit_val_batches": 0}
# The hook, after how many batches, options of the Trainer. An epoch has 6 batches on 2 ranks.
PLACES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "first batch": ("batch", 1, QUIET),
    "middle": ("batch", 2, QUIET),
    "in a window": ("batch", 3, {**QUIET, "accumulate_grad_batches": 2}),
    "last batch": ("batch", 6, {}),
    "in validation": ("in validation", 2, {"val_check_interval": 2}),
}
ELSEWHERE = {
    "after validation": ("validated", 2, {"val_check_interval": 2}),
    "after the epoch's validation": ("validated", 6, {}),
    "epoch's end": ("epoch", 6, {}),
    "epoch's end, steps": ("epoch", 6, {"max_epochs": -1, "max_steps": 12}),
    "middle, steps": ("batch", 2, {**QUIET, "max_epochs": -1, "max_steps": 12}),
    "before a validation": ("batch", 4, {"val_check_interval": 2}),
    "second epoch": ("batch", 6, QUIET),  # on 3 ranks, which have 4 batches
    "limited": ("batch", 5, {**QUIET, "limit_train_batches": 5}),
}
TORCHDATA = "torchdata's StatefulDataLoader"
LOADERS = {"the Trainer's sampler": (0, 1, 2), "RandomSampler on each rank": (0, 2), "with state_dict()": (0,)}


def fit(model: Remembers, strategy: Any, loader: str, workers: int, place: str, seed: int, **options: Any) -> None:
    """Train from the begin, or with ``ckpt_path``. Two workers persist."""
    rank, path = dist.get_rank(), options.pop("ckpt_path", None)
    for seeds in (torch.manual_seed, random.seed, np.random.seed):
        seeds(seed + rank)
    shuffles = {"num_workers": workers, "persistent_workers": workers > 1, "shuffle": True}
    kind: Any = DataLoader
    if loader == TORCHDATA:
        kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    training = StatefulLoader(rank) if loader == "with state_dict()" else kind(Augmented(), BATCH, **shuffles)
    if loader in ("RandomSampler on each rank", TORCHDATA):
        options["limit_train_batches"] = 6
    options = {"max_epochs": EPOCHS, "callbacks": [Saves()], **{**PLACES, **ELSEWHERE}[place][2], **options}
    options |= {"num_sanity_val_steps": 0, "use_distributed_sampler": loader == "the Trainer's sampler"}
    trainer(strategy, **options).fit(model, training, DataLoader(Augmented(12), BATCH), ckpt_path=path)


class Run(NamedTuple):
    """What all ranks took, rank by rank, and this rank's weights."""

    before: int
    taken: list[list[tuple[int, tuple[int, ...], float]]]
    told: list[tuple[float, ...]]
    weights: Tensor


STRATEGIES = {"ddp": ddp, "bucketddp": partial(ours, exact_resume=True)}


@patch.object(gloo, "SHORT_BYTES", 0)  # the sums of gloo's own all-reduce depend on where in it values are
def run(folder: Path, strategy: str, loader: str, workers: int, place: str, resumes: bool, **given: Any) -> Run:
    """One run on these ranks: an undisturbed one, which saves a checkpoint, or one that resumes it."""
    model = Remembers(folder) if resumes else Remembers(folder, *{**PLACES, **ELSEWHERE}[place][:2])
    path = {"ckpt_path": model.path} if resumes else {}
    fit(model, STRATEGIES[strategy](**given), loader, workers, place, 20 if resumes else 10, **path)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, model.taken)
    return Run(
        model.before, everyone, model.told, torch.cat([param.detach().flatten() for param in model.parameters()])
    )


def counted(taken: list[Any], by_rank: bool, epochs: int = EPOCHS) -> Counter[Any]:
    return Counter(
        (rank * by_rank, epoch, sample)
        for rank, batches in enumerate(taken)
        for epoch, batch, _ in batches
        for sample in batch
        if epoch < epochs
    )


def compared(undisturbed: Run, resumed: Run, loader: str) -> tuple[int, int, float | None]:
    """Samples that were repeated, samples that were lost, and the largest difference of a weight.

    On another number of ranks: in the epoch that was interrupted. Weights differ there, as batches do.
    """
    same, by_rank = len(undisturbed.taken) == len(resumed.taken), loader != "the Trainer's sampler"
    epochs = EPOCHS if same else 1
    wanted = counted(undisturbed.taken, by_rank, epochs)
    found = counted([batches[: undisturbed.before] for batches in undisturbed.taken], by_rank)
    found += counted(resumed.taken, by_rank, epochs)
    difference = (undisturbed.weights - resumed.weights).abs().max().item() if same else None
    return (found - wanted).total(), (wanted - found).total(), difference


def both(ranks: Any, folder: Path, *case: Any, other: int | None = None) -> tuple[Run, Run]:
    """An undisturbed run on two ranks, and a resumed one.

    Args:
        ranks: Runs a function on a number of ranks.
        folder: Where the checkpoint goes.
        case: What :func:`run` takes.
        other: On how many ranks the run is resumed; None for as many.
    """
    return ranks(2, run, folder, *case, False)[0], ranks(other or 2, run, folder, *case, True)[0]


def table(ranks: Any, strategies: Iterable[str] = STRATEGIES) -> Iterator[str]:
    """The rows of the page's table."""
    yield f"| loader | workers | resumed on | strategy | {' | '.join(PLACES)} |"
    yield "|" + "---|" * (4 + len(PLACES))
    for (loader, workers), other, strategy in product(LOADERS.items(), (None, 1), strategies):
        if other and loader != "the Trainer's sampler":
            continue
        for number in workers:
            cells = []
            for place in PLACES:
                with tempfile.TemporaryDirectory() as folder:
                    runs = both(ranks, Path(folder), strategy, loader, number, place, other=other)
                repeated, lost, difference = compared(*runs, loader)
                cells.append(f"{repeated}, {lost}" + ("" if difference is None else f", {difference:.1g}"))
            persist = ", persistent" if number > 1 else ""
            on = f"{other or 2} rank" + "s" * (other != 1)
            yield f"| {loader} | {number}{persist} | {on} | `{strategy}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    from tests.trainer import resume_matrix  # ranks know its functions by this name

    with worker_pool(1) as one, worker_pool(2) as two:
        for row in resume_matrix.table(lambda world_size, *job: (one if world_size == 1 else two).run(*job)):
            print(row, flush=True)
