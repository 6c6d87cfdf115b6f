"""BatchNorm over all ranks' batches: against one process with all of them, on the CPU, where torch's refuses."""

import copy
import pickle
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bucketddp import (
    BucketDDP,
    PeerFailureError,
    RankMismatchError,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from lightning_bucketddp.reducer.reducer import PassState
from lightning_bucketddp.wrapper.sync_batchnorm import SyncBatchNorm, links_of
from tests.inside import reducer_of
from tests.lightning_models import Regression, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, RaiseInBackward
from tests.reference import largest_difference_between_ranks
from tests.test_uneven_inputs import Batches

RunRanks = Callable[..., list[Any]]
CHANNELS = 3
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "1d": (lambda: nn.BatchNorm1d(CHANNELS), (), torch.float32),
    "1d, momentum None": (lambda: nn.BatchNorm1d(CHANNELS, momentum=None), (5,), torch.float64),
    "1d, in two messages": (lambda: nn.BatchNorm1d(300), (), torch.float32),
    "2d, channels_last": (lambda: nn.BatchNorm2d(CHANNELS, eps=1e-3), (4, 5), torch.float32),
    "2d, no bias": (lambda: nn.BatchNorm2d(CHANNELS, bias=False), (2, 2), torch.float32),
    "3d, not affine": (lambda: nn.BatchNorm3d(CHANNELS, affine=False), (2, 3, 2), torch.float32),
    "2d, statistics not tracked": (lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False), (3, 3), torch.float32),
    "2d, bf16 input": (lambda: nn.BatchNorm2d(CHANNELS), (4, 4), torch.bfloat16),
    "2d, all in bf16": (lambda: nn.BatchNorm2d(CHANNELS).bfloat16(), (4, 4), torch.bfloat16),
}
BATCHES = {2: (1, 4), 3: (2, 0, 3)}
"""Batch sizes by rank: too few for a BatchNorm alone, and none at all."""


def same_bits_on_all_ranks(tensor: Tensor) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensor)
    return all(torch.equal(other, everyone[0]) for other in everyone)


def layer_against_one_process(kind: str) -> None:
    make, size, dtype = LAYERS[kind]
    torch.manual_seed(3)
    plain = make()
    if plain.weight is not None:
        nn.init.uniform_(plain.weight, 0.5, 2)
        nn.init.normal_(plain.weight if plain.bias is None else plain.bias)
    if dtype is torch.float64:
        plain.double()
    layer = convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(layer, SyncBatchNorm)
    assert layer.process_group is not dist.group.WORLD
    low = dtype is torch.bfloat16
    sizes = BATCHES[dist.get_world_size()]
    plain.to(torch.promote_types(dtype, torch.float32))  # torch's own rounds the mean itself to bf16
    tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2, "check_dtype": False} if low else {}
    assert_close = partial(torch.testing.assert_close, **tolerance)
    begin = sum(sizes[: dist.get_rank()])
    mine = slice(begin, begin + sizes[dist.get_rank()])
    for step in range(2):
        everything = torch.randn(sum(sizes), plain.num_features, *size).mul(3).add(20 * step).to(dtype)
        upstream = torch.randn_like(everything)
        if kind == "2d, channels_last":
            everything = everything.contiguous(memory_format=torch.channels_last)
        part = everything[mine].clone().requires_grad_()
        whole = everything.clone().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        plain.zero_grad()
        layer.zero_grad()
        expected, found = plain(whole), layer(part)
        expected.backward(upstream.to(expected.dtype))
        found.backward(upstream[mine])
        assert found.dtype is dtype
        assert found.stride() == part.stride()
        assert_close(found, expected[mine])
        assert_close(part.grad, whole.grad[mine])
        for param, reference in zip(layer.parameters(), plain.parameters(), strict=True):
            total = param.grad.clone()
            dist.all_reduce(total)  # each rank has its share
            assert_close(total, reference.grad)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for name, buffer in layer.named_buffers():
        assert_close(buffer, plain.get_buffer(name))
        assert same_bits_on_all_ranks(buffer), name
    with torch.no_grad():  # a training forward without gradients computes statistics too
        expected, found = plain(whole), layer(everything[mine])
    assert_close(found, expected[mine])
    plain.eval()
    layer.eval()
    if dist.get_rank() == 0:  # on one rank alone: nothing is sent
        assert_close(layer(everything), plain(whole))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_as_one_process_with_all_batches(run_ranks: RunRanks, world_size: int, kind: str) -> None:
    run_ranks(world_size, layer_against_one_process, kind)


def one_value_in_all() -> str:
    layer = convert_sync_batchnorm(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="more than 1 value per channel in training, found 1 in") as error:
        layer(torch.ones(1 if dist.get_rank() == 0 else 0, 2))
    return str(error.value)


def test_too_few_values_are_an_error_on_every_rank(run_ranks: RunRanks) -> None:
    run_ranks(2, one_value_in_all)


# -- what becomes of the layers ----------------------------------------------------------------------


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def conversion_keeps_the_layers() -> None:
    torch.manual_seed(0)
    module = ConvBatchNorm()
    layer, seen = module.norm, []
    layer.register_forward_hook(lambda *_: seen.append(True))
    converted = convert_sync_batchnorm(module)
    assert converted is module
    assert module.norm is layer
    assert isinstance(layer, SyncBatchNorm)
    assert isinstance(layer, nn.BatchNorm2d)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.ones(2, 6, 3))
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        layer(torch.ones(2, 6, 2, 2, device="meta"))  # off the CPU torch's own forward decides
    layer.reset_running_stats()
    copied = copy.deepcopy(layer)
    loaded = pickle.loads(pickle.dumps(nn.Sequential(nn.BatchNorm1d(2))))
    loaded = pickle.loads(pickle.dumps(convert_sync_batchnorm(loaded)))
    inputs = torch.randn(4, 6, 2, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    layer(inputs)
    copied(inputs)  # a copy works with the other ranks' copies
    assert len(seen) == 2  # the copy has a copy of the hook
    for name, buffer in copied.named_buffers():
        assert torch.equal(buffer, layer.get_buffer(name))
        assert same_bits_on_all_ranks(buffer)
    if dist.get_rank() == 0:  # what was loaded from a pickle may be anywhere: it is by itself
        values = torch.randn(4, 2)
        torch.testing.assert_close(loaded(values), nn.BatchNorm1d(2)(values))
    mean = layer.running_mean.clone()
    assert revert_sync_batchnorm(module) is module
    assert type(layer) is nn.BatchNorm2d
    assert vars(layer).keys() == vars(nn.BatchNorm2d(6)).keys()
    assert torch.equal(layer.running_mean, mean)
    with pytest.raises(ValueError, match=r"found '0' of class OwnForward, whose own forward would be lost"):
        convert_sync_batchnorm(nn.Sequential(OwnForward(2)))
    with pytest.raises(ValueError, match=r"number of channels, found '0' of class LazyBatchNorm1d; run one batch"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_layers_stay_what_and_where_they_are(run_ranks: RunRanks) -> None:
    run_ranks(2, conversion_keeps_the_layers)


# -- in a wrapper ------------------------------------------------------------------------------------


class BranchesBehindNorm(Branches):
    """Which parameters a rank uses decides when its buckets can leave, before or after the layer's collective."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.early = nn.Linear(8, 8)

    def forward(self, x: Tensor, take: str = "both") -> Tensor:
        return super().forward(self.norm(self.early(x)), take)


def branches_by_rank() -> int:
    torch.manual_seed(0)
    plain = BranchesBehindNorm()
    model = BucketDDP(convert_sync_batchnorm(copy.deepcopy(plain)), bucket_cap_mb=0.0001)
    generator = torch.Generator().manual_seed(1)
    takes = ["left", "right"]
    early = 0
    for _ in range(6):
        inputs = torch.randn(2, 4, 8, generator=generator)
        plain.zero_grad()
        model.zero_grad()
        hidden = plain.norm(plain.early(inputs.flatten(0, 1))).unflatten(0, (2, 4))
        losses = [Branches.forward(plain, hidden[rank], takes[rank]).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        model(inputs[dist.get_rank()], takes[dist.get_rank()]).square().mean().backward()
        early += model.early_launches
        for name, param in plain.named_parameters():
            found = model.module.get_parameter(name).grad
            if param.grad is None:
                assert found is None
            else:
                torch.testing.assert_close(found, param.grad, msg=lambda m, n=name: f"{n}: {m}")
    model.close()
    return early


def test_statistics_and_gradients_do_not_meet_where_ranks_use_different_parameters(run_ranks: RunRanks) -> None:
    early = run_ranks(2, branches_by_rank)
    assert early[0] != early[1], "the ranks were to launch at different points of backward"


class FailsOnRank1(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.net, self.where = ConvBatchNorm(), where

    def forward(self, x: Tensor) -> Tensor:
        fails = dist.get_rank() == 1
        if fails and self.where == "forward":
            raise ArithmeticError("no data today")
        output = self.net(x)
        return RaiseInBackward.apply(output) if fails else output


def a_rank_that_does_not_come(where: str) -> tuple[str, float, bool]:
    torch.manual_seed(0)
    model = BucketDDP(convert_sync_batchnorm(FailsOnRank1(where)))

    def step() -> None:
        try:
            loss = model(torch.ones(4, 8)).sum()
            with model.backward_pass(loss):
                loss.backward()
        except ArithmeticError as error:
            model.publish_failure(error)  # as the strategy does
            raise

    begin = time.monotonic()
    with pytest.raises((ArithmeticError, PeerFailureError)) as error:
        step()
    return str(error.value), time.monotonic() - begin, reducer_of(model).state is PassState.FAILED


@pytest.mark.parametrize(("where", "cause"), [("forward", "no data today"), ("backward", "no gradient today")])
def test_a_rank_that_fails_is_an_error_where_others_wait_for_its_statistics(
    run_ranks: RunRanks, where: str, cause: str
) -> None:
    (message, seconds, given_up), _ = run_ranks(2, a_rank_that_does_not_come, where, fresh=True)
    assert "rank 1" in message
    assert cause in message
    assert seconds < 20
    assert given_up


def joined_ranks() -> None:
    model = BucketDDP(convert_sync_batchnorm(ConvBatchNorm()))
    with pytest.raises(ValueError, match=r"'norm' would wait for ranks that have no data left"):
        with model.join():
            pass

    def train() -> None:
        with model.join(throw_on_early_termination=True):
            for _ in range(1 + dist.get_rank()):
                model(torch.ones(2, 8)).sum().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()


def test_join_with_synchronised_statistics_goes_as_far_as_all_ranks_have_data(run_ranks: RunRanks) -> None:
    run_ranks(2, joined_ranks)


def a_loss_without_the_layers(local: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(ConvBatchNorm(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = BucketDDP(convert_sync_batchnorm(copy.deepcopy(plain)))
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):  # to rank 1's statistics no gradient goes
            layer.register_forward_pre_hook(lambda _, inputs: torch.cat((inputs[0][:3], inputs[0][3:].detach())))
    for step in range(3):
        inputs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        model.zero_grad()
        (plain(inputs.flatten(0, 1))[:3].pow(4).sum() / 2).backward()
        loss = model(inputs[dist.get_rank()]).pow(4).sum()
        if dist.get_rank() == 1:
            loss = constant()
        if local:
            with model.no_sync(), model.backward_pass(loss):
                loss.backward()
            loss = constant()
        with model.backward_pass(loss):
            loss.backward()
        for name, param in plain.named_parameters():
            found = model.module.get_parameter(name).grad
            torch.testing.assert_close(found, param.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    model.close()


def constant() -> Tensor:
    return torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("local", [False, True], ids=["synchronised", "local"])
def test_a_loss_that_reaches_no_layer_on_one_rank_counts_as_zero(run_ranks: RunRanks, local: bool) -> None:
    run_ranks(2, a_loss_without_the_layers, local)


def misses_a_layer_in_backward() -> str:
    torch.manual_seed(0)
    module = nn.ModuleDict({"one": nn.BatchNorm1d(4), "two": nn.BatchNorm1d(4), "stem": nn.Linear(4, 4)})
    convert_sync_batchnorm(module)
    model = BucketDDP(module)
    hidden = module["stem"](torch.randn(3, 4))
    outputs = [module["one"](hidden), module["two"](hidden)]
    loss = (outputs[1] if dist.get_rank() == 0 else outputs[1] + outputs[0]).square().sum()
    begin = time.monotonic()
    with pytest.raises((PeerFailureError, RankMismatchError)) as error:
        with model.backward_pass(loss):
            loss.backward()
    assert time.monotonic() - begin < 20
    return str(error.value)


def test_a_rank_that_misses_a_layer_in_backward_is_an_error_on_every_rank(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, misses_a_layer_in_backward, fresh=True):
        assert (
            "rank 0 is in pass 0 and has ended its backward, while rank 1 waits for the statistics of 'one'" in message
        )


def ranks_in_different_layers(what: str) -> str:
    torch.manual_seed(0)
    module = convert_sync_batchnorm(nn.ModuleDict({"left": nn.BatchNorm1d(4), "right": nn.BatchNorm1d(300)}))
    mine = "left" if dist.get_rank() == 0 else "right"
    inputs = {"left": torch.randn(3, 4, requires_grad=True), "right": torch.randn(3, 300, requires_grad=True)}
    outputs = {name: module[name](inputs[name]) for name in ("left", "right")}
    with pytest.raises(RankMismatchError) as error:
        module[mine](inputs[mine]) if what == "forward" else outputs[mine].sum().backward()
    return str(error.value)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_ranks_in_different_layers_are_an_error(run_ranks: RunRanks, what: str) -> None:
    messages = run_ranks(2, ranks_in_different_layers, what)
    assert f"this rank is in {what} of 'left'" in messages[0]
    assert f"this rank is in {what} of 'right'" in messages[1]


def forward_on_rank_0_alone() -> tuple[str, float]:
    model = BucketDDP(convert_sync_batchnorm(ConvBatchNorm()))
    model(torch.ones(4, 8)).sum().backward()
    begin = time.monotonic()
    with pytest.raises((PeerFailureError, RankMismatchError)) as error:
        (model.module if dist.get_rank() == 0 else model)(torch.ones(4, 8))
    return str(error.value), time.monotonic() - begin


def test_a_training_forward_on_one_rank_alone_is_an_error_on_every_rank(run_ranks: RunRanks) -> None:
    for message, seconds in run_ranks(2, forward_on_rank_0_alone, fresh=True):
        assert re.search(
            "rank 0 waits for the statistics of .* while rank 1 waits for the module buffers in pass 1", message
        )
        assert seconds < 20


def layers_of_two_models() -> str:
    torch.manual_seed(0)
    models = [BucketDDP(convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))) for _ in range(2)]
    with pytest.raises(RankMismatchError) as error:
        models[dist.get_rank()](torch.randn(3, 4))
    return str(error.value)


def test_layers_of_two_models_are_not_taken_for_each_other(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, layers_of_two_models, fresh=True):
        assert "ranks met in different BatchNorm layers" in message


# -- in a Trainer ------------------------------------------------------------------------------------


class Validated(Regression):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


class Look(pl.Callback):
    """What the layers are during fit."""

    def __init__(self) -> None:
        self.kinds: list[bool] = []
        self.groups: list[Any] = []
        self.keys: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.kinds.append(isinstance(module.net.norm, SyncBatchNorm))
        self.groups.append(module.net.norm.process_group)
        self.keys = list(trainer.strategy.lightning_module_state_dict())


def one_process_on_the_full_batch(model: pl.LightningModule, fits: int) -> None:
    loader = data()
    for _ in range(fits):
        optimizer = model.configure_optimizers()
        samplers = [
            torch.utils.data.DistributedSampler(loader.dataset, dist.get_world_size(), rank, shuffle=False)
            for rank in range(dist.get_world_size())
        ]
        loaders = [DataLoader(loader.dataset, 4, sampler=sampler) for sampler in samplers]
        for parts in zip(*loaders, strict=True):
            optimizer.zero_grad()
            batch = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
            nn.functional.mse_loss(model.net(batch[0]), batch[1]).backward()
            optimizer.step()


def fit_with_sync_batchnorm(module_buffers: str) -> float:
    reference = Regression("conv")
    one_process_on_the_full_batch(reference, 2)
    model, look = Validated("conv"), Look()
    for _ in range(2):  # fit twice: layers are converted again
        runs = trainer(
            ours(module_buffers=module_buffers), sync_batchnorm=True, callbacks=[look], num_sanity_val_steps=0
        )
        runs.fit(model, data(), data(batches=2))
        assert type(model.net.norm) is nn.BatchNorm2d
    assert len(look.kinds) == 12
    assert all(look.kinds)
    assert look.groups[0] is not dist.group.WORLD
    assert all(group is look.groups[0] for group in look.groups), "one group for all fits"
    assert look.keys == list(model.state_dict())
    expected = reference.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")
    (first,) = runs.validate(model, data(batches=2), verbose=False)
    assert first["loss"] == runs.callback_metrics["loss"]
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize(("world_size", "module_buffers"), [(2, "off"), (3, "broadcast")])
def test_a_trainer_gets_what_one_process_gets_on_the_full_batch(
    run_ranks: RunRanks, world_size: int, module_buffers: str
) -> None:
    assert run_ranks(world_size, fit_with_sync_batchnorm, module_buffers) == [0.0] * world_size


def uneven_fit() -> float:
    """Rank 0 has one batch, rank 1 has three."""
    everyone = [Batches(1, seed=0), Batches(3, seed=1)]
    model, reference = Regression("conv"), Regression("conv")
    strategy = ours(uneven_inputs="active_ranks", module_buffers="off")
    batches = DataLoader(everyone[dist.get_rank()], batch_size=None)
    trainer(strategy, sync_batchnorm=True).fit(model, batches)
    optimizer = reference.configure_optimizers()
    for step in range(3):
        parts = [batches.items[step] for batches in everyone if step < len(batches)]
        output = reference.net(torch.cat([inputs for inputs, _ in parts])).split([len(inputs) for inputs, _ in parts])
        losses = [nn.functional.mse_loss(out, target) for out, (_, target) in zip(output, parts, strict=True)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")
    return largest_difference_between_ranks(model)


def test_the_repeated_batch_of_a_rank_that_has_run_out_is_not_in_the_statistics(run_ranks: RunRanks) -> None:
    assert run_ranks(2, uneven_fit) == [0.0, 0.0]


class FailsInForward(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise ArithmeticError("no step today")
        return super().training_step(batch, batch_idx)


def a_failed_fit_and_another() -> tuple[str, str]:
    model = FailsInForward("conv")
    with pytest.raises((ArithmeticError, PeerFailureError)) as error:
        trainer(ours(), sync_batchnorm=True).fit(model, data())
    assert type(model.net.norm) is nn.BatchNorm2d
    assert not links_of(model)
    with pytest.raises(RuntimeError) as again:  # rank 0 left a collective under way that rank 1 never joined
        trainer(ours(), sync_batchnorm=True).fit(Regression("conv"), data())
    return str(error.value), str(again.value)


def test_a_failed_fit_reverts_the_layers_and_the_next_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    (first, again), (_, again_elsewhere) = run_ranks(2, a_failed_fit_and_another, fresh=True)
    assert "no step today" in first
    assert "unfinished collectives" in again
    assert "rank 0 cannot go on" in again_elsewhere
