"""A Trainer and a Fabric train on the simulated device as on the CPU."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_bucketddp import BucketDDPFabricStrategy
from tests.lightning_models import Citizen, PoolEnvironment, Regression, close_to, data, ours, trainer
from tests.models import Mlp, batch
from tests.pool import ROOT, on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_optimizer": True},
    "wire": {"wire_dtype": "bf16"},
    "hook": {"comm_hook": "bf16"},
}
TRAINER: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}


def fitted(accelerator: str, options: dict[str, Any], **others: Any) -> Regression:
    module = Citizen()
    module.records = "shard_optimizer" not in options
    fit = trainer(ours(**options), accelerator=accelerator, **{**TRAINER, **others})
    fit.fit(module, data(), data(2))
    if accelerator == "sim":
        assert fit.strategy.root_device == torch.device("sim", dist.get_rank())
        assert module.net.head.weight.device == fit.strategy.root_device or module.device.type == "cpu"
    return module.cpu()


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_a_trainer_trains_as_on_the_cpu(name: str) -> None:
    close_to(fitted("cpu", OPTIONS[name]), fitted("sim", OPTIONS[name]))


@on_ranks(2)
def test_auto_finds_the_device() -> None:
    assert trainer(ours(), accelerator="auto").strategy.root_device.type == "sim"
    assert Fabric(accelerator="auto", devices=1).device == torch.device("sim", 0)


@on_ranks(2)
def test_a_trainer_trains_bf16_parameters_with_fp32_gradients() -> None:
    modules = [
        fitted(it, {"grad_dtype": torch.float32}, precision="bf16-true", gradient_clip_val=None)
        for it in ("cpu", "sim")
    ]
    assert modules[0].net.head.weight.dtype is torch.bfloat16 or modules[0].net.head.weight.dtype is torch.float32
    close_to(*modules)


def with_fabric(accelerator: str, options: dict[str, Any]) -> nn.Module:
    strategy = BucketDDPFabricStrategy(cluster_environment=PoolEnvironment(), bucket_cap_mb=0.0003, **options)
    fabric = Fabric(accelerator=accelerator, devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(5)
    module = Mlp()
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
    return module.cpu()


@pytest.mark.parametrize("name", ["plain", "sharded"])
@on_ranks(2)
def test_a_fabric_trains_as_on_the_cpu(name: str) -> None:
    states = [with_fabric(accelerator, OPTIONS[name]).state_dict() for accelerator in ("cpu", "sim")]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value)


@pytest.mark.slow
def test_the_digits_example_trains_on_two_devices() -> None:
    """As a user starts it: Lightning starts the second rank itself."""
    command = [sys.executable, "-m", "tests.simulated", "examples/finetune_digits.py", "--epochs", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "strategy bucketddp, 2 ranks on sim" in ended.stdout
    assert "every rank holds the same model" in ended.stdout
    assert ended.stderr.count("0 pair(s) of accesses that nothing orders") == 2, ended.stderr[-3000:]
