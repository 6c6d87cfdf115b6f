"""Checkpoints are ``ddp``'s: each strategy resumes what the other saved, one device needs no package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from torch import Tensor

from tests.lightning_models import Citizen, data, ddp, ours, trainer
from tests.models import Mlp
from tests.pool import RunRanks, case, on_ranks
from tests.reference import largest_difference_between_ranks

STRATEGIES: dict[str, Callable[[], Any]] = {"ours": ours, "ddp": ddp}


def scaler_plugin() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5))


Options = dict[str, Any]
WAYS: dict[str, Callable[[], Options]] = {
    "accumulated": lambda: {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    "scaler": lambda: {"plugins": [scaler_plugin()]},
    "asynchronous": lambda: {"plugins": [AsyncCheckpointIO()]},
    "moving average": lambda: {"callbacks": [EMAWeightAveraging(decay=0.8)]},
}


def last(runs: Any) -> dict[str, Any]:
    """What is in a checkpoint that is written now, without what tells the time or the strategy."""
    checkpoint = runs._checkpoint_connector.dump_checkpoint()
    return {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


def run(strategy: str, epochs: int, options: Options, path: str | None = None, **saves: Any) -> dict[str, Any]:
    if saves:
        options = {**options, "callbacks": [*options.get("callbacks", []), ModelCheckpoint(**saves)]}
    model = Citizen(optimizer="adamw", schedule="epoch")
    runs = trainer(STRATEGIES[strategy](), max_epochs=epochs, enable_checkpointing=bool(saves), **options)
    runs.fit(model, data(), ckpt_path=path)
    runs.strategy.barrier()  # what rank 0 writes is there now
    assert strategy == "ddp" or largest_difference_between_ranks(model) == 0
    return last(runs)


@on_ranks(2)
def test_either_strategy_resumes_the_others_checkpoint(tmp_path: Path) -> None:
    for name, way in WAYS.items():
        with case(name):
            expected = run("ddp", 2, way())
            for first, second in (("ours", "ddp"), ("ddp", "ours")):
                file = f"{name}-{first}"
                run(first, 1, way(), dirpath=tmp_path, filename=file)
                torch.testing.assert_close(run(second, 2, way(), f"{tmp_path}/{file}.ckpt"), expected)
    run("ours", 1, {}, dirpath=tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    rest = [run(strategy, 2, {}, f"{tmp_path}/step=4.ckpt") for strategy in STRATEGIES]
    torch.testing.assert_close(*rest)
    assert rest[0]["global_step"] == 12


class Finetuning(BaseFinetuning):
    """Freezes a layer until the second epoch; the optimizer holds it from the beginning."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.net.layers[0])


def keys_of(value: Any) -> Any:
    return {key: keys_of(part) for key, part in value.items()} if isinstance(value, dict) else None


def save_keys(folder: str) -> None:
    for strategy in STRATEGIES:
        run(strategy, 2, {"callbacks": [Finetuning()]}, dirpath=folder, filename=strategy + "-{epoch}", save_top_k=-1)


def test_a_checkpoint_has_the_keys_of_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, save_keys, str(tmp_path))
    keys = {}
    for path in tmp_path.iterdir():
        checkpoint = torch.load(path, weights_only=False)
        for state in checkpoint["callbacks"]:
            if state.startswith("ModelCheckpoint"):
                checkpoint["callbacks"][state] = {}  # names files
        keys[path.stem] = keys_of(checkpoint)
    assert keys["ours-epoch=0"] == keys["ddp-epoch=0"]
    unfrozen = keys["ours-epoch=1"].pop("bucketddp_trainable")
    assert set(unfrozen) == {"requires_grad", "track_running_stats"}
    assert keys["ours-epoch=1"] == keys["ddp-epoch=1"]


class Alone(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def save_masters(folder: str) -> None:
    weights = ModelCheckpoint(folder, "weights", save_weights_only=True, every_n_train_steps=6)
    callbacks = [ModelCheckpoint(folder, "full"), weights]
    strategy = ours(grad_dtype=torch.float32)
    runs = trainer(strategy, precision="bf16-true", callbacks=callbacks, enable_checkpointing=True)
    runs.fit(Citizen(optimizer="adamw"), data())


def load_alone(folder: str) -> None:
    """Reads tensors and plain values only, so that no class of the package is needed."""
    paths = [f"{folder}/{name}.ckpt" for name in ("full", "weights")]
    full, weights = (torch.load(path, weights_only=True) for path in paths)
    assert {"master_params", "state"} <= full["optimizer_states"][0].keys()
    assert sorted(weights) == ["epoch", "global_step", "loops", "pytorch-lightning_version", "state_dict"]
    for path, state in zip(paths, (full, weights), strict=True):
        module = Alone.load_from_checkpoint(path, weights_only=True, map_location="cpu")
        torch.testing.assert_close(dict(module.state_dict()), state["state_dict"], check_dtype=False, rtol=0, atol=0)
    runs = trainer("auto", precision="bf16-true", max_epochs=2)
    runs.fit(Alone(), torch.randn(6, 4, 8), ckpt_path=paths[0])
    assert runs.global_step == 12
    assert len(runs.optimizers[0].state) == 8


def test_a_checkpoint_needs_nothing_of_this_package(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, save_masters, str(tmp_path))
    run_ranks(1, load_alone, str(tmp_path))
