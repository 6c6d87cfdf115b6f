"""Gradient buffers, and the layouts that follow what a planner learns, without a process group."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.lane import Streams
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.buffers import LARGE_BYTES, GradBuffers
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.planner import MAX_GROUPING_SETS, LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import ParamSpec, plan


def some_params() -> list[nn.Parameter]:
    conv = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    return [nn.Parameter(tensor) for tensor in (conv, torch.randn(7), torch.randn(2, 5), torch.randn(()))]


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (lambda: torch.ones(7, requires_grad=True), r"'p1' requires grad.*create_graph=True.*torch.autograd.grad"),
        (lambda: torch.ones(7).to_sparse(), r"'p1' is torch.sparse_coo.*sparse_parameters=\['p1'\]"),
        (lambda: torch.ones(8), r"'p1' cannot be reduced: expected.*shape \(7,\).*found.*shape \(8,\)"),
        (lambda: torch.ones(7, device="meta"), r"'p1' cannot be reduced: expected.*on cpu, found.*on meta"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(grad: Callable[[], Tensor], message: str) -> None:
    made = GradBuffers(plan([ParamSpec.of(f"p{at}", param) for at, param in enumerate(some_params())], range(4), [100]))
    grads, flat = [torch.ones(4, 3, 2, 2), grad()], torch.ones(2 * LARGE_BYTES)
    for options in ({}, {"scale": 0.5, "flat": flat}):  # copied together, or one by one
        with pytest.raises(RuntimeError, match=message):
            made.pack([0, 1], grads, **options)


def test_another_layout_takes_gradients_along() -> None:
    params = some_params()
    table = SlotTable([(f"p{at}", param) for at, param in enumerate(params)])
    planner = LayoutPlanner(table, Options(bucket_cap_mb=0.0001), world_size=2, one_machine=True)
    buckets = Buckets(table, planner)
    storage = Contiguous(table, buckets, planner.plan(), Streams())
    params[0].grad, own = storage.views[3].fill_(5.0), torch.ones(2, 5)
    params[2].grad, params[3].grad = own, storage.views[0].fill_(6.0)
    planner.learn([2.0, 1.0, None, 0.0], [1])
    storage.lay_out(planner.plan())
    for slot, view, value in ((0, 3, 5.0), (3, 0, 6.0)):
        assert params[slot].grad is storage.views[view]
        assert params[slot].grad.eq(value).all()
    assert params[2].grad is own
    for bucket in buckets.all:
        assert bucket.held_back == any(table.specs[slot].name in ("p1", "p2") for slot in bucket.slots)
    storage.release()
    assert params[0].grad.eq(5.0).all()
    assert params[0].grad.untyped_storage().nbytes() == params[0].nbytes, "a plain tensor"


def planner_of(count: int, **options: object) -> tuple[SlotTable, LayoutPlanner]:
    table = SlotTable([(f"p{at}", nn.Parameter(torch.ones(16))) for at in range(count)], ["p0"])
    return table, LayoutPlanner(table, Options(**options), world_size=3, one_machine=True)


def names(table: SlotTable, planner: LayoutPlanner) -> list[str]:
    return [" ".join(table.specs[slot].name for slot in bucket.slots) for bucket in planner.plan().buckets]


def test_buckets_follow_what_was_learned() -> None:
    table, planner = planner_of(7)
    assert names(table, planner) == ["p6 p5 p4 p3 p2 p1"], "the reverse of registration, without sparse ones"
    assert not planner.due
    p5, p4, p3, p2 = range(1, 5)
    planner.learn([3.0, 2.0, 1.0, None, 0.5, 4.0], [p4])
    assert names(table, planner) == ["p2 p5 p6 p1", "p3", "p4"], "in order; never seen; repeated"
    assert not planner.holds_back([p2, p5])
    assert planner.holds_back([p3, p2])
    assert planner.holds_back([p4])
    assert planner.unseen((True,) * 7)
    planner.learn([1.0, 2.0, 3.0, 4.0, None, None], [])
    assert names(table, planner) == ["p6 p5 p3 p2 p1", "p4"], "repeated for good; seen once is enough"
    assert not planner.unseen((True,) * 7)


def test_parameters_that_train_apart_share_no_bucket() -> None:
    table, planner = planner_of(5)
    assert planner.knows((True,) * 5)
    first_two, sparse_only = (True, True, True, False, False), (True, False, False, False, False)
    assert not planner.knows(first_two)
    planner.add(first_two)
    assert planner.due
    assert planner.knows(first_two)
    assert names(table, planner) == ["p4 p3", "p2 p1"]
    for at in range(MAX_GROUPING_SETS):
        planner.add((True, *(at >> bit & 1 == 1 for bit in range(4))))
    assert planner.knows(sparse_only), "later sets move nothing"


def test_options_shape_buckets() -> None:
    assert all(bucket.numel % 100 == 0 for bucket in planner_of(5, pad_buckets_to=100)[1].plan().buckets)
    sharded = planner_of(5, shard_optimizer=True, pad_buckets_to=10, bucket_cap_mb=0.0001)[1].plan()
    assert {bucket.numel % (3 * 16) for bucket in sharded.buckets} == {0}, "each shard starts on a cache line"
    assert {bucket.numel % 10 for bucket in sharded.buckets} == {0}
    caps = [64 / 2**20, 192 / 2**20]  # one parameter in the first bucket, and three in each further one
    assert names(*planner_of(6, bucket_cap_mb_list=caps)) == ["p5", "p4 p3 p2", "p1"]
    whole = planner_of(5, overlap=False, bucket_cap_mb=0)[1]
    assert len(whole.plan().buckets) == 1
    assert whole.holds_back([])
