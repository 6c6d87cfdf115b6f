"""Fine-tunes an image classifier on two ranks: head and BatchNorm at first, then the whole backbone.

A small ResNet first learns to tell crops of eight photographs apart. Then it gets a new head, and learns to tell faces
from background in 200 other images. scikit-image ships all of them. ``BackboneFinetuning`` unfreezes the backbone
half-way, and from then on its gradients are sent too. With Lightning's ``ddp`` they are not, and the ranks silently
drift apart.

    python examples/finetune_vision.py
    python examples/finetune_vision.py --strategy ddp
    python examples/finetune_vision.py --data PATH --model microsoft/resnet-18 --size 224
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import skimage.data
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModel, ResNetConfig, ResNetModel

from lightning_bucketddp import BucketDDPStrategy

PHOTOGRAPHS = ["astronaut", "brick", "cat", "coffee", "grass", "gravel", "hubble_deep_field", "rocket"]
Split = tuple[Dataset[Any], Dataset[Any]]


class Folder(Dataset[tuple[Tensor, int]]):
    """Images of a folder with one subfolder per class, as tensors (3, size, size) in -1..1."""

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        self.classes = sorted(folder for folder in path.iterdir() if folder.is_dir())
        self.files = [(file, label) for label, each in enumerate(self.classes) for file in sorted(each.iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.files[index]
        pixels = np.array(Image.open(file).convert("RGB").resize((self.size, self.size)))
        return torch.tensor(pixels).movedim(-1, 0) / 127.5 - 1, label


def pieces(size: int, count: int = 150) -> Split:
    """Grey crops of photographs, 64 pixels wide: ``count`` of each from the left to train on, others from the right."""
    choose = torch.Generator().manual_seed(0)
    train: list[Tensor] = []
    held_out: list[Tensor] = []
    for name in PHOTOGRAPHS:
        pixels = torch.tensor(getattr(skimage.data, name)(), dtype=torch.float32) / 127.5 - 1
        grey = pixels.mean(-1) if pixels.dim() == 3 else pixels
        middle = grey.shape[1] * 3 // 4
        for part, taken, n in ((grey[:, :middle], train, count), (grey[:, middle:], held_out, count // 3)):
            top, left = (torch.randint(side - 64, (n,), generator=choose) for side in part.shape)
            crops = torch.stack([part[y : y + 64, x : x + 64] for y, x in zip(top, left, strict=True)])
            taken.append(interpolate(crops[:, None], (size, size), mode="area").expand(-1, 3, -1, -1))
    return tuple(
        TensorDataset(torch.cat(taken), torch.arange(len(taken)).repeat_interleave(len(taken[0])))
        for taken in (train, held_out)
    )


def faces(size: int) -> Dataset[Any]:
    """100 faces and 100 pieces of background, grey, from 25 by 25 pixels."""
    pixels = torch.tensor(skimage.data.lfw_subset(), dtype=torch.float32)[:, None] * 2 - 1
    images = interpolate(pixels, (size, size), mode="bilinear").expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.arange(200) // 100)


class Classifier(pl.LightningModule):
    """The pooled features of a Hugging Face model, and a linear head."""

    def __init__(self, backbone: nn.Module, classes: int, size: int) -> None:
        super().__init__()
        self.backbone = backbone
        with torch.no_grad():
            features = backbone.eval()(torch.zeros(1, 3, size, size)).pooler_output.numel()
        self.head = nn.Linear(features, classes)
        self.accuracy = MulticlassAccuracy(classes, average="micro")
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images).pooler_output.flatten(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([param for param in self.parameters() if param.requires_grad], lr=2e-3)


class Report(pl.Callback):
    """Prints a line per epoch; at the end compares the ranks' weights."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Classifier) -> None:
        frozen = not next(module.backbone.parameters()).requires_grad
        loss, accuracy = (float(trainer.callback_metrics[name]) for name in ("loss", "accuracy"))
        wrapper = getattr(trainer.strategy, "bucket_ddp", None)
        sent = f"  {wrapper.last_pass().grad_nbytes:10,} bytes of gradients a step" if wrapper is not None else ""
        if trainer.is_global_zero:
            print(
                f"  epoch {trainer.current_epoch:2d}  backbone {'frozen  ' if frozen else 'training'}"
                f"  loss {loss:.3f}  held-out accuracy {accuracy:.3f}{sent}",
                flush=True,
            )

    def on_train_end(self, trainer: pl.Trainer, module: Classifier) -> None:
        worst = torch.zeros((), device=module.device)
        for param in module.parameters():
            of_rank_0 = param.detach().clone()
            dist.broadcast(of_rank_0, src=0)
            worst = torch.maximum(worst, (of_rank_0 - param.detach()).abs().max())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if trainer.is_global_zero:
            print(f"  largest difference of a weight between ranks   {worst.item():g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="bucketddp", help="any Lightning strategy, e.g. ddp")
    parser.add_argument("--devices", type=int, help="default: all accelerators, or two CPU ranks")
    parser.add_argument("--model", help="a Hugging Face image model's name or folder instead of the small ResNet")
    parser.add_argument("--data", type=Path, help="a folder with a folder of images per class; default: faces")
    parser.add_argument("--size", type=int, default=32, help="width and height of the images in pixels")
    parser.add_argument("--epochs", type=int, default=8, help="fine-tuning epochs, half with a frozen backbone")
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    on_accelerator = torch.accelerator.is_available()

    def fit(backbone: nn.Module, classes: int, data: Split, epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
        ours = BucketDDPStrategy(check_ranks_every=100)  # warns if the ranks' weights come apart
        trainer = pl.Trainer(
            strategy=ours if args.strategy == "bucketddp" else args.strategy,
            accelerator="auto" if on_accelerator else "cpu",
            devices=args.devices or (torch.accelerator.device_count() if on_accelerator else 2),
            max_epochs=epochs,
            callbacks=[*callbacks, Report()],
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        train, held_out = data
        model = Classifier(backbone, classes, args.size)
        trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=16))
        return trainer

    if args.model:
        backbone = AutoModel.from_pretrained(args.model)
    else:
        config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4, layer_type="basic")
        backbone = ResNetModel(config)
        say(f"pre-training on crops of {len(PHOTOGRAPHS)} photographs")
        fit(backbone, len(PHOTOGRAPHS), pieces(args.size), 4)

    data = Folder(args.data, args.size) if args.data else faces(args.size)
    classes = len(data.classes) if isinstance(data, Folder) else 2
    split = random_split(data, [0.7, 0.3], torch.Generator().manual_seed(0))
    unfreeze = BackboneFinetuning(
        unfreeze_backbone_at_epoch=args.epochs // 2, backbone_initial_lr=1e-3, initial_denom_lr=1.0, train_bn=False
    )
    say(f"fine-tuning on {len(data)} images of {classes} classes")
    fit(backbone, classes, split, args.epochs, unfreeze)
    # "bucketddp" does this at exit. With other strategies on CPU the process may abort without it.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def say(line: str) -> None:
    if pl.utilities.rank_zero.rank_zero_only.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
