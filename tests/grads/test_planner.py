"""What the planner learns, and the layouts that follow."""

import torch
from torch import nn

from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.planner import MAX_GROUPING_SETS, LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.options import Options


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


def test_a_new_parameter_gets_the_next_slot() -> None:
    table, planner = planner_of(4)
    table.all_params[2].requires_grad_(False)
    fresh = SlotTable(list(zip(table.names, table.all_params, strict=True)), ["p0"])
    planner = LayoutPlanner(fresh, Options(), world_size=2, one_machine=True)
    assert fresh.slot_of(2) is None
    fresh.ready_apart(0)
    fresh.ready_apart(2)
    assert fresh.waiting == {2}
    planner.add((True,) * 4)
    assert [spec.name for spec in fresh.specs] == ["p3", "p1", "p2"]
    assert fresh.take_waiting() == {2}
    assert not fresh.waiting


def test_options_shape_buckets() -> None:
    assert all(bucket.numel % 100 == 0 for bucket in planner_of(5, pad_buckets_to=100)[1].plan().buckets)
    sharded = planner_of(5, shard_optimizer=True, pad_buckets_to=10, bucket_cap_mb=0.0001)[1].plan()
    assert {bucket.numel % (3 * 16) for bucket in sharded.buckets} == {0}, "each shard starts on a cache line"
    assert {bucket.numel % 10 for bucket in sharded.buckets} == {0}
    whole = planner_of(5, overlap=False, bucket_cap_mb=0)[1]
    assert len(whole.plan().buckets) == 1
    assert whole.holds_back([])


def test_a_pass_expects_the_gradients_that_can_come() -> None:
    table, planner = planner_of(5, bucket_cap_mb=0.00013)  # two parameters in each bucket
    planner.learn([0.0, 1.0, 2.0, 3.0], [])
    buckets = Buckets(table, planner)
    layout = planner.plan()
    buckets.lay_out(layout, [torch.empty(bucket.numel) for bucket in layout.buckets])
    last_two = (False, False, False, True, True)
    buckets.begin(last_two, None, in_order=True)
    buckets.activate(last_two)
    assert [bucket.missing for bucket in buckets.all] == [{0, 1}, set()]
    assert buckets.active == buckets.all[:1]
    assert buckets.unused(last_two) == {0, 1}
    buckets.pending.add(1)
    assert buckets.unused(last_two) == {0}
    assert buckets.next() is buckets.all[0]
    assert buckets.is_last(buckets.all[0])
    buckets.begin((True,) * 5, {id(table.params[2])}, in_order=True)
    assert [bucket.missing for bucket in buckets.all] == [set(), {2}]
    buckets.begin_marking(synchronised=False, one_stream=True)
    assert buckets.marks_only
    assert buckets.settled == {1}
    buckets.end_marking()
    assert not buckets.marks_only
    assert not buckets.settled
    assert [buckets.awaited for _ in buckets.awaiting()] == buckets.active
    assert buckets.awaited is None
