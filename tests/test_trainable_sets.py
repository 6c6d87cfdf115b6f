"""Parameters frozen and unfrozen after wrapping."""

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from tests.inside import reducer_of, upkeep_of
from tests.models import Branches, Checkpointed, Mlp, batch, loss_of
from tests.reference import assert_grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003


def count_reduced_bytes(ours: BucketDDP) -> list[int]:
    """Records the bytes of every bucket that is put on the wire from now on."""
    sizes: list[int] = []
    start = ours._runtime.collectives.all_reduce_mean

    def record(flat: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(flat.nbytes)
        return start(flat, *args, **options)

    ours._runtime.collectives.all_reduce_mean = record
    return sizes


def unfreeze_by_hand(steps: int) -> tuple[float, int]:
    torch.manual_seed(1)
    module = Mlp(depth=4)
    alone = copy.deepcopy(module)
    for model in (module, alone):
        model.layers.requires_grad_(False)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    slots_before = len(ours.layout.slots)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    full = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        if step in (5, 10):
            for model in (module, alone):
                model.layers[3 if step == 5 else 0].requires_grad_(True)
        if step == 15:
            for model in (module, alone):
                model.layers.requires_grad_(True)
        inputs, target = batch(step, rank)
        optimizer.zero_grad()
        loss_of(ours(inputs), target).backward()
        optimizer.step()
        batches = [batch(step, r) for r in range(world)]
        full.zero_grad()
        loss_of(alone(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])).backward()
        full.step()
    for param, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5)
    assert len(ours.layout.slots) > slots_before
    assert len(ours.layout.buffers) == 1
    difference = largest_difference_between_ranks(module)
    ours.close()
    return difference, steps


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_unfrozen_backbone_stays_the_same_on_all_ranks(run_ranks: RunRanks, world_size: int) -> None:
    for difference, _ in run_ranks(world_size, unfreeze_by_hand, 50):
        assert difference == 0


def unfreeze_inside_accumulation() -> None:
    """Unfrozen for a local pass, and frozen again before the synchronised one: its gradient still counts."""
    torch.manual_seed(1)
    plain = Mlp(depth=2)
    plain.layers[0].requires_grad_(False)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    rank = dist.get_rank()
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad()
        for micro in range(3):
            inputs, target = batch(3 * step + micro, rank)
            for module in (plain, ours.module):
                module.layers[0].requires_grad_(micro == 1)
            loss_of(plain(inputs), target).backward()
            if micro < 2:
                with ours.no_sync():
                    loss_of(ours(inputs), target).backward()
            else:
                loss_of(ours(inputs), target).backward()
        assert plain.layers[0].weight.grad is not None
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_gradients_of_local_passes_are_imported(run_ranks: RunRanks) -> None:
    run_ranks(2, unfreeze_inside_accumulation)


def frozen_after_a_local_pass_that_reaches_nothing_on_one_rank() -> None:
    rank = dist.get_rank()
    module = Branches()
    module.stem.requires_grad_(False)
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    (first, _), (second, _) = batch(0, rank), batch(1, rank)
    if rank == 0:
        plain(first, "left").square().mean().backward()
    with ours.no_sync():
        loss = ours(first, "left" if rank == 0 else "none").square().mean()
        if loss.requires_grad:
            loss.backward()
    for either in (plain, module):
        either.left.requires_grad_(False)
    plain(second).square().mean().backward()
    ours(second).square().mean().backward()
    assert_grads(module, mean_over_ranks(plain))
    assert plain.left.weight.grad is not None or rank != 0
    ours.close()


def test_what_was_trainable_does_not_depend_on_what_a_local_pass_reached(run_ranks: RunRanks) -> None:
    run_ranks(2, frozen_after_a_local_pass_that_reaches_nothing_on_one_rank)


def only_the_new_parameter_is_used() -> None:
    """Everything old is frozen in the pass that the new parameter needs: no old hook will fire."""
    module = Branches()
    module.right.requires_grad_(False)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    inputs, _ = batch(0, dist.get_rank())
    ours(inputs).square().mean().backward()
    ours.zero_grad()
    module.requires_grad_(False)
    module.right.requires_grad_(True)
    plain = copy.deepcopy(module)
    plain(inputs).square().mean().backward()
    ours(inputs).square().mean().backward()
    assert plain.right.weight.grad is not None
    assert_grads(module, mean_over_ranks(plain))
    ours.close()


def test_a_pass_of_newly_unfrozen_parameters_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, only_the_new_parameter_is_used)


def frozen_for_good() -> tuple[int, int, int]:
    module = Mlp(width=64, depth=4)
    ours = BucketDDP(module, bucket_cap_mb=0.05)
    inputs, target = batch(0, dist.get_rank())
    sizes = count_reduced_bytes(ours)

    def step() -> int:
        sizes.clear()
        ours.zero_grad()
        loss_of(ours(inputs), target).backward()
        return sum(sizes)

    step()
    everything = step()
    module.layers.requires_grad_(False)
    module.layers[1].requires_grad_(True)
    part = step()
    assert module.layers[0].weight.grad is None
    expected = sum(p.numel() * 4 for p in module.parameters() if p.requires_grad)
    ours.close()
    return everything, part, expected


def test_a_frozen_parameter_stops_costing_bandwidth(run_ranks: RunRanks) -> None:
    for everything, part, expected in run_ranks(2, frozen_for_good):
        assert expected <= part <= expected * 1.05
        assert everything > 3 * part


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(8, 8)
        self.critic = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.generator(x))


def toggled_networks() -> None:
    torch.manual_seed(2)
    plain = Gan()
    ours = BucketDDP(copy.deepcopy(plain))
    sizes = count_reduced_bytes(ours)
    rank = dist.get_rank()
    for step in range(6):
        inputs, _ = batch(step, rank)
        for model in (plain, ours.module):
            model.generator.requires_grad_(step % 2 == 0)
            model.critic.requires_grad_(step % 2 == 1)
        for model in (plain, ours):
            model.zero_grad()
            model(inputs).mean().backward()
        assert_grads(ours.module, mean_over_ranks(plain))
        if step >= 2:
            trained = ours.module.generator if step % 2 == 0 else ours.module.critic
            last = reducer_of(ours).buckets.active[-1]
            control = 0 if last.with_tail is None else last.with_tail.nbytes - last.flat.nbytes
            assert sum(sizes) == sum(-(-p.numel() // 16) * 64 for p in trained.parameters()) + control
        sizes.clear()
    for bucket in ours.layout.buckets:
        networks = {ours.layout.slots[slot].spec.name.split(".")[0] for slot in bucket.slots}
        assert len(networks) == 1, "the two networks never share a bucket"
    ours.close()


def test_the_other_network_of_a_gan_is_not_reduced(run_ranks: RunRanks) -> None:
    run_ranks(2, toggled_networks)


def random_freezing() -> None:
    """More trainable sets than bucket boundaries may follow."""
    torch.manual_seed(2)
    plain = Mlp(depth=6)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    for step in range(20):
        frozen = torch.rand(6, generator=generator) < 0.5
        inputs, target = batch(step, rank)
        for model in (plain, ours.module):
            for layer, freeze in zip(model.layers, frozen.tolist(), strict=True):
                layer.requires_grad_(not freeze)
        plain.zero_grad()
        loss_of(plain(inputs), target).backward()
        ours.zero_grad()
        loss_of(ours(inputs), target).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert len(upkeep_of(ours)._parts.planner._grouping_sets) == 8
    ours.close()


def test_a_trainable_set_that_changes_every_step(run_ranks: RunRanks) -> None:
    run_ranks(2, random_freezing)


def a_straggler() -> None:
    """Rank 3 is late, so that others wait for module buffers while rank 1 asks about the next pass's set already."""

    class WithBuffers(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.critic(self.norm(self.generator(x)))

    ours = BucketDDP(WithBuffers())
    rank = dist.get_rank()
    for step in range(4):
        inputs, _ = batch(step, rank)
        ours.module.generator.requires_grad_(step % 2 == 0)
        ours.module.critic.requires_grad_(step % 2 == 1)
        if step == 2 and rank == 3:
            time.sleep(1.5)  # several polls
        ours.zero_grad()
        ours(inputs).mean().backward()
    assert ours.passes == 4
    ours.close()


def test_a_question_about_the_next_pass_is_no_disagreement(run_ranks: RunRanks) -> None:
    run_ranks(4, a_straggler)


def two_changes_in_one_pass() -> tuple[str, float]:
    module = Mlp(depth=3)
    module.layers[1].requires_grad_(False)
    ours = BucketDDP(module, timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    inputs, target = batch(0, rank)
    loss_of(ours(inputs), target).backward()
    module.layers[1].requires_grad_(True)
    with ours.backward_pass(loss := loss_of(ours(inputs), target)):
        loss.backward()
    loss = loss_of(ours(inputs), target)
    if rank == 1:
        module.layers[1].requires_grad_(False)
    begin = time.monotonic()
    with pytest.raises(RankMismatchError) as error:
        loss.backward()
    return str(error.value), time.monotonic() - begin


def test_a_rank_that_changes_between_forward_and_backward_is_named(run_ranks: RunRanks) -> None:
    for message, elapsed in run_ranks(2, two_changes_in_one_pass, fresh=True):
        assert "'layers.1.weight'" in message
        assert elapsed < 8


def frozen_between_forward_and_backward() -> None:
    """Autograd calls the hooks of parameters that were frozen since forward, and accumulates nothing."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    plain = Mlp(depth=4)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(6):
        inputs, target = batch(step, rank)
        for model in (plain, ours):
            model.zero_grad()
            module = model if model is plain else ours.module
            module.layers.requires_grad_(True)
            with ours.no_sync():
                loss_of(model(inputs), target).backward()
            loss = loss_of(model(inputs), target)
            module.layers[step % 3].requires_grad_(False)
            loss.backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_parameters_frozen_between_forward_and_backward(run_ranks: RunRanks) -> None:
    run_ranks(2, frozen_between_forward_and_backward)


def unfrozen_and_repeated() -> None:
    """The unfrozen block is called three times in a re-entrant checkpoint: its gradients come three times."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    plain = Checkpointed(use_reentrant=True, calls=3)
    plain.stem.requires_grad_(False)
    plain.block.requires_grad_(False)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001)
    for step in range(5):
        if step == 2:
            for module in (plain, ours.module):
                module.requires_grad_(True)
        inputs, target = batch(step, rank)
        for model in (plain, ours):
            model.zero_grad()
            loss_of(model(inputs), target).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.early_launches > 0
    ours.close()


def test_the_order_of_unfrozen_parameters_is_learned(run_ranks: RunRanks) -> None:
    run_ranks(2, unfrozen_and_repeated)


def one_rank_alone(change: str) -> tuple[str, str, float]:
    module = Mlp(depth=3)
    if change == "unfreeze":
        module.layers[1].requires_grad_(False)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    rank = dist.get_rank()
    inputs, target = batch(0, rank)
    for step in range(4):
        if change == "freeze again" and step in (1, 2):
            module.layers[1].requires_grad_(step == 2)
        ours.zero_grad()
        loss_of(ours(inputs), target).backward()
    if rank == 1:
        module.layers[1].requires_grad_(change == "unfreeze")
    begin = time.monotonic()
    with pytest.raises(RankMismatchError) as error:
        loss_of(ours(inputs), target).backward()
    elapsed = time.monotonic() - begin
    with pytest.raises(PeerFailureError) as again:
        ours(inputs)
    assert str(again.value) == str(error.value)
    return str(error.value), change, elapsed


@pytest.mark.parametrize("change", ["unfreeze", "freeze", "freeze again"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_changes_alone_is_named_on_every_rank(run_ranks: RunRanks, world_size: int, change: str) -> None:
    for rank, (message, _, elapsed) in enumerate(run_ranks(world_size, one_rank_alone, change, fresh=True)):
        assert f"rank {rank}: ranks disagree on which parameters are trainable in pass 4" in message
        assert "'layers.1.weight'" in message
        assert ("trainable on rank 1" if change == "unfreeze" else "frozen on rank 1") in message
        assert elapsed < 8
