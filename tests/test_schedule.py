"""The cost model, the dynamic programme against brute force, and the simulation that judges both."""

import itertools

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

MB = 1_000_000
MS = 0.001
costs = st.builds(CollectiveCost, st.floats(0, 20), st.floats(0, 2))
passes = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=9)


def every_plan(count: int) -> list[tuple[int, ...]]:
    return [(*inner, count) for cuts in range(count) for inner in itertools.combinations(range(1, count), cuts)]


@settings(max_examples=300, deadline=None)
@given(passes, costs)
def test_no_plan_finishes_before_the_planned_one(steps: list[tuple[float, float]], cost: CollectiveCost) -> None:
    ready, nbytes = zip(*steps, strict=True)
    planned = simulate(ready, nbytes, plan_boundaries(ready, nbytes, cost), cost)
    best = min(simulate(ready, nbytes, plan, cost).finish for plan in every_plan(len(steps)))
    assert planned.finish == pytest.approx(best)
    assert planned.lower_bound <= best * (1 + 1e-12)


@settings(max_examples=300, deadline=None)
@given(passes, costs, st.floats(1, 120))
def test_no_plan_within_the_cap_finishes_before_the_planned_one(
    steps: list[tuple[float, float]], cost: CollectiveCost, cap: float
) -> None:
    ready, nbytes = zip(*steps, strict=True)

    def fits(plan: tuple[int, ...]) -> bool:
        return all(
            stop - start == 1 or sum(nbytes[start:stop]) <= cap * (1 - 1e-9)
            for start, stop in itertools.pairwise([0, *plan])
        )

    planned = plan_boundaries(ready, nbytes, cost, cap)
    best = min(simulate(ready, nbytes, plan, cost).finish for plan in every_plan(len(steps)) if fits(plan))
    assert simulate(ready, nbytes, planned, cost).finish <= best * (1 + 1e-9)
    for start, stop in itertools.pairwise([0, *planned]):
        assert stop - start == 1 or sum(nbytes[start:stop]) <= cap * (1 + 1e-9)


def test_the_example_of_the_documentation() -> None:
    cost = CollectiveCost(4 * MS, 8 * MS / MB)
    ready, nbytes = [10 * MS, 14 * MS, 18 * MS, 40 * MS], [MB] * 4

    def times(*boundaries: int) -> list[tuple[int, int]]:
        buckets = simulate(ready, nbytes, boundaries, cost).buckets
        return [(round(bucket.start / MS), round(bucket.end / MS)) for bucket in buckets]

    assert times(4) == [(40, 76)]
    assert times(1, 2, 3, 4) == [(10, 22), (22, 34), (34, 46), (46, 58)]
    assert plan_boundaries(ready, nbytes, cost) == (1, 3, 4)
    assert times(1, 3, 4) == [(10, 22), (22, 42), (42, 54)]
    timeline = simulate(ready, nbytes, (1, 3, 4), cost)
    assert timeline.lower_bound / MS == pytest.approx(52)
    assert timeline.exposed / MS == pytest.approx(14)


def test_latency_alone_wants_one_bucket_and_bandwidth_alone_one_per_parameter() -> None:
    ready, nbytes = [1.0, 2.0, 3.0], [5.0, 5.0, 5.0]
    assert plan_boundaries(ready, nbytes, CollectiveCost(10.0, 0.0)) == (3,)
    assert (
        simulate(
            ready, nbytes, plan_boundaries(ready, nbytes, CollectiveCost(0.0, 1.0)), CollectiveCost(0.0, 1.0)
        ).finish
        == 16.0
    )


def test_gradients_that_overtake_wait_for_those_before_them() -> None:
    cost = CollectiveCost(0.0, 1.0)
    timeline = simulate([5.0, 1.0], [1.0, 1.0], (1, 2), cost)
    assert [bucket.ready for bucket in timeline.buckets] == [5.0, 5.0]
    assert timeline.finish == 7.0


def test_twenty_thousand_parameters_are_planned_without_trying_every_bucket() -> None:
    count = 20_000
    boundaries = plan_boundaries([at / count for at in range(count)], [1000.0] * count, CollectiveCost(1e-4, 1e-8))
    assert boundaries[-1] == count
    assert 1 < len(boundaries) < count


@pytest.mark.parametrize(
    ("boundaries", "ready"), [((2,), [1.0]), ((), [1.0]), ((1, 1), [1.0]), ((2, 1, 3), [1.0, 2.0, 3.0]), ((1,), [])]
)
def test_boundaries_that_are_none_are_refused(boundaries: tuple[int, ...], ready: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        simulate(ready, [1.0] * len(ready), boundaries, CollectiveCost(0.0, 1.0))


def test_sizes_and_ready_times_must_be_of_the_same_parameters() -> None:
    with pytest.raises(ValueError, match="found 2 and 1"):
        plan_boundaries([1.0, 2.0], [1.0], CollectiveCost(0.0, 1.0))


# -- costs -------------------------------------------------------------------------------------------


def test_a_ring_sends_each_byte_almost_twice_and_a_tree_hops_less() -> None:
    link = Link(latency=1e-5, bandwidth=1e9)
    ring, tree = ring_all_reduce(link, 64), tree_all_reduce(link, 64)
    assert ring.seconds_per_byte == pytest.approx(2 * 63 / 64 / 1e9)
    assert ring.latency == pytest.approx(126e-5)
    assert tree.latency == pytest.approx(12e-5)
    half = ring_reduce_scatter(link, 64)
    assert ring.seconds(MB) == pytest.approx(2 * half.seconds(MB))


@pytest.mark.parametrize("cost", [ring_all_reduce, tree_all_reduce, ring_reduce_scatter])
def test_one_rank_sends_nothing(cost: object) -> None:
    assert cost(Link(1e-5, 1e9), 1).seconds(MB) == 0.0


def test_a_node_sends_each_byte_once_over_the_slow_link() -> None:
    inner, outer = Link(1e-6, 300e9), Link(1e-5, 25e9)
    flat = Cluster(1, 8, inner, outer).all_reduce(MB)
    assert flat == ring_all_reduce(inner, 8)
    many = Cluster(512, 8, inner, outer)
    assert many.world_size == 4096
    cost = many.all_reduce(100 * MB)
    assert cost.seconds_per_byte == pytest.approx(2 * 7 / 8 / 300e9 + 2 / 25e9, rel=0.01)
    assert many.all_reduce(1000).latency < 3e-4, "small tensors go by trees"
