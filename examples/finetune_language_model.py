"""Fine-tunes a language model in bf16 with fp32 gradients, all of its weights or low-rank adapters alone.

By default a small GPT-2 of bytes first learns the standard library's source, then the prose of Python's help pages.
``--model`` takes a pretrained Hugging Face model in its place. The parameters are bf16. Gradients are accumulated and
averaged in fp32, and the optimizer steps on fp32 masters, so that updates too small for bf16 are not lost. With
``--lora`` (needs ``peft``) the base stays frozen, and only the adapters have gradients to send.

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

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lightning_bucketddp import BucketDDPStrategy


def small_model() -> nn.Module:
    """A GPT-2 of 400,000 random weights, from its configuration alone; its tokens are bytes."""
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    bytes_alone = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(n_positions=256, n_embd=96, n_layer=3, n_head=4, **bytes_alone, **no_dropout))


class LanguageModel(pl.LightningModule):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def loss(self, text: Tensor) -> Tensor:
        logits = self.net(text[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("held-out loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.lr, fused=True)


class Report(pl.Callback):
    """Prints the held-out loss during training, and at the end the bytes of gradients and of optimizer state."""

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
        state = [0] * trainer.world_size
        dist.all_gather_object(state, state_nbytes(trainer.optimizers[0]))
        if not trainer.is_global_zero:
            return
        trained = sum(param.numel() for param in module.parameters() if param.requires_grad)
        print(f"  {trained:,} of {sum(param.numel() for param in module.parameters()):,} parameters trained")
        print(f"  largest difference of a weight between ranks   {worst.item():g}")
        by_rank = ", ".join(f"{nbytes:,} bytes on rank {rank}" for rank, nbytes in enumerate(state))
        print(f"  optimizer state   {by_rank}")
        if (wrapper := getattr(trainer.strategy, "bucket_ddp", None)) is not None:
            sent = wrapper.last_pass()
            dtypes = ", ".join(sorted({str(bucket.dtype).removeprefix("torch.") for bucket in sent.buckets}))
            print(f"  {sent.grad_nbytes:,} bytes of {dtypes} gradients a step, in {len(sent.buckets)} buckets")


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on this rank: AdamW's two averages, and fp32 masters where there are any."""
    state = optimizer.state_dict()
    tensors = [value for entry in state["state"].values() for value in entry.values()]
    return sum(tensor.nbytes for tensor in [*tensors, *state.get("master_params", {}).values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="bucketddp", help="any Lightning strategy, e.g. ddp")
    parser.add_argument("--devices", type=int, help="default: all accelerators, or two CPU ranks")
    parser.add_argument("--model", help="a Hugging Face model's name or folder instead of the small GPT-2")
    parser.add_argument("--text", type=Path, help="a text file to fine-tune on; default: Python's help pages")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters of a frozen base")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters' matrices")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=150, help="steps of fine-tuning")
    parser.add_argument("--base-steps", type=int, default=200, help="steps of the small GPT-2 before that")
    parser.add_argument("--precision", default="bf16-true", help="the Trainer's, e.g. 32-true")
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
        options = {"grad_dtype": torch.float32, "check_ranks_every": 100}  # warns if the ranks' weights come apart
        ours = {
            "bucketddp": BucketDDPStrategy(**options),
            "bucketddp_sharded": BucketDDPStrategy(**options, shard_optimizer=True),
        }
        held_out, train = (DataLoader(TensorDataset(part), batch_size=16) for part in windows.tensor_split([128]))
        trainer = pl.Trainer(
            strategy=ours.get(args.strategy, args.strategy),
            accelerator="auto" if on_accelerator else "cpu",
            devices=args.devices or (torch.accelerator.device_count() if on_accelerator else 2),
            precision=args.precision,
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

    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        net = AutoModelForCausalLM.from_pretrained(args.model).train()
    else:
        net, tokenizer = small_model(), None
        source = Path(sysconfig.get_path("stdlib")).glob("*.py")
        text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(source))
        say("a base model of Python source, all weights")
        fit(LanguageModel(net, lr=2e-3), encode(text), args.base_steps)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        net = get_peft_model(net, config)
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
