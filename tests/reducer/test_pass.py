"""A pass in plain PyTorch, against means worked out one parameter at a time; a gradient's way to the wire."""

import traceback
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import lightning_bucketddp
from lightning_bucketddp import BucketDDP
from lightning_bucketddp.grads.buffers import GradBuffers
from tests.inside import views_of
from tests.models import Branches, ConvBatchNorm, Mlp, OutOfOrder, batch
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    Twins,
    assert_grads,
    both,
    eventually,
    grads,
    inner,
    inputs_of,
    local_if,
    mse,
    noted,
    seeded,
    several_machines,
    taking,
)

PACKAGE = str(Path(lightning_bucketddp.__file__).parent)
WAYS = [({}, 5), ({"wire_dtype": torch.bfloat16}, 6), ({"shard_optimizer": True}, 6), ({"comm_hook": "fp16"}, 6)]
"""Options, and how many frames of the package are allowed."""


class Identity(torch.autograd.Function):
    """As re-entrant checkpoints do, hides from the graph what it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class InPython(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return Identity.apply(super().forward(Identity.apply(x)))


@on_ranks(2, cases=(Mlp, InPython))
def test_a_gradient_that_one_rank_asks_for_opens_no_pass(build: type[nn.Module]) -> None:
    """Of the inputs, and with them of some parameters."""

    def loss(net: nn.Module) -> Tensor:
        output = net(inputs := inputs_of(0).requires_grad_())
        if dist.get_rank():
            for asked in ([inputs], [inputs, *inner(net).head.parameters()]):
                torch.autograd.grad(output.sum(), asked, retain_graph=True)
        return output.square().mean()

    twins = Twins(seeded(build), find_unused_parameters=True)
    for step in range(2):
        twins.step(loss)
        assert twins.ours.passes == step + 1


@on_ranks(2)
def test_a_rank_takes_part_whose_functions_in_python_reach_no_parameter() -> None:
    """With ``find_unused_parameters``, by a backward from an output of forward."""

    class Past(InPython):
        def forward(self, x: Tensor, past: bool) -> Tensor:
            return Identity.apply(x.clone().requires_grad_())[:, :4] if past else super().forward(x)

    twins = Twins(seeded(Past), find_unused_parameters=True)
    for step in range(3):
        twins.step(lambda net, step=step: net(inputs_of(step), dist.get_rank() == step % 2).square().mean())
        assert twins.ours.passes == step + 1


@on_ranks(2)
def test_no_sync_nests_and_ends_with_an_exception() -> None:
    ours = BucketDDP(seeded(Mlp))

    def passes(direct: bool = False) -> int:
        before = ours.passes
        mse(0, direct)(ours).backward()
        return ours.passes - before

    ours.require_backward_grad_sync = False  # the same, in torch's words
    assert passes() == 0
    ours.require_backward_grad_sync = True
    with ours.no_sync():
        with ours.no_sync():
            assert passes() == 0
        assert passes() == 0
    assert passes() == 1
    with pytest.raises(KeyError), ours.no_sync():
        raise KeyError
    assert passes() == 1
    with ours.no_sync():  # without a root, no_sync around backward decides
        assert passes(direct=True) == 0
    assert passes(direct=True) == 1


@on_ranks(2)
def test_backward_pass_reduces_what_forwards_inside_no_sync_have_begun() -> None:
    """With torch's DDP this takes its private reducer, as in accelerate's ``trigger_sync_in_backward``."""
    theirs, ours = DistributedDataParallel(seeded(Mlp)), BucketDDP(seeded(Mlp))

    def losses(net: BucketDDP | DistributedDataParallel) -> list[Tensor]:
        with net.no_sync():
            return [mse(step)(net) for step in range(3)]

    *first, last = losses(theirs)
    for loss in first:
        loss.backward()
    theirs.require_backward_grad_sync = True
    theirs.reducer.prepare_for_backward([])
    last.backward()
    *first, last = losses(ours)
    for loss in first:
        loss.backward()  # the forward has decided
    assert ours.passes == 0
    with ours.backward_pass(last):
        last.backward()
    assert ours.passes == 1
    assert_grads(ours.module, grads(theirs.module))


@on_ranks(2)
def test_buckets_launch_before_backward_has_finished() -> None:
    ours = BucketDDP(seeded(partial(Mlp, depth=6)), bucket_cap_mb=TINY)
    params = list(ours.module.parameters())
    hidden: list[int] = []  # how many gradients are on the wire when the last one comes
    params[0].register_hook(lambda _: hidden.append(sum(param.grad is None for param in params)))
    mse(0)(ours).backward()
    assert ours.last_pass().early_launches == 0, "the first pass learns the order and launches nothing early"
    mse(0)(ours).backward()
    assert 3 <= ours.last_pass().early_launches < len(ours.layout.buckets)
    assert hidden[1] >= 6, "nothing may accumulate into a gradient that is on the wire"
    assert all(ours.module.get_parameter(name).grad is view for name, view in views_of(ours).items())


@on_ranks(2, cases=[{}, {"shard_optimizer": True}, {"wire_dtype": torch.bfloat16}, {"comm_hook": "bf16"}])
def test_gradients_on_the_wire_have_no_memory_but_their_buckets(options: dict[str, Any]) -> None:
    ours = BucketDDP(seeded(Mlp), bucket_cap_mb=0.001, **options)
    params = list(ours.module.parameters())
    made: dict[Tensor, StorageWeakRef] = {}
    alive: list[list[bool]] = []

    def look(_: Tensor) -> None:
        with_hooks = [param for param in params[1:] if param.grad is None]
        alive.append([not made[param].expired() for param in with_hooks])

    for param in params[1:]:
        param.register_hook(lambda grad, of=param: made.update({of: StorageWeakRef(grad.untyped_storage())}))
    params[0].register_hook(look)  # the last one
    for step in range(3):
        ours.zero_grad()
        mse(step)(ours).backward()
    assert len(alive[-1]) >= 4, "that many are on the wire"
    assert not any(alive[-1])
    ours.close()


@on_ranks(2)
def test_gradients_behind_a_bucket_that_waits_exist_once() -> None:
    ours = BucketDDP(seeded(Branches), bucket_cap_mb=0.0001)
    views, get = [], ours.module.get_parameter

    def look(_: Tensor) -> None:
        views.append({name for name, view in views_of(ours).items() if get(name).grad is view})

    get("stem.weight").register_hook(look)  # the last one
    for take in ("both", "both", "left"):  # the first bucket is one of the other branch
        ours.zero_grad()
        taking(0, take)(ours).backward()
    assert {"left.weight", "left.bias", "stem.bias"} <= views[-1]


@on_ranks(2)
def test_the_first_pass_teaches_the_order() -> None:
    names = []
    for kind in (OutOfOrder, Branches):
        ours = BucketDDP(seeded(kind), bucket_cap_mb=0.0001)
        for step in range(2):
            ours.zero_grad()
            mse(step)(ours).backward()
        layout = ours.layout
        names.append([layout.slots[slot].spec.name for bucket in layout.buckets for slot in bucket.slots])
        # The last one waits for the control vector, or is never seen.
        assert ours.last_pass().early_launches == len(layout.buckets) - 1
        ours.close()
    assert [name.split(".")[0] for name in names[0][::2]] == ["last", "middle", "first"]
    assert names[1][-1] == "idle", "a parameter never seen holds nobody up"


@on_ranks(2, cases=(False, True))
def test_old_buckets_have_no_memory_when_there_are_new_ones(several: bool) -> None:
    with several_machines() if several else nullcontext():
        ours, looked = BucketDDP(seeded(OutOfOrder), bucket_cap_mb=TINY if several else None), []
    mse(0)(ours).backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    last = ours.module.first.weight
    old = weakref.ref(ours.module.middle.weight.grad.untyped_storage())
    loss = mse(1)(ours)  # gradients are cleared after forward, as in a Trainer
    make = GradBuffers.__init__

    def look(where: str) -> None:
        eventually(lambda: old() is None, 10)  # gloo's threads let go a moment after the collective
        looked.append(where)

    def look_and_make(self: GradBuffers, *given: Any, **options: Any) -> None:
        look("before new ones are made")
        make(self, *given, **options)

    last.register_hook(lambda grad: look("in backward"))
    ours.zero_grad()
    with patch.object(GradBuffers, "__init__", look_and_make):
        loss.backward()
    assert (ours.last_pass().rebuilt, looked) == (True, ["before new ones are made", "in backward"])


@on_ranks(2)
def test_sharded_parameters_leave_their_old_memory_in_the_first_pass() -> None:
    ours = BucketDDP(seeded(OutOfOrder), shard_optimizer=True, bucket_cap_mb=TINY)
    old = weakref.ref(ours.module.middle.weight.untyped_storage())
    mse(0)(ours).backward()
    assert old() is None
    assert ours.last_pass().rebuilt
    mse(1)(ours).backward()
    assert not ours.last_pass().rebuilt


@on_ranks(2)
def test_a_gradient_in_another_memory_format_counts() -> None:
    twins = Twins(seeded(ConvBatchNorm))
    for step in range(3):
        twins.backward(lambda net, at=step: net(batch(at, dist.get_rank())[0]).square().mean())
        twins.check()
        for plain, ours in zip(*(module.parameters() for module in twins.modules), strict=True):
            plain.grad = ours.grad.clone()
        twins.ours.module.to(memory_format=torch.contiguous_format if step % 2 else torch.channels_last)


@on_ranks(2, cases=[{}, {"wire_dtype": "bfloat16"}, {"comm_hook": "fp16"}])
def test_gradients_that_were_given_other_memory_are_reduced_again(options: dict[str, Any]) -> None:
    twins = Twins(seeded(Mlp), **options)
    for step in range(3):
        twins.zero_grad()
        twins.backward(mse(step))
        for name, param in twins.ours.module.named_parameters():
            mean = twins.plain.get_parameter(name).grad.clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            torch.testing.assert_close(param.grad, mean, rtol=0.02, atol=0.02 * mean.abs().max().item())
            param.grad.data = param.grad.clone()


@pytest.mark.filterwarnings("ignore:Using backward")
@on_ranks(2, fresh=True)
def test_create_graph_is_refused_by_name() -> None:
    for contiguous, local in ((True, True), (True, False), (False, False)):
        ours = BucketDDP(Mlp(), use_contiguous_buffers=contiguous)
        with pytest.raises(RuntimeError, match=r"'head.*create_graph=True"), local_if(ours, local):
            mse(0)(ours).backward(create_graph=True)
        ours.close()


@on_ranks(2)
def test_frozen_parameters_may_be_integers_and_shared() -> None:
    encoder = nn.Linear(8, 8).requires_grad_(False)
    encoder.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    first, second = (BucketDDP(nn.Sequential(encoder, nn.Linear(8, 4))) for _ in range(2))
    inputs = batch(0, dist.get_rank())[0]
    (first(inputs) + second(inputs)).sum().backward()
    assert (first.passes, second.passes) == (1, 1)


def package_frames() -> list[str]:
    """The frames of the package on the stack, from the wire to autograd's hook; empty if there is no hook below."""
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None) if frame.f_code.co_filename.startswith(PACKAGE)]
    names = [f"{Path(code.co_filename).stem}.{code.co_name}" for code in codes]
    return names[: names.index("gradient_hooks.on_gradient") + 1] if "gradient_hooks.on_gradient" in names else []


@on_ranks(2, cases=WAYS)
def test_few_frames_lie_between_autograd_and_the_wire(options: dict[str, Any], limit: int) -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=0.001, **options)
    with noted("allreduce", "all_to_all_single", look=lambda *_: package_frames()) as found:
        for step in range(3):
            both([ours], inputs_of(step))
    assert any(found), "no bucket was launched early"
    assert max(map(len, found)) <= limit, max(found, key=len)
