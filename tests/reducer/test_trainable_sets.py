"""Parameters frozen and unfrozen after wrapping."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP, RankMismatchError, WrapError
from tests.inside import passes_of, reducer_of
from tests.models import Branches, ConvBatchNorm, Fragile, Mlp, Quantised, batch, loss_of
from tests.pool import on_ranks
from tests.reference import TINY, Twins, drift, mse, pair, raises_soon, seeded, taking


@on_ranks(2, 3)
def test_an_unfrozen_backbone_stays_the_same_on_all_ranks() -> None:
    alone, ours = pair(partial(Mlp, depth=4), TINY)
    module = ours.module
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (module, alone)]
    unfrozen, agreements = {0: [], 3: [3], 6: [3, 0], 9: [3, 0, 1, 2]}, set()
    for step in range(12):
        for model in (module, alone):
            model.zero_grad()
            for at in range(4) if step in unfrozen else ():
                model.layers[at].requires_grad_(at in unfrozen[step])
        mse(step)(ours).backward()
        batches = [batch(step, rank) for rank in range(dist.get_world_size())]
        loss_of(alone(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])).backward()
        for optimizer in optimizers:
            optimizer.step()
        agreements.add(passes_of(ours).peers.position.agreement)
    torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-5)
    assert len(agreements) == 4, "the ranks agree on changes alone"
    assert len(ours.layout.buffers) == 1
    assert drift(module) == 0


@on_ranks(2)
def test_parameters_trained_in_a_local_pass_alone_count() -> None:
    """Unfrozen for a local pass; or frozen after one that reaches them on rank 0 alone."""
    plain = Mlp(depth=2)
    plain.layers[0].requires_grad_(False)
    twins = Twins(plain)
    for step in range(3):
        twins.zero_grad()
        for micro in range(3):
            for module in twins.modules:
                module.layers[0].requires_grad_(micro == 1)
            twins.backward(mse(3 * step + micro), local=micro < 2)
        assert plain.layers[0].weight.grad is not None
        twins.check()

    plain = Branches()
    plain.stem.requires_grad_(False)
    twins = Twins(plain)
    twins.backward(taking(0, "left" if dist.get_rank() == 0 else "none"), local=True)
    for module in twins.modules:
        module.left.requires_grad_(False)
    twins.backward(taking(1))
    twins.check()
    assert (plain.left.weight.grad is None) == (dist.get_rank() == 1)


@on_ranks(2)
def test_parameters_may_be_frozen_between_forward_and_backward() -> None:
    """Autograd calls the hooks of parameters that were frozen since forward, and accumulates nothing."""
    twins = Twins(Mlp(depth=4))
    for step in range(6):
        twins.zero_grad()
        for model, module in zip((twins.plain, twins.ours), twins.modules, strict=True):
            module.layers.requires_grad_(True)
            with twins.ours.no_sync():
                mse(step)(model).backward()
            loss = mse(step)(model)
            module.layers[step % 3].requires_grad_(False)
            loss.backward()
        twins.check()


def toggle(generator: nn.Module, critic: nn.Module, step: int) -> None:
    generator.requires_grad_(step % 2 == 0)
    critic.requires_grad_(step % 2 == 1)


@on_ranks(2)
def test_the_other_network_of_a_gan_is_not_reduced() -> None:
    twins = Twins(Fragile(), bucket_cap_mb=None)
    ours, collectives = twins.ours, twins.ours._runtime.collectives
    for step in range(6):
        for module in twins.modules:
            toggle(module.first, module.second, step)
        with (
            patch.object(collectives, "sum", side_effect=collectives.sum) as summed,
            patch.object(collectives, "reduce", side_effect=collectives.reduce) as reduced,
        ):
            twins.step(mse(step))
        trained, frozen = (ours.module.first, ours.module.second)[:: 1 if step % 2 == 0 else -1]
        assert frozen.weight.grad is None
        if step >= 2:
            buckets = reducer_of(ours).buckets
            last = buckets.all[buckets.active(reducer_of(ours).table.trainable_now())[-1]]
            control = 0 if last.flat_with_control is None else last.flat_with_control.nbytes - last.flat.nbytes
            tensors = [call.args[0] for call in summed.call_args_list + reduced.call_args_list]
            sent = sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())
            assert sent == sum(-(-p.numel() // 16) * 64 for p in trained.parameters()) + control


@on_ranks(4)
def test_a_question_about_the_next_pass_is_no_disagreement() -> None:
    """Rank 3 is late. The others wait for module buffers while rank 1 asks about the next pass's set already."""
    ours = BucketDDP(ConvBatchNorm())
    for step in range(4):
        toggle(ours.module.conv1, ours.module.conv2, step)
        if step == 2 and dist.get_rank() == 3:
            time.sleep(1.5)  # several polls
        ours.zero_grad()
        mse(step)(ours).backward()
    assert ours.passes == 4


@on_ranks(2, cases=("unfreeze", "freeze again", "freeze between"), fresh=True)
def test_a_rank_that_changes_alone_is_named(change: str) -> None:
    module = Mlp(depth=3)
    if change == "unfreeze":
        module.layers[1].requires_grad_(False)
    ours = BucketDDP(module, bucket_cap_mb=TINY, timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    for step in range(4):
        if change == "freeze again" and step in (1, 2):
            module.layers[1].requires_grad_(step == 2)
        ours.zero_grad()
        mse(0)(ours).backward()
    if rank == 1 and change != "freeze between":
        module.layers[1].requires_grad_(change == "unfreeze")
    loss = mse(0)(ours)
    if rank == 1 and change == "freeze between":
        module.layers[1].requires_grad_(False)
    words = f"rank {rank}: ranks disagree on which parameters are trainable in pass 4.*'layers.1.weight'"
    now = "trainable" if change == "unfreeze" else "frozen"
    with raises_soon(RankMismatchError, match=f"(?s){words}.*{now} on rank 1") as error:
        loss.backward()
    with pytest.raises(RankMismatchError) as again:
        mse(0)(ours)
    assert str(again.value) == str(error.value)


CONVERSIONS: dict[str, Callable[[Quantised], object]] = {
    "to": lambda module: module.to("cpu"),
    "cpu": Quantised.cpu,
    "float": Quantised.float,
    "a part, swapped": lambda module: module.plain_base.to("cpu"),
}


@on_ranks(2, cases={f"{how}, {shard=}": (how, shard) for how in CONVERSIONS for shard in (False, True)})
def test_frozen_weights_may_be_converted_and_then_trained(how: str, shard: bool) -> None:
    alone, module = seeded(Quantised), seeded(Quantised)
    torch.__future__.set_swap_module_params_on_conversion("swapped" in how)
    try:
        ours = BucketDDP(module, bucket_cap_mb=TINY, shard_optimizer=shard)
        for step in range(6):
            for net in (alone, module):
                net.zero_grad()
                if step == 1:
                    CONVERSIONS[how](net)
                for param in (net.plain_base.weight, *(() if shard else (net.base,))):
                    param.requires_grad_(step in (2, 3, 5))
            mse(step)(ours).backward()
            batches = [batch(step, rank) for rank in range(dist.get_world_size())]
            loss_of(alone(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])).backward()
            for name, param in alone.named_parameters():
                assert (param.grad is not None) == param.requires_grad, name
                found = ours.full_grad(module.get_parameter(name))
                torch.testing.assert_close(found, param.grad, msg=lambda m, n=name: f"{n}: {m}")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@on_ranks(2, fresh=True)
def test_weights_that_wrap_other_tensors_are_not_trained_in_shards() -> None:
    module = Quantised()
    words = "found parameter 'base', a Int8 that wraps other tensors; freeze it, or train without"
    module.base.requires_grad_(True)
    with pytest.raises(WrapError, match=words):
        BucketDDP(module, shard_optimizer=True)
    module.base.requires_grad_(False)
    ours = BucketDDP(module, shard_optimizer=True)
    mse(0)(ours).backward()
    module.base.requires_grad_(True)
    with pytest.raises(WrapError, match=words):
        mse(1)(ours).backward()


@on_ranks(2, fresh=True)
def test_ranks_that_change_differently_are_told_the_first_difference() -> None:
    ours = BucketDDP(Mlp(depth=3), bucket_cap_mb=TINY, timeout=timedelta(seconds=20))
    mse(0)(ours).backward()
    rank = dist.get_rank()
    ours.module.layers[rank].requires_grad_(False)
    words = f"rank {rank}: ranks disagree on which parameters are trainable in pass 1.*'layers.0.weight'"
    with raises_soon(RankMismatchError, match=f"(?s){words}.*frozen on rank 0"):
        mse(1)(ours).backward()
