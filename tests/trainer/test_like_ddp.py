"""What Lightning's own tests ask of ``ddp``, asked of ``bucketddp``: before any training runs, and on two ranks."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators.mps import MPSAccelerator
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPFabricStrategy, BucketDDPStrategy
from lightning_bucketddp.layout.registry import REGISTERED
from tests.lightning_models import QUIET, Regression, close_to, data, ddp, ours, trainer
from tests.pool import on_ranks
from tests.reference import drift

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:The number of training batches", "ignore:It is recommended to use"
)


@pytest.fixture(autouse=True)
def _outside_of_any_launcher() -> Iterator[None]:
    """No rank and no cluster in the environment; afterwards what was there before."""
    rank = getattr(rank_zero_only, "rank", 0)
    with mock.patch.dict(os.environ):
        for name in filter(re.compile("SLURM_|TORCHELASTIC_|RANK|LOCAL_|WORLD_|GROUP_").match, list(os.environ)):
            del os.environ[name]
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
    rank_zero_only.rank = rank


def made(strategy: Any = "bucketddp", **options: Any) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, **{"accelerator": "cpu", "devices": 2, **QUIET, **options})


@pytest.mark.parametrize("name", REGISTERED)
def test_a_name_stands_for_its_arguments(name: str) -> None:
    assert StrategyRegistry[name]["description"]
    words = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}
    start_method = next((method for word, method in words.items() if word in name), "popen")
    fabrics = Fabric(accelerator="cpu", devices=2, strategy=name).strategy
    for strategy, kind in ((made(name.upper()).strategy, BucketDDPStrategy), (fabrics, BucketDDPFabricStrategy)):
        assert type(strategy) is kind
        assert strategy._start_method == getattr(strategy.launcher, "_start_method", "popen") == start_method
        assert strategy.launcher.is_interactive_compatible == (start_method == "fork")
        assert strategy._options.shard_optimizer is ("_sharded" in name)
        assert strategy._options.find_unused_parameters is name.endswith("_true")


def test_what_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
        with pytest.raises(ValueError, match="DDP family are not supported on the MPS accelerator"):
            made(accelerator="auto", devices=1)
    monkeypatch.setattr("torch.multiprocessing.get_all_start_methods", lambda: ["spawn"])
    for name in ("bucketddp_fork", "bucketddp_notebook"):
        with pytest.raises(ValueError, match=r"on this platform, found 'fork'"):
            made(name)


def test_an_instance_gets_and_keeps_accelerator_and_plugins() -> None:
    strategy, checkpoint_io = BucketDDPStrategy(process_group_backend="own"), TorchCheckpointIO()
    runs = made(strategy, num_nodes=3, plugins=[checkpoint_io], precision="bf16-mixed")
    assert runs.strategy is strategy
    assert (strategy.num_processes, strategy.num_nodes, runs.world_size) == (2, 3, 6)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}
    assert strategy.checkpoint_io is checkpoint_io
    assert type(strategy.precision_plugin) is MixedPrecision
    assert strategy._get_process_group_backend() == "own"


def test_the_timeout_reaches_a_group_that_a_mock_makes() -> None:
    wanted = timedelta(seconds=30)
    strategy: Any = made(BucketDDPStrategy(timeout=wanted), devices=1).strategy
    device, environment = [torch.device("cpu")], LightningEnvironment()
    fabrics: Any = BucketDDPFabricStrategy(timeout=wanted, cluster_environment=environment, parallel_devices=device)
    strategy.connect(Regression())
    fabrics._accelerator = strategy.accelerator
    for each in (strategy, fabrics):
        with mock.patch("torch.distributed.init_process_group") as init_process_group:
            each.setup_environment()
        init_process_group.assert_called_once_with("gloo", rank=0, world_size=1, timeout=wanted, device_id=None)
        each.barrier()
        assert each.broadcast("same") == "same"
    strategy.on_exception(RuntimeError("no group"))  # an error in a LightningModule's hook may end it there
    strategy.teardown()


def test_one_device_trains_and_whoever_patches_backward_sees_it() -> None:
    model, runs = Regression(), made(devices=1, max_epochs=1)
    loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 4)), batch_size=4)
    before, plugin = model.net.head.weight.detach().clone(), runs.precision_plugin
    with mock.patch.object(plugin, "backward", wraps=plugin.backward) as backward:
        runs.fit(model, loader)
    assert backward.call_count == 2
    assert "backward" not in vars(plugin), "as it was"
    assert runs.strategy.process_group_backend == "gloo"
    assert not torch.equal(model.net.head.weight, before)
    assert runs.strategy.model is runs.model is model, "unwrapped"


class Scaled(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.differences: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.differences.append(drift(self))
        loss = nn.functional.mse_loss(self.net(batch[0]) * self.scale.clone(), batch[1])
        self.scale.mul_(0.8).add_(0.2 * batch[1].abs().mean(0))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.differences.append(drift(self))


@on_ranks(2, cases={"trained": (12, None), "validated": (26, {"val_check_interval": 2})}, quick=["validated"])
def test_ranks_train_and_validate_with_the_same_module_buffers(seen: int, flags: dict[str, Any] | None) -> None:
    theirs, model = Scaled(), Scaled()
    for strategy, net in ((ddp(), theirs), (ours(), model)):
        loaders = [data()] if flags is None else [data(), data(2)]
        trainer(strategy, max_epochs=2, **(flags or {})).fit(net, *loaders)
    assert drift(model) == 0, "at the end of fit"
    if flags is None:  # `ddp` leaves each rank its own at the end
        theirs.scale.copy_(model.scale)
    close_to(model, theirs)
    assert model.differences == [0.0] * seen


@on_ranks(2)
def test_models_are_averaged_as_post_local_sgd_has_it() -> None:
    """`ddp` ignores communication hooks on CPU, so what it would do is spelled out."""

    def local_state() -> PostLocalSGDState:
        return PostLocalSGDState(None, dist.new_subgroups(group_size=1)[0], 2)  # each rank is a subgroup

    def averaging() -> Any:
        return ours(ddp_comm_state=local_state(), ddp_comm_hook=post_localSGD_hook, model_averaging_period=3)

    alone, model = Regression(), Regression()
    wrapped = DistributedDataParallel(alone.net)
    wrapped.register_comm_hook(local_state(), post_localSGD_hook)
    averager, optimizer = PeriodicModelAverager(period=3, warmup_steps=2), alone.configure_optimizers()
    for inputs, target in data(8):
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), target).backward()
        optimizer.step()
        averager.average_parameters(alone.parameters())
    trainer(averaging()).fit(model, data(8))
    close_to(model, alone)
    assert drift(model) > 0, "since they were averaged last"
    with pytest.raises(ValueError, match="model averaging cannot work with a distributed optimizer"):
        trainer(averaging()).fit(Regression(optimizer="zero"), data())


class OfRank(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.trainer.strategy.model is self, "not wrapped where there are no gradients"

    test_step = predict_step = validation_step


@on_ranks(2, cases=("validate", "test", "predict"))
def test_evaluation_uses_rank_0s_weights_and_no_wrapper(stage: str) -> None:
    model = OfRank()
    for param in model.parameters():
        nn.init.constant_(param, dist.get_rank())
    getattr(trainer(ours()), stage)(model, data(1))
    assert all((param == 0).all() for param in model.parameters()), "rank 0's"


class Interrupted(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.how == "raise":
            raise ArithmeticError("on every rank")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how == "stop" and self.global_step == 3:
            self.trainer.should_stop = True
        if self.how == "sigterm" and self.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@on_ranks(2, cases=[("raise", ArithmeticError), ("sigterm", SIGTERMException), ("stop", ())])
def test_early_ends_leave_nothing_behind(how: str, error: Any) -> None:
    runs, model = trainer(ours()), Interrupted(how)
    with pytest.raises(error) if error else nullcontext():
        runs.fit(model, data())
    assert runs.strategy.model is model, "unwrapped"
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    assert runs.state.status.value == ("interrupted" if error else "finished")
