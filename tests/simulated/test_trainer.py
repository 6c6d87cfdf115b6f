"""A Trainer and a Fabric train on the simulated device as on the CPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPFabricStrategy
from tests import dp
from tests.lightning_models import Citizen, PoolEnvironment, Regression, data, ours, trainer
from tests.models import Mlp, batch
from tests.pool import ROOT, RunRanks, on_ranks
from tests.sampling import some_slow

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_optimizer": True},
    "wire": {"wire_dtype": "bf16"},
    "hook": {"comm_hook": "bf16"},
}
TRAINER: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}


class Logging(Citizen):
    records = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log no norms: those of sharded gradients are refused."""


def fitted(accelerator: str, options: dict[str, Any], others: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after a fit, and what was logged."""
    module = Logging()
    fit = trainer(ours(**options), accelerator=accelerator, **{**TRAINER, **others})
    fit.fit(module, data(4), data(2))
    assert fit.strategy.root_device.type == accelerator
    logged = {name: fit.callback_metrics[name].detach().cpu() for name in ("train_epoch", "valid", "mean")}
    return {**module.cpu().state_dict(), **logged}


def same(ranks_on_cpu: RunRanks, ranks_on_simulated: RunRanks, job: Any, *args: Any) -> list[dict[str, Tensor]]:
    """Require that a job gives the same on both; what it gave on the device."""
    expected, found = ranks_on_cpu(2, job, "cpu", *args), ranks_on_simulated(2, job, "sim", *args)
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, msg=lambda m, n=name: f"{n}: {m}")
    return found


@pytest.mark.parametrize("name", some_slow(OPTIONS, {"sharded"}))
def test_a_trainer_trains_as_on_the_cpu(ranks_on_cpu: RunRanks, ranks_on_simulated: RunRanks, name: str) -> None:
    same(ranks_on_cpu, ranks_on_simulated, fitted, OPTIONS[name], {})


def test_a_trainer_trains_bf16_with_fp32_gradients(ranks_on_cpu: RunRanks, ranks_on_simulated: RunRanks) -> None:
    others = {"precision": "bf16-true", "gradient_clip_val": None}
    found = same(ranks_on_cpu, ranks_on_simulated, fitted, {"grad_dtype": torch.float32}, others)
    assert found[0]["net.head.weight"].dtype is torch.bfloat16


def saved_meanwhile(accelerator: str, options: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """What a thread has written of each step, while training went on."""
    saves = ModelCheckpoint(folder / accelerator, "{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = ours(state_dict_type="sharded", async_save=True, **options)
    fit = trainer(strategy, accelerator=accelerator, callbacks=[saves], enable_checkpointing=True)
    fit.fit(Logging(optimizer="adamw"), data(3))
    found: dict[str, Tensor] = {}
    for path in sorted((folder / accelerator).iterdir()):
        one = folder / f"{dist.get_rank()}.pt"
        dcp_to_torch_save(path, one)
        saved = torch.load(one, weights_only=False)
        found |= {f"{path.stem}: {name}": value for name, value in saved["model"].items()}
        for name, entries in saved["optimizers"][0]["state"].items():
            found |= {f"{path.stem}: {name}.{key}": value for key, value in entries.items()}
    return found


@pytest.mark.parametrize("name", some_slow(["plain", "sharded"], {"sharded"}))
def test_a_thread_writes_what_was_saved(
    ranks_on_cpu: RunRanks, ranks_on_simulated: RunRanks, name: str, tmp_path: Path
) -> None:
    found = same(ranks_on_cpu, ranks_on_simulated, saved_meanwhile, OPTIONS[name], tmp_path)
    assert {key.partition(":")[0] for key in found[0]} == {f"step={step}" for step in range(1, 4)}


@on_ranks(1)
def test_replicas_on_two_devices_have_metrics_of_their_own() -> None:
    found = []
    for accelerator in ("cpu", "sim"):
        fits = dp.one_process(2, share=False, accelerator=accelerator)
        fits.fit(dp.Digits(), dp.digits(), dp.digits(count=13))
        found.append({name: value.cpu() for name, value in fits.callback_metrics.items()})
    dp.close(found[1], found[0], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_auto_finds_the_device() -> None:
    strategy = BucketDDPFabricStrategy(cluster_environment=PoolEnvironment())
    for found in (trainer(ours(), accelerator="auto").strategy, Fabric(devices=2, strategy=strategy).strategy):
        assert found.root_device == torch.device("sim", dist.get_rank())


def with_fabric(accelerator: str, options: dict[str, Any]) -> dict[str, Tensor]:
    strategy = BucketDDPFabricStrategy(cluster_environment=PoolEnvironment(), bucket_cap_mb=0.0003, **options)
    fabric = Fabric(accelerator=accelerator, devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(5)
    module = Mlp().to(fabric.device)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    for step in range(4):
        for local in (True, False):
            x, target = (tensor.to(fabric.device) for tensor in batch(10 * step + local, dist.get_rank()))
            with fabric.no_backward_sync(model, enabled=local):
                fabric.backward(nn.functional.mse_loss(model(x), target))
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert next(module.parameters()).device.type == accelerator
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", some_slow(["plain", "sharded"], {"sharded"}))
def test_a_fabric_trains_as_on_the_cpu(ranks_on_cpu: RunRanks, ranks_on_simulated: RunRanks, name: str) -> None:
    same(ranks_on_cpu, ranks_on_simulated, with_fabric, OPTIONS[name])


@pytest.mark.slow
def test_the_digits_example_trains_on_two_devices() -> None:
    """As a user starts it: Lightning starts the second rank itself."""
    command = [sys.executable, "-m", "tests.simulated", "examples/finetune_digits.py", "--epochs", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "strategy bucketddp, 2 ranks on sim" in ended.stdout
    assert "every rank holds the same model" in ended.stdout
    assert ended.stderr.count("0 pair(s) of accesses that nothing orders") == 2, ended.stderr[-3000:]


@on_ranks(2)
def test_uneven_inputs_with_synchronised_batch_norm_are_refused() -> None:
    """Torch's layer, which accelerators use, would wait for a rank that has no batch left. Without it ranks may."""
    own = DataLoader(data(4).dataset if dist.get_rank() else [], 4)
    with pytest.raises(ValueError, match=r"with uneven_inputs on an accelerator, found 'net\.norm'.*no batch left"):
        trainer(ours(uneven_inputs="world_size"), accelerator="sim", sync_batchnorm=True).fit(Regression("norm"), own)
