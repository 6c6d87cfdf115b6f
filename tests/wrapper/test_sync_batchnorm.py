"""BatchNorm over all ranks' batches: one process with all of them gives the expected values."""

import copy
import pickle
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp import convert_sync_batchnorm as convert
from lightning_bucketddp import revert_sync_batchnorm as revert
from lightning_bucketddp.wrapper.sync_batchnorm import SyncBatchNorm, links_of
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, RaiseInBackward, batch
from tests.pool import on_ranks
from tests.reference import (
    WHERE,
    assert_grads,
    drift,
    everyones,
    grads,
    raises_soon,
    run_backward,
)

FP32, BF16 = torch.float32, torch.bfloat16
LAYERS: dict[str, list[Any]] = {
    "1d": [nn.BatchNorm1d(3), (), FP32],
    "1d, momentum None": [nn.BatchNorm1d(3, momentum=None).double(), (5,), torch.float64],
    "1d, in two messages": [nn.BatchNorm1d(300), (), FP32],
    "2d, channels_last": [nn.BatchNorm2d(3, eps=1e-3), (4, 5), FP32],
    "2d, no bias": [nn.BatchNorm2d(3, bias=False), (2, 2), FP32],
    "3d, not affine": [nn.BatchNorm3d(3, affine=False), (2, 3, 2), FP32],
    "2d, statistics not tracked": [nn.BatchNorm2d(3, track_running_stats=False), (3, 3), FP32],
    "2d, bf16 input": [nn.BatchNorm2d(3), (4, 4), BF16],
    "2d, all in bf16": [nn.BatchNorm2d(3).bfloat16(), (4, 4), BF16],
}
SIZES = (1, 0, 4)
"""Of batches by rank: too few for a BatchNorm alone, and none at all."""


@on_ranks(len(SIZES), cases=LAYERS)
def test_a_layer_equals_one_process_with_all_batches(plain: Any, size: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for param in plain.parameters():
        nn.init.uniform_(param, 0.5, 2)
    layer = convert(copy.deepcopy(plain))
    assert isinstance(layer, SyncBatchNorm)
    precise = torch.promote_types(dtype, FP32)
    plain.to(precise)  # torch's own rounds the mean itself to bf16
    tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2, "check_dtype": False} if dtype is BF16 else {}
    assert_close, rank = partial(torch.testing.assert_close, **tolerance), dist.get_rank()
    mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    for step in range(2):
        everything = torch.randn(sum(SIZES), plain.num_features, *size).mul(3).add(20 * step).to(dtype)
        upstream = torch.randn_like(everything)
        if size == (4, 5):
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
    assert_close(layer.state_dict(), plain.state_dict())
    assert drift(layer) == 0
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
    assert convert(module).norm is layer
    assert isinstance(layer, SyncBatchNorm)
    assert isinstance(layer, nn.BatchNorm2d)
    copied = copy.deepcopy(layer)
    loaded = pickle.loads(pickle.dumps(convert(nn.BatchNorm1d(8))))
    inputs = torch.randn(4, 6, 2, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    layer(inputs)
    copied(inputs)  # works with the other ranks' copies
    assert len(seen) == 2  # the copy has a copy of the hook
    torch.testing.assert_close(copied.state_dict(), layer.state_dict(), rtol=0, atol=0)
    assert drift(copied) == 0
    if dist.get_rank() == 0:  # a layer from a pickle is by itself
        torch.testing.assert_close(loaded(batch(0, 0)[0]), nn.BatchNorm1d(8)(batch(0, 0)[0]))
    assert revert(module).norm is layer
    assert type(layer) is nn.BatchNorm2d
    assert vars(layer).keys() == vars(nn.BatchNorm2d(6)).keys()
    torch.testing.assert_close(layer.state_dict(), copied.state_dict(), rtol=0, atol=0)


@on_ranks(2)
def test_layers_that_cannot_work_raise() -> None:
    layer, rank = convert(nn.BatchNorm2d(6)), dist.get_rank()
    for call, words in [
        (lambda: layer(torch.ones(2, 6, 3)), "expected 4D input"),
        # Off the CPU torch's own forward decides.
        (lambda: layer(torch.ones(2, 6, 2, 2, device="meta")), "SyncBatchNorm expected input tensor to be on GPU"),
        (lambda: convert(nn.Sequential(OwnForward(2))), "'0' of class OwnForward, whose own forward would be lost"),
        (lambda: convert(nn.Sequential(nn.LazyBatchNorm1d())), "found '0' of class LazyBatchNorm1d; run one batch"),
        (lambda: convert(nn.BatchNorm1d(2))(torch.ones(1 - rank, 2)), "1 value per channel in training, found 1 in"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    model = BucketDDP(convert(ConvBatchNorm()))
    with pytest.raises(ValueError, match=r"'norm' would wait for ranks that have no data left"), model.join():
        pass


class BranchesBehindNorm(Branches):
    """The parameters in use decide when buckets leave, before or after the layer's collective."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.early = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, take: str = "both") -> Tensor:
        return super().forward(self.norm(self.early(x)), take)


@on_ranks(2)
def test_statistics_and_gradients_do_not_meet_on_the_wire() -> None:
    plain = BranchesBehindNorm()
    model = BucketDDP(convert(copy.deepcopy(plain)), bucket_cap_mb=0.0001)
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
    plain = nn.Sequential(ConvBatchNorm(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = BucketDDP(convert(copy.deepcopy(plain)))
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
            with model.no_sync():
                run_backward(model, loss, guarded=True)
            loss = constant
        run_backward(model, loss, guarded=True)
        assert_grads(model.module, grads(plain), rtol=1e-4, atol=5e-5)


def fails_on_rank_1(where: str) -> None:
    net = nn.Sequential(ConvBatchNorm(), nn.Identity())
    model, rank = BucketDDP(convert(net)), dist.get_rank()
    if rank == 1 and where == "forward":
        net[0].norm.register_forward_pre_hook(lambda *_: 1 / 0)
    if rank == 1 and where == "backward":
        net[1].register_forward_hook(lambda module, inputs, output: RaiseInBackward.apply(output))
    try:
        run_backward(model, model(torch.ones(4, 8)).sum(), guarded=True)
    except ArithmeticError as error:
        model._publish_failure(error)  # as the strategy does
        raise
    finally:
        assert model._passes.peers.failure is not None


def misses(what: str) -> None:
    """Rank 0 leaves a layer out in backward, or is alone in the module, or in another model."""
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    stem, one, two = module = convert(nn.Sequential(*copy.deepcopy(layers)))
    models = BucketDDP(module), BucketDDP(convert(nn.Sequential(*layers)))
    inputs, rank = torch.randn(3, 4), dist.get_rank()
    if what == "model":
        models[rank](inputs)
    elif what == "backward":
        hidden = stem(inputs)
        outputs = [one(hidden), two(hidden)]
        run_backward(models[0], sum(outputs[1 - rank :]).square().sum(), guarded=True)
    else:
        models[0](inputs).sum().backward()
        [module, models[0]][rank](inputs)


def in_different_layers(what: str) -> None:
    module = convert(nn.ModuleDict({"left": nn.BatchNorm1d(4), "right": nn.BatchNorm1d(300)}))
    mine = "left" if dist.get_rank() == 0 else "right"
    inputs = {"left": torch.randn(3, 4, requires_grad=True), "right": torch.randn(3, 300, requires_grad=True)}
    if what == "forward":
        module[mine](inputs[mine])
    outputs = {name: module[name](inputs[name]) for name in ("left", "right")}
    outputs[mine].sum().backward()


ENDED = "rank 0 is in pass 0 and has ended its backward, while rank 1 waits for the statistics of '1'"
WAIT = "rank 0 waits for the statistics of .* while rank 1 waits for the module buffers in pass 1"
DO_NOT_MEET: dict[str, list[Any]] = {  # job, argument, errors by rank
    "forward raises": [fails_on_rank_1, "forward", "rank 1.*division by zero", "division by zero"],
    "backward raises": [fails_on_rank_1, "backward", "rank 1.*no gradient today", "no gradient today"],
    "other layer": [in_different_layers, "forward", "is in forward of 'left'", "is in forward of 'right'"],
    "other layer in backward": [in_different_layers, "backward", "is in backward of 'left'", "backward of 'right'"],
    "other model": [misses, "model", *["ranks met in different BatchNorm layers"] * 2],
    "backward ends": [misses, "backward", ENDED, ENDED],
    "alone in the module": [misses, "buffers", WAIT, WAIT],
}


SOME = ["backward raises", "other layer in backward", "alone in the module"]


@on_ranks(2, cases=DO_NOT_MEET, quick=SOME, fresh=True)
def test_ranks_that_do_not_meet_in_a_layer_raise(job: Any, argument: str, *errors: str) -> None:
    errors_of_all = (ArithmeticError, PeerFailureError, RankMismatchError)
    with raises_soon(*errors_of_all, match=errors[dist.get_rank()]):
        job(argument)


@on_ranks(2, cases={"even": [(3, 3), {}], "uneven": [(1, 3), {"uneven_inputs": "active_ranks"}]})
def test_a_trainer_equals_one_process_on_the_full_batch(counts: tuple[int, int], options: dict[str, Any]) -> None:
    """A step is the mean over the ranks' batches together; a repeated batch is not in the statistics."""
    model, reference, seen = Regression("conv"), Regression("conv"), []
    names, norm = list(model.state_dict()), model.net.norm

    def look(runs: pl.Trainer, *_: Any) -> None:
        seen.append((isinstance(norm, SyncBatchNorm), norm.process_group))
        assert list(runs.strategy.lightning_module_state_dict()) == names

    everyone = [[batch(step, rank) for step in range(count)] for rank, count in enumerate(counts)]
    loader: Any = DataLoader(everyone[dist.get_rank()], batch_size=None)
    for _ in range(2):
        callback = LambdaCallback(on_train_batch_start=look)
        trainer(ours(module_buffers="off", **options), sync_batchnorm=True, callbacks=[callback]).fit(model, loader)
        assert type(model.net.norm) is nn.BatchNorm2d
        optimizer = reference.configure_optimizers()
        for step in range(max(counts)):
            inputs, targets = zip(*(batches[step] for batches in everyone if step < len(batches)), strict=True)
            optimizer.zero_grad()
            nn.functional.mse_loss(reference.net(torch.cat(inputs)), torch.cat(targets)).backward()
            optimizer.step()
    assert seen == [(True, seen[0][1])] * len(seen), "one group for all fits"
    assert seen[0][1] is not dist.group.WORLD
    close_to(model, reference)
    assert drift(model) == 0


@on_ranks(2, fresh=True)
def test_a_failed_fit_reverts_layers_and_the_next_is_refused() -> None:
    model, left = Regression("conv"), iter((2, 1, 0))
    if dist.get_rank() == 1:
        model.net.register_forward_pre_hook(lambda *_: 1 / next(left) and None)
    with pytest.raises((ArithmeticError, PeerFailureError), match="division by zero"):
        trainer(ours(), sync_batchnorm=True).fit(model, data())
    assert type(model.net.norm) is nn.BatchNorm2d
    assert not links_of(model)
    # rank 0 left a collective under way that rank 1 never joined
    with pytest.raises(RuntimeError, match=["unfinished collectives", f"rank 0{WHERE} cannot go on"][dist.get_rank()]):
        trainer(ours(), sync_batchnorm=True).fit(Regression("conv"), data())
