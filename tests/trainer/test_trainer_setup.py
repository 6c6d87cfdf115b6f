"""What Lightning's own tests ask of ``ddp`` before any training runs, asked of ``bucketddp``.

Names, the Trainer's choice of environment, launcher and plugins, ranks, refusals, and mocked or partial set-ups.
"""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator as FabricCPUAccelerator
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.accelerators.mps import MPSAccelerator
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPFabricStrategy, BucketDDPStrategy
from lightning_bucketddp.trainer.common import REGISTERED
from tests.lightning_models import Regression

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*`srun` command",
    "ignore:.*does not have many workers",
    "ignore:The number of training batches",
    "ignore:It is recommended to use",
)


@pytest.fixture(autouse=True)
def _outside_of_any_launcher() -> Iterator[None]:
    """No rank and no cluster in the environment; afterwards what was there before."""
    before, rank = dict(os.environ), getattr(rank_zero_only, "rank", 0)
    launchers = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    for name in [name for name in os.environ if name.startswith(launchers)]:
        del os.environ[name]
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    rank_zero_only.rank = rank


def made(strategy: Any = "bucketddp", **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(strategy=strategy, **{"accelerator": "cpu", "devices": 2, **quiet, **options})


@pytest.mark.parametrize("name", REGISTERED)
def test_a_name_stands_for_its_arguments(name: str) -> None:
    assert StrategyRegistry[name]["description"]
    strategy = made(name.upper()).strategy
    words = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}
    start_method = next((method for word, method in words.items() if word in name), "popen")
    assert type(strategy) is BucketDDPStrategy
    assert strategy._start_method == getattr(strategy.launcher, "_start_method", "popen") == start_method
    assert strategy.launcher.is_interactive_compatible == (start_method == "fork")
    assert strategy._options.shard_optimizer is ("_sharded" in name)
    assert strategy._options.find_unused_parameters is name.endswith("_true")


def test_what_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
        with pytest.raises(ValueError, match="DDP family are not supported on the MPS accelerator"):
            made(accelerator="auto", devices=1)
    with pytest.raises(MisconfigurationException, match="parallel_devices set through"):
        made(BucketDDPStrategy(parallel_devices=[torch.device("cpu")]), accelerator="cuda", devices=1)
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(made()).scale_batch_size(Regression(), DataLoader([]))
    monkeypatch.setattr("torch.multiprocessing.get_all_start_methods", lambda: ["spawn"])
    for name in ("bucketddp_fork", "bucketddp_notebook"):
        with pytest.raises(ValueError, match=r"on this platform, found 'fork'"):
            made(name)


def test_an_instance_gets_and_keeps_accelerator_and_plugins() -> None:
    BucketDDPStrategy.register_strategies(StrategyRegistry)  # again: no error
    strategy, checkpoint_io = BucketDDPStrategy(process_group_backend="own"), TorchCheckpointIO()
    runs = made(strategy, num_nodes=3, plugins=[checkpoint_io], precision="bf16-mixed", sync_batchnorm=True)
    assert runs.strategy is strategy
    assert isinstance(strategy.accelerator, CPUAccelerator)
    assert strategy.parallel_devices == [torch.device("cpu")] * 2
    assert strategy.determine_ddp_device_ids() is None
    assert (strategy.num_processes, strategy.num_nodes, runs.world_size) == (2, 3, 6)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}
    assert strategy.checkpoint_io is checkpoint_io
    assert type(strategy.precision_plugin) is MixedPrecision
    assert isinstance(strategy._layer_sync, TorchSyncBatchNorm)
    assert strategy._get_process_group_backend() == "own"
    on_device = BucketDDPStrategy(parallel_devices=[torch.device("cuda:0")], cluster_environment=LightningEnvironment())
    assert on_device._get_process_group_backend() == "nccl"


@pytest.mark.parametrize("framework", ["trainer", "fabric"])
def test_the_timeout_reaches_a_group_that_a_mock_makes(framework: str) -> None:
    wanted = timedelta(seconds=30)
    with mock.patch("torch.distributed.init_process_group") as init_process_group:
        if framework == "trainer":
            strategy: Any = made(BucketDDPStrategy(timeout=wanted), devices=1).strategy
            strategy.connect(Regression())
        else:
            strategy = BucketDDPFabricStrategy(
                timeout=wanted,
                accelerator=FabricCPUAccelerator(),
                cluster_environment=LightningEnvironment(),
                parallel_devices=[torch.device("cpu")],
            )
        strategy.setup_environment()
    init_process_group.assert_called_once_with("gloo", rank=0, world_size=1, timeout=wanted, device_id=None)
    if framework == "trainer":  # an error in a LightningModule's hook may end it there
        strategy.on_exception(RuntimeError("no group"))
    strategy.barrier()
    assert strategy.broadcast("same") == "same"
    strategy.teardown()


class OneStep(Regression):
    def setup(self, stage: str) -> None:
        self.group = (dist.get_backend(), dist.get_world_size())

    def train_dataloader(self) -> Any:
        return DataLoader(list(zip(torch.randn(8, 8), torch.randn(8, 4), strict=True)), batch_size=4)

    test_dataloader = train_dataloader

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


def test_training_is_restored_into_a_module_without_a_trainer(tmp_path: Path) -> None:
    path, first = tmp_path / "first.ckpt", made(devices=1, max_epochs=1)
    first.fit(OneStep("mlp", "adamw"))
    first.save_checkpoint(path)

    second, model = made(devices=1, max_epochs=1), OneStep("mlp", "adamw")
    second.strategy.save_checkpoint({"optimizer_states": []}, tmp_path / "bare.ckpt")  # without a module
    second.strategy.load_optimizer_state_dict(second.strategy.load_checkpoint(tmp_path / "bare.ckpt"))
    assert second.strategy.optimizers == []
    second.strategy.connect(model)
    second.strategy.setup_environment()
    second.strategy.optimizers = [model.configure_optimizers()]
    second.state.fn = TrainerFn.FITTING
    second._checkpoint_connector.restore(path)
    found, expected = second.strategy.optimizers[0].state_dict(), first.optimizers[0].state_dict()
    torch.testing.assert_close(found, expected)
    assert found["state"]
    second.strategy.save_checkpoint(second._checkpoint_connector.dump_checkpoint(), tmp_path / "second.ckpt")
    assert (tmp_path / "second.ckpt").exists()


@pytest.mark.parametrize("where", ["strategy", "plugin"])
def test_one_device_trains_and_whoever_patches_backward_sees_it(where: str) -> None:
    model, runs = OneStep(), made(devices=1, max_epochs=1)
    before, plugin = model.net.head.weight.detach().clone(), runs.precision_plugin
    target, owner = (Strategy, runs.strategy) if where == "strategy" else (plugin, plugin)
    with mock.patch.object(target, "backward", wraps=owner.backward) as backward:
        runs.fit(model)
        assert target.backward is backward
    assert backward.call_count == 2
    assert "backward" not in vars(plugin), "as it was"
    assert model.group == ("gloo", 1)
    assert runs.strategy.process_group_backend == "gloo"
    assert not torch.equal(model.net.head.weight, before)
    assert runs.strategy.model is runs.model is model, "unwrapped"
    assert runs.test(model, verbose=False)[0]["loss"] > 0
