"""What Lightning's own tests ask of ``ddp`` before any training runs, asked of ``bucketddp`` in the same words.

Names, the Trainer's choice of environment, launcher and plugins, ranks, and refusals. What needs ranks is in
``test_as_ddp_training.py`` and ``test_as_ddp_evaluation.py``.
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
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.accelerators.mps import MPSAccelerator
from lightning.pytorch.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TorchCheckpointIO,
    TorchSyncBatchNorm,
)
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPFabricStrategy, BucketDDPStrategy
from tests.lightning_models import PoolEnvironment, Regression

STRATEGIES: dict[str, type[DDPStrategy]] = {"ddp": DDPStrategy, "bucketddp": BucketDDPStrategy}

pytestmark = pytest.mark.filterwarnings("ignore:.*`srun` command is available")  # where Slurm is installed


@pytest.fixture(params=STRATEGIES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


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


def made(strategy: Any, **options: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, **{"accelerator": "cpu", "devices": 2, **quiet, **options})


# -- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unused", ["", "_find_unused_parameters_false", "_find_unused_parameters_true"])
@pytest.mark.parametrize(
    ("launch", "start_method"), [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
)
def test_every_name_of_ddp_has_its_counterpart(kind: str, launch: str, start_method: str, unused: str) -> None:
    name = kind + launch + unused
    expected = {"start_method": start_method}
    if unused:
        expected["find_unused_parameters"] = unused.endswith("true")
    assert StrategyRegistry[name]["init_params"] == expected
    assert StrategyRegistry[name]["description"]
    runs = made(name)
    assert type(runs.strategy) is STRATEGIES[kind]
    assert runs.strategy.launcher.is_interactive_compatible == (start_method == "fork")
    assert getattr(runs.strategy.launcher, "_start_method", "popen") == start_method


def test_names_are_in_any_case(kind: str) -> None:
    assert type(made(kind.upper()).strategy) is STRATEGIES[kind]


def test_a_name_of_ones_own_carries_arguments(kind: str) -> None:
    checkpoint_io, name = TorchCheckpointIO(), f"{kind}_with_checkpoint_io"
    StrategyRegistry.register(name, STRATEGIES[kind], checkpoint_io=checkpoint_io, bucket_cap_mb=1)
    try:
        assert made(name).strategy.checkpoint_io is checkpoint_io
    finally:
        StrategyRegistry.remove(name)


# -- what the Trainer puts into the strategy ---------------------------------------------------------


def test_an_instance_gets_devices_accelerator_and_plugins(kind: str) -> None:
    strategy, checkpoint_io = STRATEGIES[kind](), TorchCheckpointIO()
    runs = made(strategy, num_nodes=3, plugins=[checkpoint_io])
    assert runs.strategy is strategy
    assert isinstance(strategy.accelerator, CPUAccelerator)
    assert strategy.parallel_devices == [torch.device("cpu")] * 2
    assert strategy.root_device == torch.device("cpu")
    assert strategy.determine_ddp_device_ids() is None
    assert (strategy.num_processes, strategy.num_nodes, runs.world_size) == (2, 3, 6)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}
    assert strategy.checkpoint_io is checkpoint_io
    assert runs._accelerator_connector.is_distributed


def test_what_an_instance_was_given_is_kept(kind: str) -> None:
    class Accelerator(CPUAccelerator):
        pass

    class Plugin(Precision):
        pass

    strategy = STRATEGIES[kind](accelerator=Accelerator(), precision_plugin=Plugin(), process_group_backend="gloo")
    runs = pl.Trainer(strategy=strategy, devices=2, logger=False, enable_checkpointing=False)
    assert type(runs.accelerator) is Accelerator
    assert type(runs.precision_plugin) is Plugin
    assert strategy.process_group_backend == "gloo"


def test_devices_of_another_accelerator_are_refused(kind: str) -> None:
    strategy = STRATEGIES[kind](parallel_devices=[torch.device("cpu")])
    with pytest.raises(MisconfigurationException, match="parallel_devices set through"):
        made(strategy, accelerator="cuda", devices=1)


@pytest.mark.parametrize(
    ("precision", "plugin"),
    [
        ("64-true", DoublePrecision),
        ("32-true", Precision),
        ("bf16-true", HalfPrecision),
        ("16-true", HalfPrecision),
        ("bf16-mixed", MixedPrecision),
    ],
)
def test_precision_plugins_are_the_plain_ones(kind: str, precision: str, plugin: type[Precision]) -> None:
    assert type(made(kind, precision=precision).strategy.precision_plugin) is plugin


@pytest.mark.parametrize("how", ["flag", "plugin"])
def test_batch_norm_is_synchronised_on_request(kind: str, how: str) -> None:
    asked = {"sync_batchnorm": True} if how == "flag" else {"plugins": [TorchSyncBatchNorm()]}
    assert isinstance(made(kind, **asked).strategy._layer_sync, LayerSync)
    assert made(kind).strategy._layer_sync is None


@pytest.mark.parametrize(
    ("asked", "device", "backend"),
    [(None, "cpu", "gloo"), (None, "cuda:0", "nccl"), ("own", "cpu", "own"), ("own", "cuda:0", "own")],
)
def test_the_backend_goes_with_the_device(kind: str, asked: str | None, device: str, backend: str) -> None:
    environment = LightningEnvironment()
    strategy = STRATEGIES[kind](
        parallel_devices=[torch.device(device)], cluster_environment=environment, process_group_backend=asked
    )
    assert strategy._get_process_group_backend() == backend


# -- clusters and ranks ------------------------------------------------------------------------------

SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NAME": "training",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
ELASTIC = {
    "TORCHELASTIC_RUN_ID": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "0",
}
KUBEFLOW = {"MASTER_ADDR": "1.2.3.4", "MASTER_PORT": "500", "WORLD_SIZE": "20", "RANK": "7"}


@pytest.mark.parametrize(
    ("variables", "plugins", "environment", "local_rank", "global_rank"),
    [
        ({}, [], LightningEnvironment, 0, 0),
        (SLURM, [], SLURMEnvironment, 1, 1),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, [], LightningEnvironment, 0, 0),
        (ELASTIC, [], TorchElasticEnvironment, 1, 1),
        ({**SLURM, **ELASTIC}, [], TorchElasticEnvironment, 1, 1),
        (KUBEFLOW, [KubeflowEnvironment], KubeflowEnvironment, 0, 7),
        (SLURM, [LightningEnvironment], LightningEnvironment, 0, 0),
    ],
    ids=["none", "slurm", "interactive slurm", "elastic", "elastic in slurm", "kubeflow", "plugin in slurm"],
)
@pytest.mark.parametrize("given", ["name", "instance"])
def test_the_cluster_gives_the_ranks_before_anything_runs(
    kind: str,
    given: str,
    variables: dict[str, str],
    plugins: list[type[ClusterEnvironment]],
    environment: type[ClusterEnvironment],
    local_rank: int,
    global_rank: int,
) -> None:
    os.environ.update(variables)
    runs = made(kind if given == "name" else STRATEGIES[kind](), plugins=[plugin() for plugin in plugins])
    assert type(runs.strategy.cluster_environment) is environment
    assert (runs.strategy.local_rank, runs.strategy.global_rank) == (local_rank, global_rank)
    assert rank_zero_only.rank == global_rank
    assert runs.is_global_zero == (global_rank == 0)
    assert runs.strategy.distributed_sampler_kwargs["rank"] == global_rank


# -- parts of a set-up -------------------------------------------------------------------------------

FABRIC_STRATEGIES = {"ddp": FabricDDPStrategy, "bucketddp": BucketDDPFabricStrategy}


@pytest.mark.parametrize("framework", ["trainer", "fabric"])
def test_the_timeout_reaches_a_group_that_a_mock_makes(kind: str, framework: str) -> None:
    wanted = timedelta(seconds=30)
    with mock.patch("torch.distributed.init_process_group") as init_process_group:
        if framework == "trainer":
            runs = made(STRATEGIES[kind](timeout=wanted), devices=1)
            strategy: Any = runs.strategy
            strategy.connect(Regression())
        else:
            strategy = FABRIC_STRATEGIES[kind](
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


@pytest.mark.filterwarnings("ignore")  # about data loader workers and epochs of few steps
def test_training_is_restored_into_a_module_without_a_trainer(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "first.ckpt"
    first = made("bucketddp", devices=1, max_epochs=1)
    first.fit(OneStep("mlp", "adamw"))
    first.save_checkpoint(path)

    second = made(kind, devices=1, max_epochs=1)
    model = OneStep("mlp", "adamw")
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


def test_a_checkpoint_is_saved_and_loaded_without_a_module(kind: str, tmp_path: Path) -> None:
    strategy = made(kind, devices=1).strategy
    strategy.save_checkpoint({"optimizer_states": []}, tmp_path / "bare.ckpt")
    strategy.load_optimizer_state_dict(strategy.load_checkpoint(tmp_path / "bare.ckpt"))
    assert strategy.optimizers == []


# -- launchers ---------------------------------------------------------------------------------------


def test_processes_that_exist_are_not_started_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = STRATEGIES[kind](cluster_environment=PoolEnvironment(), parallel_devices=[torch.device("cpu")] * 2)
    assert strategy.launcher is None
    strategy._configure_launcher()
    started: list[str] = []
    monkeypatch.setattr(strategy.launcher, "_call_children_scripts", lambda: started.append("children"))
    assert strategy.launcher.launch(lambda: started.append("here") or "result") == "result"
    assert started == ["here"]


def test_a_rank_that_would_start_processes_is_refused(kind: str) -> None:
    class StartsOnEveryRank(LightningEnvironment):
        @property
        def creates_processes_externally(self) -> bool:
            return False

    os.environ["LOCAL_RANK"] = "1"
    with pytest.raises(RuntimeError, match=r"new distributed processes with `local_rank > 0`"):
        made(kind, plugins=[StartsOnEveryRank()]).fit(Regression(), DataLoader([]))


def test_notebooks_take_the_forking_names_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    for name in (f"{kind}_fork", f"{kind}_notebook"):
        assert made(name).strategy.launcher.is_interactive_compatible
    for name in (kind, f"{kind}_spawn"):
        with pytest.raises(MisconfigurationException, match="not compatible with an interactive"):
            made(name)


def test_forking_is_refused_where_the_platform_has_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_all_start_methods", lambda: ["spawn"])
    for name in (f"{kind}_fork", f"{kind}_notebook", f"{kind}_fork_find_unused_parameters_true"):
        with pytest.raises(
            ValueError, match=r"on this platform.*fork|fork.* is not (supported|available) on this platform"
        ):
            made(name)


def test_mps_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    for strategy in (kind, f"{kind}_spawn", STRATEGIES[kind]()):
        with pytest.raises(ValueError, match="DDP family are not supported on the MPS accelerator"):
            made(strategy, accelerator="auto", devices=1)


@pytest.mark.parametrize("stage", [TrainerFn.FITTING, TrainerFn.TESTING])
def test_a_spawned_rank_0_hands_its_weights_and_metrics_back(kind: str, stage: TrainerFn, tmp_path: Any) -> None:
    runs = made(f"{kind}_spawn", default_root_dir=tmp_path)
    model = Regression()
    runs.strategy.connect(model)
    runs.state.fn = stage
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    runs.callback_metrics["loss"] = torch.tensor(3.0)
    output = runs.strategy.launcher._collect_rank_zero_results(runs, "what fit returned")
    assert output.trainer_results == "what fit returned"
    # what follows happens in the process that started the others, where the model is as it was before
    for param in model.parameters():
        torch.nn.init.zeros_(param)
    runs.callback_metrics.clear()
    runs.strategy.launcher._recover_results_in_main_process(output, runs)
    assert runs.callback_metrics["loss"] == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name] if stage == TrainerFn.FITTING else torch.zeros_like(value))

    os.environ["LOCAL_RANK"] = "1"
    assert runs.strategy.launcher._collect_rank_zero_results(runs, None) is None, "other ranks hand nothing back"


def test_a_second_fit_in_spawned_processes_is_refused(kind: str) -> None:
    runs = made(f"{kind}_spawn")
    runs.strategy.launcher._already_fit = True
    with pytest.raises(NotImplementedError, match="twice"):
        runs.fit(Regression(), DataLoader([]))


def test_the_batch_size_is_not_tuned_over_ranks(kind: str) -> None:
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(made(kind)).scale_batch_size(Regression(), DataLoader([]))


# -- a group of one ----------------------------------------------------------------------------------


class OneStep(Regression):
    """Notes the group that its hooks find."""

    def setup(self, stage: str) -> None:
        self.group = (dist.get_backend(), dist.get_world_size())

    def train_dataloader(self) -> Any:
        return DataLoader(list(zip(torch.randn(8, 8), torch.randn(8, 4), strict=True)), batch_size=4)

    test_dataloader = train_dataloader

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


@pytest.mark.filterwarnings("ignore")  # about data loader workers and epochs of few steps
def test_one_device_trains_and_tests_in_a_group_of_its_own(kind: str) -> None:
    model = OneStep()
    before = model.net.head.weight.detach().clone()
    runs = made(kind, devices=1, max_epochs=1)
    runs.fit(model)
    assert model.group == ("gloo", 1)
    assert runs.strategy.process_group_backend == "gloo"
    assert not torch.equal(model.net.head.weight, before)
    assert runs.strategy.model is runs.model is model, "unwrapped"
    assert runs.test(model, verbose=False)[0]["loss"] > 0


@pytest.mark.filterwarnings("ignore")  # about data loader workers and epochs of few steps
@pytest.mark.parametrize("where", ["strategy", "plugin"])
def test_who_wraps_backward_sees_every_call(kind: str, where: str) -> None:
    runs = made(kind, devices=1, max_epochs=1)
    plugin = runs.precision_plugin
    target, owner = (Strategy, runs.strategy) if where == "strategy" else (plugin, plugin)
    with mock.patch.object(target, "backward", wraps=owner.backward) as backward:
        runs.fit(OneStep())
        assert target.backward is backward
    assert backward.call_count == 2
    assert "backward" not in vars(plugin), "as it was"


@pytest.mark.filterwarnings("ignore:Device capability of foo unknown")
def test_an_unknown_backend_is_an_error(kind: str) -> None:
    with pytest.raises(AssertionError, match="Unknown backend type foo"):
        made(STRATEGIES[kind](process_group_backend="foo"), devices=1, max_epochs=1).fit(OneStep())
