"""The cost model, the dynamic programme against brute force, and the simulation that judges both."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import schedule
from benchmarks.schedule import Cluster, CollectiveCost, Link, plan_boundaries, simulate

MB = 1_000_000


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=8),
    st.builds(CollectiveCost, st.floats(0, 20), st.floats(0, 2)),
    st.one_of(st.none(), st.floats(1, 120)),
)
def test_no_plan_finishes_earlier(steps: list[tuple[float, float]], cost: CollectiveCost, cap: float | None) -> None:
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


def test_rings_and_trees_cost_what_the_literature_says() -> None:
    link = Link(latency=1e-5, bandwidth=1e9)
    costs = (schedule.ring_all_reduce, schedule.tree_all_reduce, schedule.ring_reduce_scatter)
    ring, tree, half = (cost(link, 64) for cost in costs)
    assert ring.seconds_per_byte == pytest.approx(2 * 63 / 64 / 1e9)
    assert ring.latency == pytest.approx(126e-5)
    assert tree.latency == pytest.approx(12e-5)
    assert ring.seconds(MB) == pytest.approx(2 * half.seconds(MB))
    for cost in costs:
        assert cost(link, 1).seconds(MB) == 0.0, "one rank sends nothing"


def test_a_node_sends_each_byte_once_over_the_slow_link() -> None:
    inner, outer = Link(1e-6, 300e9), Link(1e-5, 25e9)
    assert Cluster(1, 8, inner, outer).all_reduce(MB) == schedule.ring_all_reduce(inner, 8)
    many = Cluster(512, 8, inner, outer)
    assert many.all_reduce(100 * MB).seconds_per_byte == pytest.approx(2 * 7 / 8 / 300e9 + 2 / 25e9, rel=0.01)
    assert many.all_reduce(1000).latency < 3e-4, "small tensors use trees"
