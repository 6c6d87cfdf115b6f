"""Fine-tunes a language model in bf16 with fp32 gradients, all of its weights or low-rank adapters alone.

By default a small transformer of bytes first learns the standard library's source, then the prose of Python's help
pages. With ``--model`` a Hugging Face model takes its place (needs ``transformers``). The parameters are bf16.
Gradients are accumulated and averaged in fp32, and the optimizer steps on fp32 masters, so that updates too small for
bf16 are not lost. With ``--lora`` the base stays frozen, and only the adapters have gradients to send.

    python examples/finetune_language_model.py
    python examples/finetune_language_model.py --lora
    python examples/finetune_language_model.py --strategy bucketddp_sharded  # masters and state divided by rank
    python examples/finetune_language_model.py --strategy ddp                # the same in bf16 alone
    python examples/finetune_language_model.py --model gpt2 --lora --text notes.txt --lr 1e-3
"""

import argparse
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.query_key_value(self.norms[0](hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.norms[1](hidden))


class ByteTransformer(nn.Module):
    """Predicts the next byte: (batch, length) of int64 to logits (batch, length, 256)."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3, length: int = 256) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(text) + self.position[: text.shape[1]])))


class LowRank(nn.Module):
    """Adds a product of two thin matrices, zero at first, to a frozen weight (LoRA, Hu et al., 2021)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        self.right = nn.Parameter(torch.randn(rank, weight.shape[1]).to(weight) * weight.shape[1] ** -0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 2 * self.left @ self.right


def add_adapters(net: nn.Module, rank: int) -> None:
    """Freeze the net and give each of its matrices an adapter; GPT-2's ``Conv1D`` holds matrices too."""
    net.requires_grad_(False)
    for module in list(net.modules()):
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))


class LanguageModel(pl.LightningModule):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def loss(self, text: Tensor) -> Tensor:
        output = self.net(text[:, :-1])
        logits = getattr(output, "logits", output)
        return cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("held-out loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.lr, fused=True)


class Report(pl.Callback):
    """Prints the held-out loss during training, and at the end the bytes sent in each step."""

    def on_validation_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        if trainer.is_global_zero:
            loss = trainer.callback_metrics["held-out loss"]
            print(f"  step {trainer.global_step:4d}  held-out loss {loss:.3f} nats per token", flush=True)

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        worst = torch.zeros((), device=module.device)
        for param in module.parameters():
            of_rank_0 = param.detach().clone()
            dist.broadcast(of_rank_0, src=0)
            worst = torch.maximum(worst, (of_rank_0 - param.detach()).abs().max().float())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if not trainer.is_global_zero:
            return
        trained = sum(param.numel() for param in module.parameters() if param.requires_grad)
        print(f"  {trained:,} of {sum(param.numel() for param in module.parameters()):,} parameters trained")
        print(f"  largest difference of a weight between ranks   {worst.item():g}")
        if (wrapper := getattr(trainer.strategy, "bucket_ddp", None)) is not None:
            sent = wrapper.last_pass()
            dtypes = ", ".join(sorted({str(bucket.dtype).removeprefix("torch.") for bucket in sent.buckets}))
            print(f"  {sent.grad_nbytes:,} bytes of {dtypes} gradients a step, in {len(sent.buckets)} buckets")


def load_hugging_face(name: str) -> tuple[nn.Module, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise SystemExit(f"--model {name} needs Hugging Face's library: pip install transformers") from error
    return AutoModelForCausalLM.from_pretrained(name).train(), AutoTokenizer.from_pretrained(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="bucketddp", help="any Lightning strategy, e.g. ddp")
    parser.add_argument("--devices", type=int, help="default: all accelerators, or two CPU ranks")
    parser.add_argument("--model", help="a Hugging Face model's name or folder instead of the small transformer")
    parser.add_argument("--text", type=Path, help="a text file to fine-tune on; default: Python's help pages")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters of a frozen base")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters' matrices")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=150, help="steps of fine-tuning")
    parser.add_argument("--base-steps", type=int, default=200, help="steps of the small transformer before that")
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    on_accelerator = torch.accelerator.is_available()
    length = 64

    def encode(text: str) -> Tensor:
        """Cut the text into windows (windows, length + 1), in a random order that is the same on every rank."""
        tokens = torch.tensor(tokenizer(text)["input_ids"] if tokenizer else list(text.encode()))
        windows = tokens.unfold(0, length + 1, length)
        return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]

    def fit(model: LanguageModel, windows: Tensor, steps: int) -> pl.Trainer:
        ours = {
            "bucketddp": BucketDDPStrategy(grad_dtype=torch.float32),
            "bucketddp_sharded": BucketDDPStrategy(grad_dtype=torch.float32, shard_optimizer=True),
        }
        held_out, train = (DataLoader(TensorDataset(part), batch_size=16) for part in windows.tensor_split([128]))
        trainer = pl.Trainer(
            strategy=ours.get(args.strategy, args.strategy),
            accelerator="auto" if on_accelerator else "cpu",
            devices=args.devices or (torch.accelerator.device_count() if on_accelerator else 2),
            precision="bf16-true",
            max_steps=steps,
            val_check_interval=min(50, steps),
            check_val_every_n_epoch=None,
            num_sanity_val_steps=-1,
            callbacks=[Report()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, train, held_out)
        return trainer

    net, tokenizer = load_hugging_face(args.model) if args.model else (ByteTransformer(), None)
    if not args.model:
        source = Path(sysconfig.get_path("stdlib")).glob("*.py")
        text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(source))
        say("a base model of Python source, all weights")
        fit(LanguageModel(net, lr=2e-3), encode(text), args.base_steps)
    if args.lora:
        add_adapters(net, args.rank)
    text = args.text.read_text(encoding="utf-8") if args.text else "\n\n".join(topics.values())
    say(f"fine-tuning, {'adapters alone' if args.lora else 'all weights'}")
    fit(LanguageModel(net, args.lr), encode(text), args.steps)
    # "bucketddp" does this at exit. With other strategies on CPU the process may abort without it.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def say(line: str) -> None:
    if pl.utilities.rank_zero.rank_zero_only.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
