"""``device_ids`` with several devices: gradients are those of the whole batch, and ranks average over processes.

The CPU stands for the devices, named twice. Its replicas share the module's parameters, unless a test has them copied,
as on another device.
"""

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.replicas.forward import ReplicatedForward
from lightning_bucketddp.replicas.replicas import data_parallel
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm
from tests.inside import views_of
from tests.models import ConvBatchNorm, Lookup, Mlp, batch, build, loss_of, tokens
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    WHERE,
    assert_grads,
    backward,
    both,
    copying,
    drift,
    everyones,
    grads,
    mean_grads,
    train,
)
from tests.replicas.test_replicas import Columns

CPU = torch.device("cpu")
SHARED, COPIED = True, False
BOTH = {"shared": [SHARED], "copied": [COPIED]}


def replicated(module: nn.Module, share: bool = SHARED, devices: int = 2, **options: Any) -> BucketDDP:
    with pytest.warns(UserWarning, match=f"device_ids has {devices} entries"):
        net = BucketDDP(module, device_ids=["cpu"] * devices, bucket_cap_mb=TINY, **options)
    if not share:
        net._replicated = copying(net._replicated)
    return net


def counting_forwards(module: nn.Module) -> list[int]:
    sizes: list[int] = []
    module.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    return sizes


MODELS = [("mlp", COPIED), ("nested_outputs", SHARED), ("mixed_dtypes", COPIED)]
CHECKPOINTED = [("checkpoint_reentrant", COPIED), ("checkpoint_non_reentrant", SHARED)]


@on_ranks(2, cases=[*MODELS, *CHECKPOINTED])
def test_two_processes_with_two_devices_train_as_one(name: str, share: bool) -> None:
    """Training on four samples per rank, two per device; one process has all eight."""
    module, alone = build(name), build(name)
    sizes, net = counting_forwards(module), replicated(module, share)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (module, alone)]
    # bf16 is added up in another order
    tolerance = {"rtol": 3e-2, "atol": 1e-3} if name == "mixed_dtypes" else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(4):
        net.zero_grad()
        alone.zero_grad()
        inputs, target = batch(step, dist.get_rank())
        loss_of(net(inputs), target).backward()
        inputs, target = (torch.cat(parts) for parts in zip(*everyones((inputs, target)), strict=True))
        loss_of(alone(inputs), target).backward()
        assert_grads(module, grads(alone), **tolerance)
        assert all(param.grad is views_of(net)[key] for key, param in module.named_parameters())
        for optimizer in optimizers:
            optimizer.step()
        assert drift(module) == 0
    assert sizes == [2] * 8, "replicas did not divide the batch"
    assert net.last_pass().early_launches > 0 or "reentrant" in name


@on_ranks(2, cases=BOTH)
def test_gradients_are_the_means_over_all_samples(share: bool) -> None:
    rank = dist.get_rank()
    for plain, batches in (
        (Mlp(), [(batch(0, rank, size + rank)[0],) for size in (4, 5, 1, 2, 7)]),
        (Lookup(), [tokens(step, rank) for step in range(2)]),
    ):
        net = replicated(copy.deepcopy(plain), share, devices=3)
        sizes = counting_forwards(net.module)
        for inputs in batches:
            both((net, plain), *inputs)
            assert_grads(net.module, mean_grads(plain))
        if rank == 0 and len(batches) == 5:
            assert [sorted(sizes[:2]), sorted(sizes[2:5]), sizes[5], sizes[6:8]] == [[2, 2], [1, 2, 2], 1, [1, 1]]


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(8), 0
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average = self.average * 0.5 + 1
        return self.norm(x)


@on_ranks(1, cases=BOTH)
def test_module_buffers_and_attributes_are_the_first_replicas(share: bool) -> None:
    module = Remembers()
    plain, net = copy.deepcopy(module), replicated(module, share)
    for step in range(3):
        inputs, _ = batch(step, 0, 8)
        net(inputs).sum().backward()
        plain(inputs[:4])
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
    assert (module.calls, float(module.average)) == (3, 2 - 0.5**2)


@on_ranks(2)
def test_copies_and_pickles_of_the_wrapper_make_replicas_anew() -> None:
    net = replicated(Mlp(), COPIED)
    backward(net)
    assert len(list(net.modules())) == 1 + len(list(net.module.modules()))
    pickled = pickle.dumps(net)
    assert len(pickled) < 40_000, "replicas were saved"
    with warnings.catch_warnings(action="error"):  # who copies has been told before
        for other in (pickle.loads(pickled), copy.deepcopy(net)):
            sizes, plain = counting_forwards(other.module), copy.deepcopy(net.module)
            both((plain, other), batch(0, dist.get_rank())[0])
            assert_grads(other.module, mean_grads(plain))
            assert sizes == [2, 2]


@on_ranks(2, cases=BOTH)
def test_replicas_train_as_one_device_with_other_options(share: bool) -> None:
    """Options that the fuzz test does not draw, and ranks that run out of data."""
    for options in ({"max_abs_grad": 1e3}, {"comm_hook": "powersgd"}, {"shard_optimizer": True}, {}):
        nets = [replicated(build("mlp"), share, **options), BucketDDP(build("mlp"), **options)]
        for net in nets:
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            with net.join(enable=not options):
                train(net, optimizer, range(3 if options else 2 + 2 * dist.get_rank()))
        torch.testing.assert_close(*(net.state_dict() for net in nets), rtol=1e-2, atol=1e-3)


@on_ranks(1, cases=BOTH)
def test_gradients_of_replicas_are_added_up_in_fp32(share: bool) -> None:
    module = build("mlp").to(torch.bfloat16)
    plain = copy.deepcopy(module)
    for param in plain.parameters():
        param.grad_dtype = torch.float32
    net = replicated(module, share, grad_dtype=torch.float32, master_params=False)
    inputs, target = (tensor.bfloat16() for tensor in batch(0, 0))
    loss_of(net(inputs), target).backward()
    for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
        (loss_of(plain(part), goal) / 2).backward()
    assert_grads(module, grads(plain), rtol=1e-6, atol=1e-7)
    assert any((param.grad - param.grad.bfloat16()).abs().max() > 1e-5 for param in plain.parameters()), "bf16 would do"


@on_ranks(1)
def test_keywords_another_dimension_and_nothing_to_split() -> None:
    module, calls = Columns(), []
    net = replicated(module, dim=1, output_device="cpu")
    module.register_forward_pre_hook(lambda *_: calls.append(True))
    columns = batch(0, 0)[0].T[:4]
    torch.testing.assert_close(net(x=columns), module.weight @ columns)
    torch.testing.assert_close(net(), torch.ones(2, 1))
    assert len(calls) == 3, "there is nothing to split the second time"


class RefusesSome(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 99).any()):
            raise ArithmeticError("a row that I do not like")
        return super().forward(x)


@on_ranks(2, fresh=True)
def test_an_error_in_one_replica_reaches_the_other_ranks() -> None:
    net, rank = replicated(RefusesSome()), dist.get_rank()
    backward(net)
    if rank == 0:
        with pytest.raises(PeerFailureError, match=f"rank 1{WHERE} raised ArithmeticError: a row that I do not like"):
            backward(net)
        return
    inputs = batch(0, rank)[0]
    inputs[-1, 0] = 100.0
    with pytest.raises(ArithmeticError) as error:
        net(inputs)
    net._publish_failure(error.value)  # as a Trainer does
    assert error.traceback[-1].name == "forward"
    assert any("replica 1" in note for note in error.value.__notes__)


@on_ranks(1)
def test_arguments_that_make_no_sense_are_refused() -> None:
    elsewhere, compiled, twice = Mlp(), Mlp(), {"device_ids": ["cpu"] * 2}
    elsewhere.register_buffer("elsewhere", torch.empty(2, device="meta"))
    compiled.compile()
    for module, arguments, kind, words in [
        (Mlp(), {"device_ids": ["cpu", "moon:1"]}, ValueError, "expected device_ids to name devices, found 'moon:1'"),
        (Mlp(), {"device_ids": ["cpu", 99]}, ValueError, "device_ids to name devices, found 99: "),
        (Mlp(), {"device_ids": ["cpu", True]}, TypeError, "device_ids to name devices, found True"),
        (Mlp(), {**twice, "output_device": 1.5}, TypeError, "output_device to name devices, found 1.5"),
        (Mlp(), {**twice, "dim": "0"}, TypeError, "dim to be the number of a dimension, found '0'"),
        (Mlp(), {"device_ids": ["cpu"]}, ValueError, "no device_ids and no output_device"),
        (compiled, twice, TypeError, "modules that are not compiled"),
        (elsewhere, {**twice, "init_sync": False}, ValueError, "found 'elsewhere' on meta"),
        (convert_sync_batchnorm(ConvBatchNorm()), twice, ValueError, "found SyncBatchNorm 'norm'"),
    ]:
        with pytest.raises(kind, match=words):
            BucketDDP(module, **arguments)
    with pytest.warns(UserWarning, match="one process per device is faster") as caught:
        BucketDDP(Mlp(), **twice)
    assert [warning.filename for warning in caught] == [__file__]


class Drops(nn.Module):
    """Dropout in layers that may be checkpointed; slow enough for threads to get in each other's way."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.how == "plain" else checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_replicas_drop_what_calls_one_after_the_other_drop(how: str) -> None:
    """Replicas of one device take turns: random numbers come in the same order each time."""
    torch.manual_seed(0)
    module, x = Drops(how).double(), torch.randn(48, 64, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(module)
    plain.how = "plain"

    def gradients(model: nn.Module, forward: Any) -> Any:
        torch.manual_seed(3)
        model.zero_grad()
        loss = forward(x).square().mean()
        model.eval()
        forward(x)  # must not change what runs again
        model.train()
        loss.backward()
        return grads(model)

    expected = gradients(plain, lambda x: torch.cat([plain(part) for part in x.chunk(3)]))
    wrapped = [ReplicatedForward(module, [CPU] * 3, CPU, 0, share) for share in (SHARED, COPIED)]
    for forward in (partial(data_parallel, module, devices=[CPU] * 3), *wrapped):
        for _ in range(3):
            torch.testing.assert_close(gradients(module, forward), expected)
