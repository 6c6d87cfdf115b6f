"""Trains a small GAN on handwritten digits: manual optimisation with two toggled optimizers, and no flag.

In each step the critic and the generator run one backward each. While one optimizer is toggled, the other network is
frozen and its gradients are not sent: the example counts which gradients each reduction held. With Lightning's ``ddp``
the first step raises, as half of the gradients never come. ``ddp_find_unused_parameters_true`` trains, but sends both
networks' gradients each time.

    python examples/gan.py
    python examples/gan.py --strategy ddp_find_unused_parameters_true
"""

import argparse
from collections import Counter

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy

SIDE, NOISE = 8, 16


class Gan(pl.LightningModule):
    """A Wasserstein GAN with gradient penalty (Gulrajani et al., 2017) on images of 8 by 8 pixels in -1..1."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, SIDE**2), nn.Tanh()
        )
        self.critic = nn.Sequential(
            nn.Linear(SIDE**2, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )
        self.reduced: Counter[tuple[str, ...]] = Counter()

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)  # different noise on each rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0]
        generator_optimizer, critic_optimizer = self.optimizers()

        with self.toggled_optimizer(critic_optimizer):
            with torch.no_grad():
                fake = self.generate(len(real))
            critic_loss = (self.critic(fake) - self.critic(real)).mean() + self.penalty(real, fake)
            critic_optimizer.zero_grad()
            self.manual_backward(critic_loss)
            self.note_what_was_reduced()
            critic_optimizer.step()

        with self.toggled_optimizer(generator_optimizer):
            generator_loss = -self.critic(self.generate(len(real))).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(generator_loss)
            self.note_what_was_reduced()
            generator_optimizer.step()

        self.log_dict(
            {"critic loss": critic_loss, "generator loss": generator_loss}, on_step=False, on_epoch=True, sync_dist=True
        )

    def generate(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, NOISE, device=self.device))

    def penalty(self, real: Tensor, fake: Tensor, weight: float = 10.0) -> Tensor:
        """The gradient penalty: the critic's slope should be one between real and generated images."""
        mix = torch.lerp(real, fake, torch.rand(len(real), 1, device=self.device)).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mix).sum(), mix, create_graph=True)
        return weight * (slope.norm(dim=1) - 1).square().mean()

    def note_what_was_reduced(self) -> None:
        if (wrapper := getattr(self.trainer.strategy, "bucket_ddp", None)) is not None:
            names = {name.split(".")[0] for bucket in wrapper.last_pass().buckets for name in bucket.parameters}
            self.reduced[tuple(sorted(names))] += 1

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.0, 0.9)) for net in (self.generator, self.critic)]


class Report(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, module: Gan) -> None:
        epoch = trainer.current_epoch + 1
        if trainer.is_global_zero and epoch % (trainer.max_epochs // 5) == 0:
            losses = "  ".join(f"{name} {value:6.3f}" for name, value in sorted(trainer.callback_metrics.items()))
            print(f"  epoch {epoch:3d}  {losses}", flush=True)

    def on_train_end(self, trainer: pl.Trainer, module: Gan) -> None:
        worst = torch.zeros((), device=module.device)
        for param in module.parameters():
            of_rank_0 = param.detach().clone()
            dist.broadcast(of_rank_0, src=0)
            worst = torch.maximum(worst, (of_rank_0 - param.detach()).abs().max())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if not trainer.is_global_zero:
            return
        print(f"largest difference of a weight between ranks   {worst.item():g}")
        for names, count in sorted(module.reduced.items()):
            print(f"reductions that held gradients of {' and '.join(names):15}{count}")


def draw(images: Tensor) -> str:
    """Images (n, 64) in -1..1, side by side, as text."""
    shades = " .:-=+*%@"
    levels = ((images.clamp(-1, 1) + 1) / 2 * (len(shades) - 1)).round().int().view(-1, SIDE, SIDE)
    return "\n".join("  ".join("".join(shades[v] for v in image[row]) for image in levels) for row in range(SIDE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="bucketddp", help="e.g. ddp_find_unused_parameters_true")
    parser.add_argument("--devices", type=int, help="default: all accelerators, or two CPU ranks")
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    real = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    on_accelerator = torch.accelerator.is_available()
    ours = BucketDDPStrategy(check_ranks_every=100)  # warns if the ranks' weights come apart
    trainer = pl.Trainer(
        strategy=ours if args.strategy == "bucketddp" else args.strategy,
        accelerator="auto" if on_accelerator else "cpu",
        devices=args.devices or (torch.accelerator.device_count() if on_accelerator else 2),
        max_epochs=args.epochs,
        callbacks=[Report()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Gan()
    trainer.fit(model, DataLoader(TensorDataset(real), batch_size=64, shuffle=True))

    if trainer.is_global_zero:
        with torch.no_grad():
            made = model.cpu().generate(1000)
        nearest = torch.cdist(made, real).min(dim=1).values.mean()
        noise = torch.cdist(torch.rand(1000, SIDE**2) * 2 - 1, real).min(dim=1).values.mean()
        print(f"distance to the nearest real digit   generated {nearest:.2f}   noise {noise:.2f}")
        print(draw(made[:8]))
    # "bucketddp" does this at exit. With other strategies on CPU the process may abort without it.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
