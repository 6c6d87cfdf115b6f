"""Shards lie in the order in which the first pass brings gradients, and stay there."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from lightning_bucketddp import BucketDDP
from tests.inside import wrapped_of
from tests.models import RaiseInBackward, batch
from tests.optim.common import TINY, stepped
from tests.pool import on_ranks
from tests.reference import drift, everyones, noted, run_backward, seeded


class Backwards(nn.Module):
    """Its layers are registered in the order of backward, so buckets are planned in the order of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        hidden = self.middle(self.first(x).tanh()).tanh()
        return self.last(RaiseInBackward.apply(hidden) if fail else hidden)


def begin(**options: Any) -> tuple[BucketDDP, SGD]:
    ours = BucketDDP(seeded(Backwards), shard_optimizer=True, bucket_cap_mb=TINY, **options)
    return ours, SGD(ours.parameters(), lr=0.1, momentum=0.9)


def one_pass(ours: BucketDDP, step: int = 0, fail: bool = False, guarded: bool = False) -> None:
    x, target = batch(step, dist.get_rank())
    run_backward(ours, nn.functional.mse_loss(ours(x, fail), target), guarded)


def layers(ours: BucketDDP) -> list[str]:
    """The layers in the order of the layout."""
    slots = [ours.layout.slots[slot] for bucket in ours.layout.buckets for slot in bucket.slots]
    return list(dict.fromkeys(slot.spec.name.split(".")[0] for slot in slots))


def assert_stays_as_planned(ours: BucketDDP, optimizer: SGD) -> None:
    for step in range(2):
        one_pass(ours, step)
        stepped(optimizer)
    assert layers(ours) == ["first", "middle", "last"]
    ours.wait_for_parameters()
    assert drift(ours.module) == 0


@on_ranks(2)
def test_the_first_pass_decides_before_it_sends_gradients() -> None:
    ours, optimizer = begin()
    x, target = batch(0, dist.get_rank())
    loss = nn.functional.mse_loss(ours(x), target)
    with noted("allreduce", "all_to_all_single", look=lambda *_: layers(ours)) as layouts:
        loss.backward()
    order, *others = layouts
    assert order == ["first", "middle", "last"]
    assert others == [["last", "middle", "first"]] * (len(ours.layout.buckets) + 1), "the buckets, the control vector"
    layout = ours.layout
    for step in range(1, 4):
        stepped(optimizer)
        one_pass(ours, step)
    assert ours.layout == layout


@on_ranks(2)
def test_state_that_one_rank_has_loaded_keeps_the_shards_of_all() -> None:
    trained, optimizer = begin()
    one_pass(trained)
    optimizer.step()
    state = trained.optimizer_state_dict(optimizer, every_rank=True)
    ours, optimizer = begin()
    ours.prepare_optimizer(optimizer)
    if dist.get_rank() == 1:
        ours.load_optimizer_state_dict(optimizer, state)
    assert_stays_as_planned(ours, optimizer)


@on_ranks(2, cases=(True, False))
def test_a_reduction_without_a_backward_settles_shards_as_they_were_planned(overlap: bool) -> None:
    ours, optimizer = begin(overlap=overlap)
    with ours.no_sync():
        one_pass(ours)
    ours.allreduce_gradients()
    for step in range(1, 3):
        stepped(optimizer)
        one_pass(ours, step)
    assert layers(ours) == ["first", "middle", "last"]


@on_ranks(2)
def test_what_an_earlier_run_has_learned_decides_before_state_is_loaded() -> None:
    trained, optimizer = begin()
    one_pass(trained)
    optimizer.step()
    ours, resumed = begin()
    wrapped_of(ours).resume_order(wrapped_of(trained).context.learner.lessons)
    ours.load_optimizer_state_dict(resumed, trained.optimizer_state_dict(optimizer, every_rank=True))
    assert ours.layout == trained.layout
    one_pass(ours)
    assert ours.layout == trained.layout
    assert everyones(len(resumed.state)) == everyones(len(optimizer.state))
