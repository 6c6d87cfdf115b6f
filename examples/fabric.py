"""Trains a digit classifier on two ranks with ``Fabric(strategy="bucketddp")``, in a loop of its own.

The loop accumulates two batches before each reduction (``no_backward_sync``). It unfreezes the first layer half-way:
this needs no flag, and the ranks stay equal to the last bit. At the end it loads a checkpoint into a new model, and
prints the record of the last pass.

    python examples/fabric.py
    python examples/fabric.py --strategy ddp
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPFabricStrategy

EPOCHS = 8
ACCUMULATE = 2


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """1,437 images to train on, and 360 held out: images of 64 pixels in 0..1, and labels."""
    found = load_digits()
    images, labels = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), images[held_out], labels[held_out]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def difference_between_ranks(model: nn.Module) -> float:
    worst = 0.0
    for param in model.parameters():
        of_rank_0 = param.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        worst = max(worst, float((of_rank_0 - param.detach()).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="bucketddp", help="any of Fabric's, e.g. ddp")
    parser.add_argument("--devices", type=int, help="default: all accelerators, or two CPU ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)

    on_accelerator = torch.accelerator.is_available()
    ours = BucketDDPFabricStrategy(check_ranks_every=100)  # warns if the ranks' weights come apart
    fabric = Fabric(
        accelerator="auto" if on_accelerator else "cpu",
        devices=args.devices or (torch.accelerator.device_count() if on_accelerator else 2),
        strategy=ours if args.strategy == "bucketddp" else args.strategy,
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    data, images, labels = digits()
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True, drop_last=True))
    images, labels = fabric.to_device((images, labels))
    net = network()
    net[0].requires_grad_(False)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=2e-3))

    for epoch in range(EPOCHS):
        if epoch == EPOCHS // 2:
            net[0].requires_grad_(True)
        model.train()
        total = torch.zeros((), device=fabric.device)
        for index, (inputs, target) in enumerate(loader):
            last = (index + 1) % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.cross_entropy(model(inputs), target) / ACCUMULATE
                fabric.backward(loss)
            total += loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        mean = float(fabric.all_reduce(total, reduce_op="mean")) * ACCUMULATE / len(loader)
        model.eval()
        with torch.no_grad():
            accuracy = float((model(images).argmax(1) == labels).float().mean())
        layer = "training" if net[0].weight.requires_grad else "frozen"
        fabric.print(f"epoch {epoch}  first layer {layer:8}  loss {mean:.3f}  held-out accuracy {accuracy:.3f}")

    worst = torch.tensor(difference_between_ranks(net), device=fabric.device)
    worst = float(fabric.all_reduce(worst, reduce_op="max"))
    verdict = "every rank holds the same model" if worst == 0 else "the ranks have drifted apart"
    fabric.print(f"\nlargest difference of a weight between ranks   {worst:g}  ({verdict})")

    folder = fabric.broadcast(tempfile.mkdtemp())
    fabric.save(Path(folder) / "digits.ckpt", {"model": model, "optimizer": optimizer})
    alone = network()
    alone.load_state_dict(torch.load(Path(folder) / "digits.ckpt", weights_only=True)["model"])
    right = int((alone(images.cpu()).argmax(1) == labels.cpu()).sum())
    fabric.print(f"checkpoint, loaded without Fabric              {right} of {len(labels)} right")
    if hasattr(fabric.strategy, "wrapper_of"):
        fabric.print(f"\n{fabric.strategy.wrapper_of(model).last_pass()}")
    # "bucketddp" does this at exit. With other strategies on CPU the process may abort without it.
    fabric.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
