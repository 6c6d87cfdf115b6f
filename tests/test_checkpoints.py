"""Checkpoints are ``ddp``'s: each strategy resumes what the other saved, one device needs no package."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision

from tests.lightning_models import Citizen, data, ddp, ours, trainer
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]
STRATEGIES: dict[str, Callable[[], Any]] = {"ours": ours, "ddp": ddp}


def last(model: Citizen, runs: pl.Trainer) -> dict[str, Any]:
    """What is in a checkpoint that is written now, without what tells the time or the strategy."""
    checkpoint = runs._checkpoint_connector.dump_checkpoint()
    return {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


# -- resumed by the other strategy -------------------------------------------------------------------


@dataclass
class Row:
    """How a run is saved. Lists in ``options`` hold factories, as callbacks and plugins belong to one Trainer."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def scaler_plugin() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5))


def moving_average() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.8)


ROWS = {
    row.name: row
    for row in (
        Row("plain"),
        Row("accumulated", {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}),
        Row("scaler", {"plugins": [scaler_plugin]}),
        Row("asynchronous", {"plugins": [AsyncCheckpointIO]}),
        Row("moving average", {"callbacks": [moving_average]}),
    )
}


def run(strategy: str, epochs: int, row: Row, ckpt_path: str | None = None, **saves: Any) -> tuple[Citizen, pl.Trainer]:
    made = {key: [make() for make in value] if isinstance(value, list) else value for key, value in row.options.items()}
    if saves:
        made["callbacks"] = [*made.get("callbacks", []), ModelCheckpoint(**saves)]
    model = Citizen(optimizer="adamw", schedule="epoch")
    runs = trainer(STRATEGIES[strategy](), max_epochs=epochs, enable_checkpointing=bool(saves), **made)
    runs.fit(model, data(), ckpt_path=ckpt_path)
    runs.strategy.barrier()  # what rank 0 writes is there now
    return model, runs


def handed_over(name: str, first: str, second: str, folder: str) -> float:
    row = ROWS[name]
    expected = last(*run("ddp", 2, row))
    run(first, 1, row, dirpath=folder, filename="first")
    model, runs = run(second, 2, row, f"{folder}/first.ckpt")
    assert runs.global_step > 0
    torch.testing.assert_close(last(model, runs), expected)
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize("strategies", [("ours", "ddp"), ("ddp", "ours")], ids=" to ".join)
@pytest.mark.parametrize("name", ROWS)
def test_resumed_equals_undisturbed(
    run_ranks: RunRanks, name: str, strategies: tuple[str, str], tmp_path: Path
) -> None:
    assert run_ranks(2, handed_over, name, *strategies, str(tmp_path)) == [0.0, 0.0]


def within_an_epoch(folder: str) -> float:
    """As Lightning does it: the rest of the epoch, from the sampler's beginning."""
    run("ours", 1, Row("steps"), dirpath=folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    seen = []
    for strategy in STRATEGIES:
        model, runs = run(strategy, 2, Row("rest"), f"{folder}/step=4.ckpt")
        seen.append(last(model, runs))
    torch.testing.assert_close(*seen)
    assert runs.global_step == 12
    return largest_difference_between_ranks(model)


def test_resumed_within_an_epoch_as_with_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, within_an_epoch, str(tmp_path)) == [0.0, 0.0]


# -- key for key -------------------------------------------------------------------------------------


def keys_of(value: Any) -> Any:
    """The keys of a dictionary and of those in it."""
    return {key: keys_of(part) for key, part in value.items()} if isinstance(value, dict) else None


class Finetuning(BaseFinetuning):
    """Freezes a layer until the second epoch; the optimizer holds it from the beginning."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.net.layers[0])


def saved_keys(folder: str) -> list[tuple[Any, Any]]:
    found = []
    for name, callbacks in {"plain": [], "fine-tuned": [Finetuning]}.items():
        row = Row(name, {"callbacks": callbacks})
        files = {}
        for strategy in STRATEGIES:
            run(strategy, 2, row, dirpath=folder, filename=f"{name}-{strategy}-{{epoch}}", save_top_k=-1)
            for when in ("epoch=0", "epoch=1"):
                checkpoint = torch.load(f"{folder}/{name}-{strategy}-{when}.ckpt", weights_only=False)
                for state in checkpoint["callbacks"]:
                    if state.startswith("ModelCheckpoint"):
                        checkpoint["callbacks"][state] = {}  # names files
                files[strategy, when] = keys_of(checkpoint)
        found += [(files["ours", when], files["ddp", when]) for when in ("epoch=0", "epoch=1")]
    return found


def test_an_ordinary_checkpoint_has_the_keys_of_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(2, saved_keys, str(tmp_path))[0]
    *ordinary, (ours_has, ddp_has) = found
    assert len(ordinary) == 3
    for ours_also, ddp_also in ordinary:
        assert ours_also == ddp_also
    unfrozen = ours_has.pop("bucketddp_trainable")
    assert set(unfrozen) == {"requires_grad", "track_running_stats"}
    assert ours_has == ddp_has


# -- on one device, without this package -------------------------------------------------------------

ALONE = """
import sys, warnings
sys.modules["lightning_bucketddp"] = None  # importing it raises
import lightning.pytorch as pl
import torch
from tests.models import Mlp

class Alone(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Mlp()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

full, weights = sys.argv[1:]
for file in (full, weights):
    state = torch.load(file, weights_only=True)["state_dict"]
    module = Alone.load_from_checkpoint(file, weights_only=True, map_location="cpu")
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name], check_dtype=False, rtol=0, atol=0)
runs = pl.Trainer(
    accelerator="cpu", devices=1, precision="bf16-true", max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
runs.fit(Alone(), torch.randn(6, 4, 8), ckpt_path=full)
assert runs.global_step == 12
print("went on with", len(runs.optimizers[0].state), "parameters")
"""


def save_both(folder: str) -> list[str]:
    callbacks = [
        ModelCheckpoint(folder, "full"),
        ModelCheckpoint(folder, "weights", save_weights_only=True, every_n_train_steps=6),
    ]
    runs = trainer(
        ours(grad_dtype=torch.float32), precision="bf16-true", callbacks=callbacks, enable_checkpointing=True
    )
    runs.fit(Citizen(optimizer="adamw"), data())
    full, weights = (torch.load(f"{folder}/{name}.ckpt", weights_only=True) for name in ("full", "weights"))
    assert {"master_params", "state"} <= full["optimizer_states"][0].keys()
    return sorted(weights)


def test_a_checkpoint_needs_nothing_of_this_package(run_ranks: RunRanks, tmp_path: Path) -> None:
    """With fp32 masters, which another strategy leaves aside."""
    keys, _ = run_ranks(2, save_both, str(tmp_path))
    assert keys == ["epoch", "global_step", "loops", "pytorch-lightning_version", "state_dict"]
    files = [str(tmp_path / f"{name}.ckpt") for name in ("full", "weights")]
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *files], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "went on with 8 parameters"
