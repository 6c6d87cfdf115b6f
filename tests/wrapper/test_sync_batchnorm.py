"""BatchNorm over all ranks' batches: one process with all of them gives the expected values."""

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
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

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
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, RaiseInBackward
from tests.reference import assert_grads, grads, largest_difference_between_ranks
from tests.wrapper.cases import RunRanks, check_each

C = 3
FP32, BF16 = torch.float32, torch.bfloat16
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "1d": (lambda: nn.BatchNorm1d(C), (), FP32),
    "1d, momentum None": (lambda: nn.BatchNorm1d(C, momentum=None), (5,), torch.float64),
    "1d, in two messages": (lambda: nn.BatchNorm1d(300), (), FP32),
    "2d, channels_last": (lambda: nn.BatchNorm2d(C, eps=1e-3), (4, 5), FP32),
    "2d, no bias": (lambda: nn.BatchNorm2d(C, bias=False), (2, 2), FP32),
    "3d, not affine": (lambda: nn.BatchNorm3d(C, affine=False), (2, 3, 2), FP32),
    "2d, statistics not tracked": (lambda: nn.BatchNorm2d(C, track_running_stats=False), (3, 3), FP32),
    "2d, bf16 input": (lambda: nn.BatchNorm2d(C), (4, 4), BF16),
    "2d, all in bf16": (lambda: nn.BatchNorm2d(C).bfloat16(), (4, 4), BF16),
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
    precise = torch.promote_types(dtype, FP32)
    plain.to(precise)  # torch's own rounds the mean itself to bf16
    tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2, "check_dtype": False} if dtype is BF16 else {}
    assert_close = partial(torch.testing.assert_close, **tolerance)
    sizes, rank = BATCHES[dist.get_world_size()], dist.get_rank()
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for step in range(2):
        everything = torch.randn(sum(sizes), plain.num_features, *size).mul(3).add(20 * step).to(dtype)
        upstream = torch.randn_like(everything)
        if kind == "2d, channels_last":
            everything = everything.contiguous(memory_format=torch.channels_last)
        part, whole = everything[mine].clone().requires_grad_(), everything.clone().to(precise).requires_grad_()
        plain.zero_grad()
        layer.zero_grad()
        expected, found = plain(whole), layer(part)
        expected.backward(upstream.to(expected.dtype))
        found.backward(upstream[mine])
        assert (found.dtype, found.stride()) == (dtype, part.stride())
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
        assert_close(layer(everything[mine]), plain(whole)[mine])
    if rank == 0:  # evaluation on one rank alone sends nothing
        assert_close(layer.eval()(everything), plain.eval()(whole))


def all_layers() -> None:
    check_each({kind: [kind] for kind in LAYERS}, layer_against_one_process)


@pytest.mark.parametrize("world_size", BATCHES)
def test_a_layer_equals_one_process_with_all_batches(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, all_layers)


# -- what becomes of the layers ----------------------------------------------------------------------


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def conversion_keeps_the_layers() -> None:
    torch.manual_seed(0)
    module = ConvBatchNorm()
    layer, seen = module.norm, []
    layer.register_forward_hook(lambda *_: seen.append(True))
    assert convert_sync_batchnorm(module) is module
    assert module.norm is layer
    assert isinstance(layer, SyncBatchNorm)
    assert isinstance(layer, nn.BatchNorm2d)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.ones(2, 6, 3))
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        layer(torch.ones(2, 6, 2, 2, device="meta"))  # off the CPU torch's own forward decides
    layer.reset_running_stats()
    copied = copy.deepcopy(layer)
    loaded = pickle.loads(pickle.dumps(convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))))
    inputs = torch.randn(4, 6, 2, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    layer(inputs)
    copied(inputs)  # works with the other ranks' copies
    assert len(seen) == 2  # the copy has a copy of the hook
    for name, buffer in copied.named_buffers():
        assert torch.equal(buffer, layer.get_buffer(name))
        assert same_bits_on_all_ranks(buffer)
    if dist.get_rank() == 0:  # a layer from a pickle is by itself
        values = torch.randn(4, 2)
        torch.testing.assert_close(loaded(values), nn.BatchNorm1d(2)(values))
    mean = layer.running_mean.clone()
    assert revert_sync_batchnorm(module) is module
    assert type(layer) is nn.BatchNorm2d
    assert vars(layer).keys() == vars(nn.BatchNorm2d(6)).keys()
    assert torch.equal(layer.running_mean, mean)


def refused_layers() -> None:
    with pytest.raises(ValueError, match=r"found '0' of class OwnForward, whose own forward would be lost"):
        convert_sync_batchnorm(nn.Sequential(OwnForward(2)))
    with pytest.raises(ValueError, match=r"number of channels, found '0' of class LazyBatchNorm1d; run one batch"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ValueError, match="more than 1 value per channel in training, found 1 in"):
        convert_sync_batchnorm(nn.BatchNorm1d(2))(torch.ones(1 if dist.get_rank() == 0 else 0, 2))


def conversion() -> None:
    conversion_keeps_the_layers()
    refused_layers()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_layers_stay_what_and_where_they_are(run_ranks: RunRanks) -> None:
    run_ranks(2, conversion)


# -- in a wrapper ------------------------------------------------------------------------------------


class BranchesBehindNorm(Branches):
    """The parameters in use decide when buckets leave, before or after the layer's collective."""

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
    takes, rank, early = ["left", "right"], dist.get_rank(), 0
    for step in range(6):
        inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        model.zero_grad()
        hidden = plain.norm(plain.early(inputs.flatten(0, 1))).unflatten(0, (2, 4))
        losses = [Branches.forward(plain, hidden[r], takes[r]).square().mean() for r in range(2)]
        torch.stack(losses).mean().backward()
        model(inputs[rank], takes[rank]).square().mean().backward()
        early += model.early_launches
        assert_grads(model.module, grads(plain))
    model.close()
    return early


def test_statistics_and_gradients_do_not_meet_on_the_wire(run_ranks: RunRanks) -> None:
    early = run_ranks(2, branches_by_rank)
    assert early[0] != early[1], "the ranks were to launch at different points of backward"


def constant() -> Tensor:
    return torch.zeros((), requires_grad=True)


def a_loss_without_the_layers(local: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(ConvBatchNorm(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = BucketDDP(convert_sync_batchnorm(copy.deepcopy(plain)))
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):  # no gradient goes to rank 1's statistics
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
        assert_grads(model.module, grads(plain), rtol=1e-4, atol=1e-5)
    model.close()


def losses_without_the_layers() -> None:
    check_each({"synchronised": [False], "local": [True]}, a_loss_without_the_layers)


def test_a_loss_that_reaches_no_layer_counts_as_zero(run_ranks: RunRanks) -> None:
    run_ranks(2, losses_without_the_layers)


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


def test_join_goes_as_far_as_all_ranks_have_data(run_ranks: RunRanks) -> None:
    run_ranks(2, joined_ranks)


# -- ranks that are elsewhere ------------------------------------------------------------------------


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


def fails_on_rank_1(where: str) -> None:
    model = BucketDDP(convert_sync_batchnorm(FailsOnRank1(where)))
    try:
        loss = model(torch.ones(4, 8)).sum()
        with model.backward_pass(loss):
            loss.backward()
    except ArithmeticError as error:
        model.publish_failure(error)  # as the strategy does
        raise
    finally:
        assert dist.get_rank() == 1 or reducer_of(model).state is PassState.FAILED


def misses_a_layer_in_backward() -> None:
    layers = {"one": nn.BatchNorm1d(4), "two": nn.BatchNorm1d(4), "stem": nn.Linear(4, 4)}
    module = convert_sync_batchnorm(nn.ModuleDict(layers))
    model = BucketDDP(module)
    hidden = module["stem"](torch.randn(3, 4))
    outputs = [module["one"](hidden), module["two"](hidden)]
    loss = (outputs[1] if dist.get_rank() == 0 else outputs[1] + outputs[0]).square().sum()
    with model.backward_pass(loss):
        loss.backward()


def forward_on_rank_0_alone() -> None:
    model = BucketDDP(convert_sync_batchnorm(ConvBatchNorm()))
    model(torch.ones(4, 8)).sum().backward()
    (model.module if dist.get_rank() == 0 else model)(torch.ones(4, 8))


def layers_of_two_models() -> None:
    models = [BucketDDP(convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))) for _ in range(2)]
    models[dist.get_rank()](torch.randn(3, 4))


def in_different_layers(what: str) -> None:
    module = convert_sync_batchnorm(nn.ModuleDict({"left": nn.BatchNorm1d(4), "right": nn.BatchNorm1d(300)}))
    mine = "left" if dist.get_rank() == 0 else "right"
    inputs = {"left": torch.randn(3, 4, requires_grad=True), "right": torch.randn(3, 300, requires_grad=True)}
    if what == "forward":
        module[mine](inputs[mine])
    outputs = {name: module[name](inputs[name]) for name in ("left", "right")}
    outputs[mine].sum().backward()


def raised_by(job: Callable[..., None], *args: Any) -> str:
    """The error of this rank, which comes within seconds."""
    torch.manual_seed(0)
    begin = time.monotonic()
    with pytest.raises((ArithmeticError, PeerFailureError, RankMismatchError)) as error:
        job(*args)
    assert time.monotonic() - begin < 20
    return str(error.value)


DO_NOT_MEET: dict[str, tuple[Callable[..., None], list[str], str, str]] = {  # job, arguments, errors by rank
    "forward raises": (fails_on_rank_1, ["forward"], "rank 1.*no data today", "no data today"),
    "backward raises": (fails_on_rank_1, ["backward"], "rank 1.*no gradient today", "no gradient today"),
    "other layer": (in_different_layers, ["forward"], "is in forward of 'left'", "is in forward of 'right'"),
    "other layer in backward": (in_different_layers, ["backward"], "is in backward of 'left'", "backward of 'right'"),
    "other model": (layers_of_two_models, [], *["ranks met in different BatchNorm layers"] * 2),
    "backward ends": (
        misses_a_layer_in_backward,
        [],
        *["rank 0 is in pass 0 and has ended its backward, while rank 1 waits for the statistics of 'one'"] * 2,
    ),
    "alone in the module": (
        forward_on_rank_0_alone,
        [],
        *["rank 0 waits for the statistics of .* while rank 1 waits for the module buffers in pass 1"] * 2,
    ),
}


@pytest.mark.parametrize("case", DO_NOT_MEET)
def test_ranks_that_do_not_meet_in_a_layer_raise(run_ranks: RunRanks, case: str) -> None:
    job, args, on_0, on_1 = DO_NOT_MEET[case]
    for words, message in zip((on_0, on_1), run_ranks(2, raised_by, job, *args, fresh=True), strict=True):
        assert re.search(words, message)


# -- in a Trainer ------------------------------------------------------------------------------------


class Validated(Regression):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


class Look(pl.Callback):
    """Notes the layers' class and group in each batch of a fit."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.seen.append((isinstance(module.net.norm, SyncBatchNorm), module.net.norm.process_group))
        assert list(trainer.strategy.lightning_module_state_dict()) == list(module.state_dict())


def train_alone(model: Regression, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
    """One process: a step is the mean of the ranks' losses, over their batches together."""
    optimizer = model.configure_optimizers()
    for parts in batches:
        output = model.net(torch.cat([inputs for inputs, _ in parts])).split([len(inputs) for inputs, _ in parts])
        losses = [nn.functional.mse_loss(out, target) for out, (_, target) in zip(output, parts, strict=True)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()


def fit_with_sync_batchnorm(module_buffers: str) -> float:
    reference, loader, world = Regression("conv"), data(), dist.get_world_size()
    samplers = [DistributedSampler(loader.dataset, world, rank, shuffle=False) for rank in range(world)]
    loaders = [DataLoader(loader.dataset, 4, sampler=sampler) for sampler in samplers]
    model, look = Validated("conv"), Look()
    for _ in range(2):  # fit twice: layers are converted again
        train_alone(reference, list(zip(*loaders, strict=True)))
        runs = trainer(
            ours(module_buffers=module_buffers), sync_batchnorm=True, callbacks=[look], num_sanity_val_steps=0
        )
        runs.fit(model, data(), data(batches=2))
        assert type(model.net.norm) is nn.BatchNorm2d
    assert len(look.seen) == 12
    assert look.seen[0] == (True, look.seen[0][1]) != (True, dist.group.WORLD)
    assert all(seen == look.seen[0] for seen in look.seen), "one group for all fits"
    close_to(model, reference)
    (first,) = runs.validate(model, data(batches=2), verbose=False)
    assert first["loss"] == runs.callback_metrics["loss"]
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize(("world_size", "module_buffers"), [(2, "off"), (3, "broadcast")])
def test_a_trainer_equals_one_process_on_the_full_batch(
    run_ranks: RunRanks, world_size: int, module_buffers: str
) -> None:
    assert run_ranks(world_size, fit_with_sync_batchnorm, module_buffers) == [0.0] * world_size


class Batches(IterableDataset[Any]):
    """``count`` batches of 4."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.items = [
            (torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(count)
        ]

    def __iter__(self) -> Any:
        return iter(self.items)


def uneven_fit() -> float:
    """Rank 0 has one batch, rank 1 has three."""
    everyone = [Batches(1, seed=0), Batches(3, seed=1)]
    model, reference = Regression("conv"), Regression("conv")
    strategy = ours(uneven_inputs="active_ranks", module_buffers="off")
    trainer(strategy, sync_batchnorm=True).fit(model, DataLoader(everyone[dist.get_rank()], batch_size=None))
    train_alone(reference, [[it.items[step] for it in everyone if step < len(it.items)] for step in range(3)])
    close_to(model, reference)
    return largest_difference_between_ranks(model)


def test_a_repeated_batch_is_not_in_the_statistics(run_ranks: RunRanks) -> None:
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


def test_a_failed_fit_reverts_layers_and_the_next_is_refused(run_ranks: RunRanks) -> None:
    (first, again), (_, again_elsewhere) = run_ranks(2, a_failed_fit_and_another, fresh=True)
    assert "no step today" in first
    assert "unfinished collectives" in again
    assert "rank 0 cannot go on" in again_elsewhere
