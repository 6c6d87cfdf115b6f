"""Fine-tunes a digit classifier on two ranks with ``Trainer(strategy="bucketddp")``.

A small convolutional net learns half of the handwritten digits. Then a new head learns all ten: the backbone is frozen
at first, and ``BackboneFinetuning`` unfreezes it half-way. With Lightning's ``ddp`` the ranks then silently drift apart
(``--strategy ddp`` shows it). Here they stay equal to the last bit.

    python examples/finetune_digits.py
    python examples/finetune_digits.py --strategy ddp
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_bucketddp import BucketDDPStrategy


def load(path: str | None) -> tuple[Tensor, Tensor]:
    """Images (n, 1, height, width) in 0..1 and labels (n,): scikit-learn's digits, or an .npz with the two arrays."""
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images, digits.target
    else:
        arrays = np.load(path)
        images, labels = arrays["images"], arrays["labels"]
    scaled = torch.tensor(images, dtype=torch.float32)
    return (scaled / scaled.max()).unsqueeze(1), torch.tensor(labels, dtype=torch.long)


class Classifier(pl.LightningModule):
    """A convolutional backbone with BatchNorm, and a linear head."""

    def __init__(self, backbone: nn.Module | None, classes: int, lr: float) -> None:
        super().__init__()
        self.backbone = backbone or nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(64 * 4 * 4, classes)
        self.lr = lr
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([param for param in self.parameters() if param.requires_grad], lr=self.lr)


class Report(pl.Callback):
    """Prints a line per epoch; at the end compares the ranks' weights and describes the gradient buffers."""

    difference = float("nan")
    gradients = ""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        frozen = not next(module.backbone.parameters()).requires_grad
        loss, accuracy = (float(trainer.callback_metrics[name]) for name in ("loss", "accuracy"))
        if trainer.is_global_zero:
            print(
                f"  epoch {trainer.current_epoch:2d}  backbone {'frozen  ' if frozen else 'training'}"
                f"  loss {loss:.3f}  validation accuracy {accuracy:.3f}"
            )

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        worst = torch.zeros((), device=module.device)
        for param in module.parameters():
            of_rank_0 = param.detach().clone()
            dist.broadcast(of_rank_0, src=0)
            worst = torch.maximum(worst, (of_rank_0 - param.detach()).abs().max())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        self.difference = worst.item()
        wrapper = getattr(trainer.strategy, "bucket_ddp", None)
        if wrapper is not None:
            layout = wrapper.layout
            self.gradients = f"{layout.nbytes:,} bytes of gradients, once in memory, in {len(layout.buckets)} buckets"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="bucketddp", help="any Lightning strategy, e.g. ddp")
    parser.add_argument("--devices", type=int, help="default: all accelerators, or two CPU ranks")
    parser.add_argument("--num-nodes", type=int, default=1, help="number of machines, each with --devices devices")
    parser.add_argument("--data", help="an .npz file with arrays `images` (n, height, width) and `labels` (n,)")
    parser.add_argument("--epochs", type=int, default=8, help="fine-tuning epochs, half with a frozen backbone")
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    images, labels = load(args.data)
    classes = int(labels.max()) + 1
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = len(labels) // 5
    train, validation, test = order[2 * held_out :], order[:held_out], order[held_out : 2 * held_out]

    def loader(rows: Tensor, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(TensorDataset(images[rows], labels[rows]), batch_size=32, shuffle=shuffle)

    def trainer(epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
        on_accelerator = torch.accelerator.is_available()
        ours = BucketDDPStrategy(check_ranks_every=100)  # warns if the ranks' weights come apart
        return pl.Trainer(
            strategy=ours if args.strategy == "bucketddp" else args.strategy,
            accelerator="auto" if on_accelerator else "cpu",
            devices=args.devices or (torch.accelerator.device_count() if on_accelerator else 2),
            num_nodes=args.num_nodes,
            max_epochs=epochs,
            callbacks=list(callbacks),
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    half = classes // 2
    known = train[labels[train] < half], validation[labels[validation] < half]
    pretraining = trainer(4, Report())
    if pretraining.is_global_zero:
        print(f"pre-training on digits 0 to {half - 1}")
    first = Classifier(None, classes, lr=1e-3)
    pretraining.fit(first, loader(known[0], shuffle=True), loader(known[1]))

    report = Report()
    unfreeze = BackboneFinetuning(
        unfreeze_backbone_at_epoch=args.epochs // 2, backbone_initial_lr=1e-3, initial_denom_lr=1.0, train_bn=False
    )
    finetuning = trainer(args.epochs, unfreeze, report)
    if finetuning.is_global_zero:
        print(f"fine-tuning on digits 0 to {classes - 1}")
    model = Classifier(first.backbone, classes, lr=1e-3)
    finetuning.fit(model, loader(train, shuffle=True), loader(validation))
    (result,) = finetuning.test(model, loader(test), verbose=False)

    if finetuning.is_global_zero:
        print(f"\nstrategy {args.strategy}, {finetuning.world_size} ranks on {finetuning.strategy.root_device.type}")
        print(f"test accuracy                                  {result['accuracy']:.4f}")
        verdict = "every rank holds the same model" if report.difference == 0 else "the ranks have drifted apart"
        print(f"largest difference of a weight between ranks   {report.difference:g}  ({verdict})")
        if report.gradients:
            print(report.gradients)
    # "bucketddp" does this at exit. With other strategies on CPU the process may abort without it.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
