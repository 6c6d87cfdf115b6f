"""The cost model, the dynamic programme against brute force, and the simulation that judges both."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bucketddp.layout.schedule import (
    Cluster,
    CollectiveCost,
    Link,
    plan_boundaries,
    ring_all_reduce,
    ring_reduce_scatter,
    simulate,
    tree_all_reduce,
)

MB, MS = 1_000_000, 0.001
BANDWIDTH_ONLY = CollectiveCost(0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=8),
    st.builds(CollectiveCost, st.floats(0, 20), st.floats(0, 2)),
    st.one_of(st.none(), st.floats(1, 120)),
)
def test_no_plan_finishes_before_the_planned_one(
    steps: list[tuple[float, float]], cost: CollectiveCost, cap: float | None
) -> None:
    ready, nbytes = zip(*steps, strict=True)

    def fits(plan: tuple[int, ...], slack: float) -> bool:
        sizes = [(stop - start, sum(nbytes[start:stop])) for start, stop in itertools.pairwise([0, *plan])]
        return all(count == 1 or size <= (math.inf if cap is None else cap) * (1 + slack) for count, size in sizes)

    plans = [(*cuts, len(steps)) for n in range(len(steps)) for cuts in itertools.combinations(range(1, len(steps)), n)]
    planned = plan_boundaries(ready, nbytes, cost, cap)
    assert fits(planned, 1e-9)
    timeline = simulate(ready, nbytes, planned, cost)
    best = min(simulate(ready, nbytes, plan, cost).finish for plan in plans if fits(plan, -1e-9))
    assert timeline.finish <= best * (1 + 1e-9)
    assert timeline.lower_bound <= timeline.finish * (1 + 1e-9)


def test_the_example_of_the_documentation() -> None:
    cost = CollectiveCost(4 * MS, 8 * MS / MB)
    ready, nbytes = [10 * MS, 14 * MS, 18 * MS, 40 * MS], [MB] * 4
    assert plan_boundaries(ready, nbytes, cost) == (1, 3, 4)
    for boundaries, times in [
        ((4,), [(40, 76)]),
        ((1, 2, 3, 4), [(10, 22), (22, 34), (34, 46), (46, 58)]),
        ((1, 3, 4), [(10, 22), (22, 42), (42, 54)]),
    ]:
        timeline = simulate(ready, nbytes, boundaries, cost)
        assert [(round(bucket.start / MS), round(bucket.end / MS)) for bucket in timeline.buckets] == times
    assert (timeline.lower_bound / MS, timeline.exposed / MS) == pytest.approx((52, 14))


def test_latency_wants_one_bucket_and_bandwidth_many() -> None:
    ready, nbytes = [1.0, 2.0, 3.0], [5.0, 5.0, 5.0]
    assert plan_boundaries(ready, nbytes, CollectiveCost(10.0, 0.0)) == (3,)
    planned = plan_boundaries(ready, nbytes, BANDWIDTH_ONLY)
    assert simulate(ready, nbytes, planned, BANDWIDTH_ONLY).finish == 16.0
    timeline = simulate([5.0, 1.0], [1.0, 1.0], (1, 2), BANDWIDTH_ONLY)
    assert [bucket.ready for bucket in timeline.buckets] == [5.0, 5.0], "a gradient waits for those before it"
    count = 20_000  # are planned quickly
    boundaries = plan_boundaries([at / count for at in range(count)], [1000.0] * count, CollectiveCost(1e-4, 1e-8))
    assert boundaries[-1] == count > len(boundaries) > 1


def test_wrong_arguments_are_refused() -> None:
    for boundaries, ready in [((2,), [1.0]), ((), [1.0]), ((1, 1), [1.0]), ((2, 1, 3), [1.0] * 3), ((1,), [])]:
        with pytest.raises(ValueError, match="expected"):
            simulate(ready, [1.0] * len(ready), boundaries, BANDWIDTH_ONLY)
    with pytest.raises(ValueError, match="found 2 and 1"):
        plan_boundaries([1.0, 2.0], [1.0], BANDWIDTH_ONLY)
    with pytest.raises(ValueError, match="positive bandwidth"):
        Link(0.0, 0.0)
    with pytest.raises(ValueError, match="costs from 0 s"):
        CollectiveCost(-1.0, 0.0)


def test_rings_and_trees_cost_what_the_literature_says() -> None:
    link = Link(latency=1e-5, bandwidth=1e9)
    ring, tree, half = (cost(link, 64) for cost in (ring_all_reduce, tree_all_reduce, ring_reduce_scatter))
    assert ring.seconds_per_byte == pytest.approx(2 * 63 / 64 / 1e9)
    assert ring.latency == pytest.approx(126e-5)
    assert tree.latency == pytest.approx(12e-5)
    assert ring.seconds(MB) == pytest.approx(2 * half.seconds(MB))
    for cost in (ring_all_reduce, tree_all_reduce, ring_reduce_scatter):
        assert cost(link, 1).seconds(MB) == 0.0, "one rank sends nothing"


def test_a_node_sends_each_byte_once_over_the_slow_link() -> None:
    inner, outer = Link(1e-6, 300e9), Link(1e-5, 25e9)
    assert Cluster(1, 8, inner, outer).all_reduce(MB) == ring_all_reduce(inner, 8)
    many = Cluster(512, 8, inner, outer)
    assert many.world_size == 4096
    assert many.all_reduce(100 * MB).seconds_per_byte == pytest.approx(2 * 7 / 8 / 300e9 + 2 / 25e9, rel=0.01)
    assert many.all_reduce(1000).latency < 3e-4, "small tensors use trees"
