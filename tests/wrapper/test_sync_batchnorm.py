"""BatchNorm over all ranks' batches: one process with all of them gives the expected values."""

import copy
import pickle
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
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, RaiseInBackward, batch
from tests.pool import on_ranks
from tests.reference import assert_grads, everyones, grads, largest_difference_between_ranks, raises_soon

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
SIZES = (1, 0, 4)
"""Of batches by rank: too few for a BatchNorm alone, and none at all."""


@on_ranks(len(SIZES), cases=list(LAYERS))
def test_a_layer_equals_one_process_with_all_batches(kind: str) -> None:
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
    precise = torch.promote_types(dtype, FP32)
    plain.to(precise)  # torch's own rounds the mean itself to bf16
    tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2, "check_dtype": False} if dtype is BF16 else {}
    assert_close = partial(torch.testing.assert_close, **tolerance)
    rank = dist.get_rank()
    mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    for step in range(2):
        everything = torch.randn(sum(SIZES), plain.num_features, *size).mul(3).add(20 * step).to(dtype)
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
    assert largest_difference_between_ranks(layer) == 0
    with torch.no_grad():  # a training forward without gradients computes statistics too
        assert_close(layer(everything[mine]), plain(whole)[mine])
    if rank == 0:  # evaluation on one rank alone sends nothing
        assert_close(layer.eval()(everything), plain.eval()(whole))


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


@on_ranks(2)
def test_layers_stay_what_and_where_they_are() -> None:
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
    copied = copy.deepcopy(layer)
    loaded = pickle.loads(pickle.dumps(convert_sync_batchnorm(nn.BatchNorm1d(8))))
    inputs = torch.randn(4, 6, 2, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    layer(inputs)
    copied(inputs)  # works with the other ranks' copies
    assert len(seen) == 2  # the copy has a copy of the hook
    torch.testing.assert_close(dict(copied.named_buffers()), dict(layer.named_buffers()), rtol=0, atol=0)
    assert largest_difference_between_ranks(copied) == 0
    if dist.get_rank() == 0:  # a layer from a pickle is by itself
        torch.testing.assert_close(loaded(batch(0, 0)[0]), nn.BatchNorm1d(8)(batch(0, 0)[0]))
    mean = layer.running_mean.clone()
    assert revert_sync_batchnorm(module) is module
    assert type(layer) is nn.BatchNorm2d
    assert vars(layer).keys() == vars(nn.BatchNorm2d(6)).keys()
    assert torch.equal(layer.running_mean, mean)

    with pytest.raises(ValueError, match=r"found '0' of class OwnForward, whose own forward would be lost"):
        convert_sync_batchnorm(nn.Sequential(OwnForward(2)))
    with pytest.raises(ValueError, match=r"number of channels, found '0' of class LazyBatchNorm1d; run one batch"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ValueError, match="more than 1 value per channel in training, found 1 in"):
        convert_sync_batchnorm(nn.BatchNorm1d(2))(torch.ones(1 if dist.get_rank() == 0 else 0, 2))

    model = BucketDDP(convert_sync_batchnorm(ConvBatchNorm()))
    with pytest.raises(ValueError, match=r"'norm' would wait for ranks that have no data left"):
        with model.join():
            pass
    steps = iter(range(1 + dist.get_rank()))
    with pytest.raises(RuntimeError, match="exhausted"):
        with model.join(throw_on_early_termination=True):
            [model(torch.ones(2, 8)).sum().backward() for _ in steps]


class BranchesBehindNorm(Branches):
    """The parameters in use decide when buckets leave, before or after the layer's collective."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.early = nn.Linear(8, 8)

    def forward(self, x: Tensor, take: str = "both") -> Tensor:
        return super().forward(self.norm(self.early(x)), take)


@on_ranks(2)
def test_statistics_and_gradients_do_not_meet_on_the_wire() -> None:
    torch.manual_seed(0)
    plain = BranchesBehindNorm()
    model = BucketDDP(convert_sync_batchnorm(copy.deepcopy(plain)), bucket_cap_mb=0.0001)
    takes, rank, early = ["left", "right"], dist.get_rank(), 0
    for step in range(6):
        inputs = torch.stack([batch(step, r)[0] for r in range(2)])
        plain.zero_grad()
        model.zero_grad()
        hidden = plain.norm(plain.early(inputs.flatten(0, 1))).unflatten(0, (2, 4))
        losses = [Branches.forward(plain, hidden[r], takes[r]).square().mean() for r in range(2)]
        torch.stack(losses).mean().backward()
        model(inputs[rank], takes[rank]).square().mean().backward()
        early += model.last_pass().early_launches
        assert_grads(model.module, grads(plain))
    model.close()
    assert len(set(everyones(early))) == 2, "the ranks were to launch at different points of backward"


@on_ranks(2)
def test_a_loss_that_reaches_no_layer_counts_as_zero() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(ConvBatchNorm(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = BucketDDP(convert_sync_batchnorm(copy.deepcopy(plain)))
    for layer in (plain[0].norm, plain[2]):  # no gradient goes to rank 1's statistics
        layer.register_forward_pre_hook(lambda _, inputs: torch.cat((inputs[0][:4], inputs[0][4:].detach())))
    for step, local in enumerate([False, True, False, True]):
        inputs = [batch(step, r)[0] for r in range(2)]
        plain.zero_grad()
        model.zero_grad()
        (plain(torch.cat(inputs))[:4].pow(4).sum() / 2).backward()
        loss = model(inputs[dist.get_rank()]).pow(4).sum()
        constant = torch.zeros((), requires_grad=True)
        if dist.get_rank() == 1:
            loss = constant
        if local:
            with model.no_sync(), model.backward_pass(loss):
                loss.backward()
            loss = constant
        with model.backward_pass(loss):
            loss.backward()
        assert_grads(model.module, grads(plain), rtol=1e-4, atol=1e-5)


def fails_on_rank_1(where: str) -> None:
    net = nn.Sequential(ConvBatchNorm(), nn.Identity())
    model, rank = BucketDDP(convert_sync_batchnorm(net)), dist.get_rank()
    if rank == 1 and where == "forward":
        net[0].norm.register_forward_pre_hook(lambda *_: 1 / 0)
    if rank == 1 and where == "backward":
        net[1].register_forward_hook(lambda module, inputs, output: RaiseInBackward.apply(output))
    try:
        loss = model(torch.ones(4, 8)).sum()
        with model.backward_pass(loss):
            loss.backward()
    except ArithmeticError as error:
        model._publish_failure(error)  # as the strategy does
        raise
    finally:
        assert rank == 1 or reducer_of(model).state is PassState.FAILED


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


DO_NOT_MEET: dict[str, tuple[Callable[..., None], list[str], str, str]] = {  # job, arguments, errors by rank
    "forward raises": (fails_on_rank_1, ["forward"], "rank 1.*division by zero", "division by zero"),
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


@on_ranks(2, cases=DO_NOT_MEET, fresh=True)
def test_ranks_that_do_not_meet_in_a_layer_raise(job: Callable[..., None], args: list[str], *errors: str) -> None:
    torch.manual_seed(0)
    errors_of_all = (ArithmeticError, PeerFailureError, RankMismatchError)
    with raises_soon(*errors_of_all, match=errors[dist.get_rank()], within=20):
        job(*args)


class Look(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[bool, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.seen.append((isinstance(module.net.norm, SyncBatchNorm), module.net.norm.process_group))
        assert list(trainer.strategy.lightning_module_state_dict()) == list(module.state_dict())


@on_ranks(2, cases={"even": [(3, 3), {}], "uneven": [(1, 3), {"uneven_inputs": "active_ranks"}]})
def test_a_trainer_equals_one_process_on_the_full_batch(counts: tuple[int, int], options: dict[str, Any]) -> None:
    """A step is the mean over the ranks' batches together; a repeated batch is not in the statistics."""
    model, reference, look = Regression("conv"), Regression("conv"), Look()
    everyone = [[batch(step, rank) for step in range(count)] for rank, count in enumerate(counts)]
    loader: Any = DataLoader(everyone[dist.get_rank()], batch_size=None)
    for _ in range(2):
        runs = trainer(ours(module_buffers="off", **options), sync_batchnorm=True, callbacks=[look])
        runs.fit(model, loader)
        assert type(model.net.norm) is nn.BatchNorm2d
        optimizer = reference.configure_optimizers()
        for step in range(max(counts)):
            inputs, targets = zip(*(batches[step] for batches in everyone if step < len(batches)), strict=True)
            optimizer.zero_grad()
            nn.functional.mse_loss(reference.net(torch.cat(inputs)), torch.cat(targets)).backward()
            optimizer.step()
    assert look.seen[0] == (True, look.seen[0][1]) != (True, dist.group.WORLD)
    assert all(seen == look.seen[0] for seen in look.seen), "one group for all fits"
    close_to(model, reference)
    assert largest_difference_between_ranks(model) == 0


class FailsInForward(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise ArithmeticError("no step today")
        return super().training_step(batch, batch_idx)


@on_ranks(2, fresh=True)
def test_a_failed_fit_reverts_layers_and_the_next_is_refused() -> None:
    model = FailsInForward("conv")
    with pytest.raises((ArithmeticError, PeerFailureError), match="no step today"):
        trainer(ours(), sync_batchnorm=True).fit(model, data())
    assert type(model.net.norm) is nn.BatchNorm2d
    assert not links_of(model)
    # rank 0 left a collective under way that rank 1 never joined
    with pytest.raises(RuntimeError, match=["unfinished collectives", "rank 0 cannot go on"][dist.get_rank()]):
        trainer(ours(), sync_batchnorm=True).fit(Regression("conv"), data())
