"""The strategies' arguments and calls: all reach the wrapper, and what cannot be honoured is refused early."""

import copy
import importlib
import inspect
import os
import pickle
import socket
import warnings
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, BucketDDPFabricStrategy, BucketDDPStrategy, CommunicationMonitor, Options
from lightning_bucketddp.layout.plan import MIB
from lightning_bucketddp.layout.registry import FOLDERS
from lightning_bucketddp.trainer.wrapper import BucketDDPInLightning, leave_shared_memory
from tests.lightning_models import (
    Memory,
    PoolEnvironment,
    Regression,
    close_to,
    data,
    ddp,
    ours,
    start_fabric,
    trainer,
)
from tests.models import Mlp, batch
from tests.optim.common import assert_equal
from tests.pool import case, on_ranks

_EXPERIMENTAL = {"mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"}
_LIGHTNINGS_OWN = {"module", "device_ids", "output_device", "dim"}
"""What Lightning passes itself, or fixes by having one device per process."""


def names(function: Any) -> list[str]:
    every = ("kwargs", "options", "torch_options")
    return [name for name in inspect.signature(function).parameters if name not in every]


def test_everything_that_ddp_takes_is_an_argument() -> None:
    options = {each.name for each in fields(Options)}
    for strategy, theirs in ((BucketDDPStrategy, DDPStrategy), (BucketDDPFabricStrategy, FabricDDPStrategy)):
        assert names(strategy)[-len(names(theirs)) :] == names(theirs)
        by_position = [None, [torch.device("cpu")], environment := LightningEnvironment()]
        made = strategy(*by_position, start_method="spawn")
        assert (made.parallel_devices, made.cluster_environment) == (by_position[1], environment)
    for wrapper in (DistributedDataParallel, BucketDDP):
        assert set(names(wrapper)) - _LIGHTNINGS_OWN - _EXPERIMENTAL <= options


def test_arguments_of_torch_ddp_are_where_programs_look_for_those_of_ddp() -> None:
    given = {"broadcast_buffers": False, "bucket_cap_mb": 3}
    made = BucketDDPStrategy(**given, shard_optimizer=True)
    assert made._ddp_kwargs == DDPStrategy(**given)._ddp_kwargs


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_an_older_lightning_is_told(package: Any) -> None:
    public = importlib.import_module(f"{FOLDERS[package.__name__.split('.')[0]]}.public")
    said = f"{package.__name__} 2.6 or newer, found 2.5.6.post0"
    with patch.object(package, "__version__", "2.5.6.post0"), pytest.warns(match=said):
        importlib.reload(public)


class Hiding(Regression):
    """One of its optimizer's parameters is not registered."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        vars(self)["shift"] = nn.Parameter(torch.ones(2, 3))
        return torch.optim.SGD([*self.parameters(), vars(self)["shift"]], lr=0.1)


@on_ranks(2)
def test_parameters_that_the_module_does_not_have_are_told() -> None:
    with warnings.catch_warnings(record=True, action="always") as warned:
        trainer(ours()).fit(Hiding(), data())
    told = [
        str(warning.message) for warning in warned if "found 1 in SGD that it does not have" in str(warning.message)
    ]
    assert len(told) == (dist.get_rank() == 0)
    assert all("the first of shape (2, 3)" in text for text in told)


OPTIONS: dict[str, Any] = {
    "bucket_cap_mb": 3,
    "find_unused_parameters": True,
    "grad_dtype": {"0.*": torch.float32},
    "master_params": False,
    "gradient_divide_by": 3,
    "wire_dtype": torch.bfloat16,
    "shard_optimizer": True,
}


def wrapped(**options: Any) -> BucketDDP:
    strategy = BucketDDPStrategy(parallel_devices=[torch.device("cpu")], **options)
    return BucketDDPInLightning(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16(), strategy)


@on_ranks(1)
def test_options_arrive_in_the_wrapper() -> None:
    arrived = dict(wrapped(**OPTIONS)._options.described())
    assert {name: arrived[name] for name in OPTIONS} == {name: repr(value) for name, value in OPTIONS.items()}
    assert wrapped(comm_hook="bf16")._options.comm_hook == "bf16"
    hook = {"ddp_comm_hook": default_hooks.allreduce_hook, "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}
    assert "fp16_compress_wrapper" in wrapped(**hook)._options.comm_hook.__qualname__


class OneRankPerNode(PoolEnvironment):
    """Each rank of the pool on a node of its own."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return dist.get_rank()


class Wide(Regression):
    """Has three layers of 4 MiB, whose default buckets differ between one machine and several."""

    records = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1024), *(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
        self.bucket_mib: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.bucket_mib = bucket_mib(self.trainer.strategy.bucket_ddp)


def bucket_mib(wrapper: BucketDDP) -> list[int]:
    return [wrapper.layout.bucket_nbytes(bucket) // MIB for bucket in wrapper.layout.buckets]


def trainers_buckets(num_nodes: int, **options: Any) -> list[int]:
    """The sizes of default buckets after the first pass, one rank per node unless there is one node."""
    environment = OneRankPerNode() if num_nodes > 1 else PoolEnvironment()
    module, strategy = Wide(), BucketDDPStrategy(cluster_environment=environment, **options)
    devices = dist.get_world_size() // num_nodes
    trainer(strategy, num_nodes=num_nodes, devices=devices).fit(module, data(2))
    return module.bucket_mib


def fabrics_buckets(num_nodes: int, **options: Any) -> list[int]:
    environment = OneRankPerNode() if num_nodes > 1 else PoolEnvironment()
    strategy = BucketDDPFabricStrategy(cluster_environment=environment, **options)
    devices = dist.get_world_size() // num_nodes
    fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy)
    fabric.launch()
    model = fabric.setup(Wide().net)
    for _ in range(2):
        fabric.backward(model(torch.ones(1, 8)).sum())
    found = bucket_mib(strategy.wrapper_of(model))
    strategy.teardown()
    return found


SEVERAL, ONE = [4, 4, 4, 0], [12]


@pytest.mark.parametrize("buckets_of", [trainers_buckets, fabrics_buckets])
@on_ranks(2)
def test_num_nodes_decides_first_whether_ranks_share_one_machine(buckets_of: Any) -> None:
    """Hosts have one name here. Where ``num_nodes`` is 1, which nobody need set, the launcher or host names decide."""
    with patch.dict(os.environ), patch.object(socket, "gethostname", lambda: "cloned"):
        for num_nodes, started_here, expected in [(2, "", SEVERAL), (1, "", ONE), (2, "2", SEVERAL), (1, "1", SEVERAL)]:
            os.environ["LOCAL_WORLD_SIZE"] = started_here
            with case(num_nodes, started_here, found := buckets_of(num_nodes)):
                assert found == expected


AVERAGING = {"ddp_comm_hook": post_localSGD_hook, "ddp_comm_state": PostLocalSGDState(None, None, 2)}
PERIODIC = {**AVERAGING, "model_averaging_period": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"broadcast_buffers": True, "module_buffers": "off"}, "expected one choice for module buffers"),
        ({"comm_hook": "bf16", "ddp_comm_hook": post_localSGD_hook}, "comm_hook or ddp_comm_hook, found both"),
        ({"comm_hook_state": 3, "ddp_comm_state": 3}, "comm_hook_state or ddp_comm_state, found both"),
        ({"comm_hook": "bf16", "wire_dtype": "bfloat16"}, "expected either comm_hook or wire_dtype"),
        ({"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, "found None; to wrap a plain all-reduce"),
        ({"ddp_comm_state": 3}, "expected a communication hook for the given state"),
        ({"model_averaging_period": 4}, "together with a PostLocalSGDState"),
        (AVERAGING, "expected model_averaging_period together with"),
        ({**PERIODIC, "shard_optimizer": True}, "expected model averaging or shard_optimizer=True, found both"),
        ({**PERIODIC, "grad_dtype": "float32"}, "expected model averaging or master_params=True, found both"),
        (
            {**PERIODIC, "check_ranks_every": 5},
            "averaging or check_ranks_every=5, .*pass check_ranks_every=None",
        ),
        ({"check_ranks": "error"}, "check_ranks='error' needs comparisons .*give check_ranks_every"),
        ({"shard_optimizer": True, "use_contiguous_buffers": False}, "shard_optimizer=True divides contiguous buffers"),
        ({"uneven_inputs": "active_ranks", "gradient_divide_by": "tokens"}, "each says what gradients are divided by"),
        ({"mixed_precision": True}, "mixed_precision"),
        ({"bucket_cap": 4}, r"^BucketDDPStrategy\(\) got .* 'bucket_cap'; did you mean 'bucket_cap_mb'\?"),
        ({"process_group_backends": "gloo"}, r"'process_group_backends'; did you mean 'process_group_backend'\?"),
        ({"unheard_of": 4}, "unexpected keyword argument 'unheard_of'$"),
    ],
)
def test_a_choice_that_cannot_be_honoured_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        BucketDDPStrategy(**options)


CALLS: dict[str, tuple[Any, ...]] = {
    "count_tokens": (4,),
    "count_samples": (4,),
    "last_pass": (),
    "full_grad": (torch.zeros(1),),
}
CALLS |= {"clip_grad_norm_": (1.0,), "clip_grad_value_": (1.0,)}


class Clipped(Regression):
    """Sums its loss and counts tokens, and clips in two ways; with ``ddp`` it does so with torch's utilities."""

    records = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        if not isinstance(strategy, BucketDDPStrategy):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])
        strategy.count_tokens(batch[1].numel())
        return nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy, params = self.trainer.strategy, dict(self.named_parameters())
        if isinstance(strategy, BucketDDPStrategy):
            self.before_step.append({name: strategy.full_grad(param) for name, param in params.items()})
            norm = strategy.clip_grad_norm_(0.05)
            strategy.clip_grad_value_(0.01)
            assert strategy.last_pass().number + 1 == len(self.before_step)
        else:
            self.before_step.append({name: param.grad.clone() for name, param in params.items()})
            norm = nn.utils.clip_grad_norm_(params.values(), 0.05)
            nn.utils.clip_grad_value_(params.values(), 0.01)
        assert norm > 0.05


@on_ranks(2)
def test_a_trainer_counts_tokens_clips_and_shows_gradients() -> None:
    expected = Clipped()
    trainer(ddp()).fit(expected, data())
    for sharded in (False, True):
        with case(sharded):
            model, runs = Clipped(), trainer(ours(gradient_divide_by="tokens", shard_optimizer=sharded))
            runs.fit(model, data())
            assert len(model.before_step) == 6
            torch.testing.assert_close(model.before_step, expected.before_step)
            close_to(model, expected)
    assert_refused(runs.strategy, r"expected {}\(\) to be called during fit, found no wrapped module")


def assert_refused(strategy: Any, message: str) -> None:
    for name, arguments in CALLS.items():
        assert inspect.signature(getattr(type(strategy), name)) == inspect.signature(getattr(BucketDDP, name))
        with pytest.raises(RuntimeError, match=message.format(name)):
            getattr(strategy, name)(*arguments)


@on_ranks(2)
def test_fabric_counts_tokens_clips_and_shows_gradients() -> None:
    fabric = start_fabric(gradient_divide_by="tokens")
    strategy, plain, alone = fabric.strategy, Mlp(), Mlp()
    alone.load_state_dict(plain.state_dict())
    model = fabric.setup(plain)
    strategy.count_tokens(4)
    fabric.backward(model(batch(0, 0)[0]).sum())
    (alone(batch(0, 0)[0]).sum() / 4).backward()
    assert strategy.last_pass().number == 0
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.testing.assert_close((strategy.grad_norm(model), strategy.clip_grad_norm_(0.01)), (norm, norm))
    strategy.clip_grad_value_(0.001)
    nn.utils.clip_grad_value_(alone.parameters(), 0.001)
    for param, reference in zip(plain.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(strategy.full_grad(param), reference.grad)
    kept = [model, fabric.setup(Mlp())]  # the strategy forgets a module that nobody holds
    assert_refused(strategy, rf"where {{0}}\(\) is called, found {len(kept)}.*strategy.wrapper_of\(module\).{{0}}\(\)")


@pytest.mark.parametrize(("start_method", "shared"), [("forkserver", False), ("popen", True)])
def test_forkserver_does_not_let_ranks_share_weights(start_method: str, shared: bool) -> None:
    module = nn.BatchNorm1d(3).share_memory()
    before, params = copy.deepcopy(module.state_dict()), list(module.parameters())
    leave_shared_memory(module, start_method)
    assert {tensor.is_shared() for tensor in [*module.parameters(), *module.buffers()]} == {shared}
    assert all(mine is param for mine, param in zip(module.parameters(), params, strict=True))
    torch.testing.assert_close(module.state_dict(), before)


class Copies(pl.Callback):
    """Copies the strategy and the callbacks, as callbacks that keep others do; before training, the Trainer too."""

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        copy.deepcopy(trainer)
        self.on_train_batch_end(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy, _ = copy.deepcopy((trainer.strategy, trainer.callbacks))
        assert type(strategy) is type(trainer.strategy)
        if trainer.strategy.bucket_ddp is not None:
            assert_equal(strategy.model.state_dict(), trainer.strategy.model.state_dict())

    on_train_end = on_train_batch_end
    on_fit_end = on_fit_start


@on_ranks(1, 2, cases=[{}, {"shard_optimizer": True}, {"uneven_inputs": "active_ranks"}])
def test_a_strategy_may_be_copied_and_a_trainer_be_pickled(options: dict[str, Any]) -> None:
    models = Regression(), Regression()
    for model, more in zip(models, ([], [Copies()]), strict=True):
        model.records = False
        callbacks = [pl.callbacks.ModelCheckpoint("unused", save_top_k=0), CommunicationMonitor(1), *more]
        fit = trainer(ours(**options), logger=Memory(), callbacks=callbacks, enable_checkpointing=True)
        fit.fit(model, data())
    close_to(*models)
    again = pickle.loads(pickle.dumps(fit))
    assert_equal(again.lightning_module.state_dict(), models[1].state_dict())
