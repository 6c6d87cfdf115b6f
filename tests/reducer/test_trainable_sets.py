"""Parameters frozen and unfrozen after wrapping."""

import itertools
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP, RankMismatchError, WrapError
from lightning_bucketddp.reducer.trainable import TrainableHistory
from tests.inside import passes_of, reducer_of
from tests.models import Branches, ConvBatchNorm, Fragile, Mlp, Quantised, batch, loss_of
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    Twins,
    drift,
    local_if,
    mse,
    noted,
    pair,
    raises_soon,
    seeded,
    taking,
)
from tests.sampling import in_turn


@on_ranks(2, 3)
def test_an_unfrozen_backbone_stays_the_same_on_all_ranks() -> None:
    alone, ours = pair(partial(Mlp, depth=4), TINY)
    module = ours.module
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (module, alone)]
    unfrozen, asks = {0: [], 3: [3], 6: [3, 0], 9: [3, 0, 1, 2]}, []
    position = passes_of(ours).peers.position
    for step in range(12):
        before = position.agreement
        for model in (module, alone):
            model.zero_grad()
            for at in range(4) if step in unfrozen else ():
                model.layers[at].requires_grad_(at in unfrozen[step])
        mse(step)(ours).backward()
        batches = [batch(step, rank) for rank in range(dist.get_world_size())]
        loss_of(alone(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])).backward()
        for optimizer in optimizers:
            optimizer.step()
        asks += [step] if position.agreement > before else []
    torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-5)
    assert asks == [0, 3, 6, 9], "the changes, and no other pass"
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
            control = last.flat_with_control.nbytes - last.flat.nbytes
            tensors = [call.args[0] for call in summed.call_args_list + reduced.call_args_list]
            assert len(tensors) == len(buckets.active(reducer_of(ours).table.trainable_now())), "nothing but buckets"
            sent = sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())
            assert sent == sum(-(-p.numel() // 16) * 64 for p in trained.parameters()) + control


class Parts(nn.Module):
    """Parts that are trained in turn: of one bucket or several, of other sizes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(8, 4)
        self.large = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 4))
        self.exact = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x) + self.large(x) + self.exact(x.double())

    def train_only(self, *parts: str) -> None:
        for name, part in self.named_children():
            part.requires_grad_(name in parts)


@pytest.mark.parametrize(
    ("turns", "asks"),
    [
        (["all"] * 100, []),
        (["one"] * 100, [0]),
        (["one"] * 50 + ["two"] * 50, [0, 50]),
        ("gd" * 50, [0, 1, 2]),
        ("ddddg" * 20, [0, 4, 5]),
        ("abc" * 20, [0, 1, 2, 3]),
        ("abcadb" * 20, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("ddddg" + "d" * 50, [0, 4, 5, 9]),
        ([f"{number}" for number in range(100)] * 2, [*range(200)]),
    ],
)
def test_ranks_agree_in_the_store_until_turns_have_come_once(turns: Iterable[str], asks: list[int]) -> None:
    found: list[int] = []
    history = TrainableHistory(Mock())
    history.follow(Mock(trainable_now=lambda: "all"), Mock(), Mock())
    with patch.object(history, "_ask") as ask:
        for step, (before, trainable) in enumerate(itertools.pairwise(["all", *turns])):
            assert history.agree(trainable) == (trainable != before)
            found += [step] * ask.call_count
            ask.reset_mock()
    assert found == asks
    assert len(history._turns) <= 66


TRAINED: dict[str, Any] = {"plain": {}, "sharded": {"shard_optimizer": True}, "hook": {"comm_hook": "bf16"}}


@on_ranks(2, 3, cases=TRAINED, quick=["sharded", "hook"])
def test_parts_trained_in_turn_need_the_store_once(options: dict[str, Any]) -> None:
    plain, ours = pair(Parts, TINY, **options)
    turns = ["small", "large", "exact", "small exact", "exact"] * 2
    within = {"rtol": 2e-2, "atol": 2e-2} if options.get("comm_hook") else {}
    position, asks = passes_of(ours).peers.position, []
    for step, parts in enumerate(turns):
        micros, before = 1 + step % 3, position.agreement
        for model in (plain, ours):
            model.zero_grad()
            (model.module if model is ours else model).train_only(*parts.split())
        for micro in range(micros):
            with local_if(ours, micro + 1 < micros):
                mse(3 * step + micro)(ours).backward()
            for rank in range(dist.get_world_size()):
                inputs, target = batch(3 * step + micro, rank)
                (loss_of(plain(inputs), target) / dist.get_world_size()).backward()
        asks += [step] if position.agreement > before else []
        for (name, param), other in zip(plain.named_parameters(), ours.module.parameters(), strict=True):
            assert (param.grad is None) == (not param.requires_grad), name
            found = ours.full_grad(other)
            torch.testing.assert_close(found, param.grad, msg=lambda m, n=name: f"{n}: {m}", **within)
    assert asks == [0, 1, 2, 3, 4, 5]
    assert drift(ours.module) == 0


@on_ranks(1)
def test_sets_that_never_come_back_are_forgotten() -> None:
    ours = BucketDDP(seeded(partial(Mlp, depth=7)))
    learner, params = passes_of(ours).wrapped.context.learner, list(ours.parameters())
    for number in range(1, 100):
        for at, param in enumerate(params):
            param.requires_grad_(bool(number >> at & 1))
        ours.zero_grad()
        mse(number)(ours).backward()
    assert len(learner._looked_at) < 70


DEVIATIONS = {"another known set": "exact", "a new set": "small exact", "the set of the pass before": "large"}


@on_ranks(
    2,
    3,
    cases={f"{how}, {shard=}": (parts, shard) for how, parts in DEVIATIONS.items() for shard in (False, True)},
    quick=[f"{how}, {shard=}" for how, shard in in_turn([*DEVIATIONS], [True, False])],
    fresh=True,
)
def test_a_rank_that_trains_another_part_is_named_before_anything_is_launched(parts: str, shard: bool) -> None:
    ours = BucketDDP(Parts(), bucket_cap_mb=TINY, shard_optimizer=shard, timeout=timedelta(seconds=20))
    rank, odd = dist.get_rank(), dist.get_world_size() - 1
    for step in range(6):
        ours.zero_grad()
        ours.module.train_only(("small", "exact", "large")[step % 3])
        mse(step)(ours).backward()
    ours.zero_grad()
    ours.module.train_only(*(parts.split() if rank == odd else ["small"]))
    loss = mse(6)(ours)
    words = f"rank {rank}: ranks disagree on which parameters are trainable in pass 6: parameter '.* on rank {odd}"
    with noted("allreduce", "all_to_all_single") as sent, raises_soon(RankMismatchError, match=words) as error:
        loss.backward()
    assert bool(sent) == (rank != odd), "the ranks with the expected set wait for their first bucket"
    with pytest.raises(RankMismatchError) as again:
        mse(0)(ours)
    assert str(again.value) == str(error.value)


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


@on_ranks(
    2,
    cases={f"{how}, {shard=}": (how, shard) for how in CONVERSIONS for shard in (False, True)},
    quick=[f"{how}, {shard=}" for how, shard in in_turn([*CONVERSIONS], [True, False])],
)
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
