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
    plan_for_unsure_cost,
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


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6))
def test_two_measurements_show_the_cost(latency: float, seconds_per_byte: float) -> None:
    cost = CollectiveCost(latency, seconds_per_byte)
    shown = CollectiveCost.through((4096, cost.seconds(4096)), (4e6, cost.seconds(4e6)))
    assert shown.latency == pytest.approx(latency, rel=1e-3, abs=1e-9)
    assert shown.seconds_per_byte == pytest.approx(seconds_per_byte, rel=1e-3, abs=1e-13)


def test_what_noise_shows_has_no_negative_parts() -> None:
    assert CollectiveCost.through((1.0, 2.0), (100.0, 1.0)).seconds_per_byte == 0.0
    assert CollectiveCost.through((1e6, 1e-4), (2e6, 1.0)).latency == 0.0


# -- links that are not what they were measured to be ------------------------------------------------


def capped(nbytes: list[float], cap: float) -> tuple[int, ...]:
    boundaries, held = [], 0.0
    for at, size in enumerate(nbytes):
        if held and held + size > cap:
            boundaries.append(at)
            held = 0.0
        held += size
    return (*boundaries, len(nbytes))


@pytest.mark.parametrize("count", [24, 96, 400])
@pytest.mark.parametrize("bandwidth", [60e6, 250e6, 1e9])
@pytest.mark.parametrize("latency", [5e-5, 1e-3])
def test_a_link_ten_times_off_costs_at_most_a_few_per_cent(count: int, bandwidth: float, latency: float) -> None:
    ready = [0.192 * (at + 1) / count for at in range(count)]
    nbytes = [58 * MB / count] * count
    default = capped(nbytes, 58 * MB / 32)
    measured = CollectiveCost(latency, 1 / bandwidth)
    plan = plan_for_unsure_cost(ready, nbytes, measured, default)
    assert simulate(ready, nbytes, plan, measured).finish <= simulate(ready, nbytes, default, measured).finish
    for off in itertools.product((0.1, 1.0, 10.0), repeat=2):
        actual = CollectiveCost(latency * off[0], off[1] / bandwidth)
        assert simulate(ready, nbytes, plan, actual).finish <= 1.03 * simulate(ready, nbytes, default, actual).finish


def test_a_plan_for_a_link_ten_times_off_is_what_is_kept_from_happening() -> None:
    ready = [0.192 * (at + 1) / 96 for at in range(96)]
    nbytes = [58 * MB / 96] * 96
    default, actual = capped(nbytes, 58 * MB / 32), CollectiveCost(2e-4, 1 / 250e6)
    finish = simulate(ready, nbytes, default, actual).finish
    believed = CollectiveCost(2e-3, 10 / 250e6)
    assert simulate(ready, nbytes, plan_boundaries(ready, nbytes, believed), actual).finish > 1.5 * finish
    assert (
        simulate(ready, nbytes, plan_for_unsure_cost(ready, nbytes, believed, default), actual).finish < 1.03 * finish
    )


def test_a_plan_is_made_where_there_is_something_to_gain() -> None:
    ready = [0.192 * (at + 1) / 96 for at in range(96)]
    nbytes = [58 * MB / 96] * 96
    default, cost = capped(nbytes, 58 * MB / 32), CollectiveCost(1e-3, 1 / 250e6)
    plan = plan_for_unsure_cost(ready, nbytes, cost, default)
    assert simulate(ready, nbytes, plan, cost).finish < 0.99 * simulate(ready, nbytes, default, cost).finish
