"""``bucket_cap_mb="auto"``: what is watched, planned, tried, and kept or not."""

import copy
import logging
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.plan import ParamSpec, plan
from lightning_bucketddp.layout.schedule import CollectiveCost, simulate
from lightning_bucketddp.reducer import planner
from lightning_bucketddp.reducer.link_cost import SIZES, measure_cost
from lightning_bucketddp.reducer.planner import WATCHED_PASSES, BucketPlan, Candidate, calibrated
from lightning_bucketddp.reducer.ready_times import ReadyTimes
from lightning_bucketddp.wrapper import bucket_ddp as wrapper
from tests.reference import mean_over_ranks

RunRanks = Callable[..., list[Any]]
LAYERS = 6
LAYER_BYTES = (16 * 16 + 16) * 4
TOLD = 1 + WATCHED_PASSES
"""Passes until there is a plan: the first teaches the order."""


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))


def one_per_piece(ready: Any, nbytes: Any, cost: Any, fallback: Any) -> tuple[int, ...]:
    return tuple(range(1, len(ready) + 1))


def one(ready: Any, nbytes: Any, cost: Any, fallback: Any) -> tuple[int, ...]:
    return (len(ready),)


def with_plan(plans: Any, *pass_seconds: float, most_layers: int | None = None, turns: int = 1) -> None:
    """Lets rank 0 plan like this, and passes take that long with the buckets before, the planned and the largest ones.

    Args:
        plans: Instead of the planning.
        pass_seconds: The last stays so.
        most_layers: How many are in the largest buckets; None if those are not to be tried.
        turns: How often candidates are tried.
    """
    planner.plan_for_unsure_cost = plans
    planner.TURNS = turns
    planner.MAX_TRIAL = math.inf if most_layers else 0.0
    planner.MAX_DEFAULT_BUCKET_BYTES = LAYER_BYTES * (most_layers or LAYERS)  # type: ignore[attr-defined]
    taken = [0]
    stages = pass_seconds or (1.0,)

    def seconds_of_pass(self: ReadyTimes) -> float:
        stage = taken[0] // WATCHED_PASSES
        taken[0] += 1
        return stages[min(stage, len(stages) - 1)]

    ReadyTimes.seconds_of_pass = seconds_of_pass  # type: ignore[method-assign]
    ReadyTimes.seconds_of_backward = lambda self: 0.5  # type: ignore[method-assign]


def train(ours: BucketDDP, plain: nn.Module, steps: int, guarded: bool = False) -> list[int]:
    """Number of buckets in each pass; every gradient is compared."""
    found = []
    for step in range(steps):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for module in (ours, plain):
            module.zero_grad()
            loss = module(x).square().sum()
            with ours.backward_pass(loss) if guarded and module is ours else nullcontext():
                loss.backward()
        expected = mean_over_ranks(plain)
        for name, param in ours.module.named_parameters():
            torch.testing.assert_close(param.grad, expected.get(name), msg=f"{name} in step {step}")
        record = ours.last_pass()
        assert record is not None
        found.append(len(record.buckets))
    return found


def described(ours: BucketDDP) -> list[list[str]]:
    return [[ours.layout.slots[slot].spec.name for slot in bucket.slots] for bucket in ours.layout.buckets]


def planned(kept: bool) -> tuple[list[int], list[list[str]], BucketPlan | None, bool]:
    with_plan(one_per_piece, 1.0, 1.0 if kept else 1.1)
    if dist.get_rank() != 0:
        planner.plan_for_unsure_cost = one  # rank 0's counts
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    buckets = train(ours, module, 3 * WATCHED_PASSES)
    few_hooks = not ours._reducer.hooks.everywhere
    return buckets, described(ours), ours.bucket_plan, few_hooks


@pytest.mark.parametrize("kept", [True, False])
def test_a_plan_is_tried_and_kept_if_passes_take_no_longer(run_ranks: RunRanks, kept: bool) -> None:
    (buckets, layout, plan, few_hooks), other = run_ranks(2, planned, kept, fresh=True)
    assert layout == other[1]
    assert plan is not None
    assert plan.chosen == ("planned" if kept else "default")
    assert plan == other[2]
    assert len(plan.default.timeline.buckets) == 1
    assert len(plan.planned.timeline.buckets) == 2 * LAYERS
    assert plan.planned.seconds == pytest.approx(1.0 if kept else 1.1)
    assert plan.largest is None
    tried = TOLD + WATCHED_PASSES
    assert buckets[:TOLD] == [1] * TOLD
    assert buckets[TOLD:tried] == [2 * LAYERS] * WATCHED_PASSES
    assert set(buckets[tried:]) == {2 * LAYERS if kept else 1}
    assert few_hooks, "when nothing is watched any more only the last parameters of buckets are hooked"
    assert ("of the default rule, rather than" in str(plan)) is not kept


def three_tried(seconds: tuple[float, float, float]) -> tuple[list[int], BucketPlan | None]:
    with_plan(one_per_piece, *seconds, most_layers=2)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    return train(ours, module, TOLD + 2 * WATCHED_PASSES + 2), ours.bucket_plan


@pytest.mark.parametrize(
    ("seconds", "chosen", "count"),
    [
        ((1.0, 0.9, 0.8), "largest", LAYERS // 2),
        ((1.0, 1.1, 0.9), "largest", LAYERS // 2),
        ((1.0, 0.9, 0.89), "planned", 2 * LAYERS),
        ((1.0, 1.1, 1.0), "default", 1),
    ],
)
def test_the_largest_buckets_are_tried_too(
    run_ranks: RunRanks, seconds: tuple[float, float, float], chosen: str, count: int
) -> None:
    (buckets, plan), other = run_ranks(2, three_tried, seconds, fresh=True)
    assert plan is not None
    assert (buckets, plan) == other
    assert plan.chosen == chosen
    assert plan.largest is not None
    assert [it.seconds for it in (plan.default, plan.planned, plan.largest)] == pytest.approx(seconds)
    assert len(plan.in_use.timeline.buckets) == count
    assert buckets[:TOLD] == [1] * TOLD
    assert buckets[TOLD:-2] == [2 * LAYERS] * WATCHED_PASSES + [LAYERS // 2] * WATCHED_PASSES
    assert buckets[-2:] == [count] * 2


def in_turns(seconds: list[float]) -> tuple[list[int], BucketPlan | None]:
    with_plan(one_per_piece, *seconds, most_layers=2, turns=3)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    return train(ours, module, TOLD + (len(seconds) - 1) * WATCHED_PASSES + 2), ours.bucket_plan


DEFAULT, PLANNED, LARGEST = 1, 2 * LAYERS, LAYERS // 2


@pytest.mark.parametrize(
    ("seconds", "tried", "chosen"),
    [
        # The largest ones were disturbed in two turns of three; the default ones get no third.
        ([1.0, 1.1, 1.1, 1.0, 0.9, 0.8, 0.9, 1.1], [PLANNED, LARGEST, DEFAULT, *[PLANNED, LARGEST] * 2], "largest"),
        # The largest ones get no second turn, the planned ones no third.
        ([1.0, 1.1, 1.2, 0.9, 1.1, 0.8], [PLANNED, LARGEST, DEFAULT, PLANNED], "default"),
        ([1.0, 0.8, 1.2], [PLANNED, LARGEST], "planned"),
    ],
)
def test_candidates_take_turns_and_the_shortest_pass_counts(
    run_ranks: RunRanks, seconds: list[float], tried: list[int], chosen: str
) -> None:
    (buckets, plan), other = run_ranks(2, in_turns, seconds, fresh=True)
    assert plan is not None
    assert (buckets, plan) == other
    assert plan.chosen == chosen
    count = {"default": DEFAULT, "planned": PLANNED, "largest": LARGEST}[chosen]
    wanted = [DEFAULT] * TOLD + [count for count in tried for _ in range(WATCHED_PASSES)]
    assert buckets[: len(wanted)] == wanted
    assert set(buckets[len(wanted) :]) == {count}


def only_largest() -> tuple[list[int], BucketPlan | None]:
    """The plan is the default rule's, which has one bucket; the largest hold less here."""
    with_plan(one, 1.0, 0.9, most_layers=3)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    return train(ours, module, TOLD + WATCHED_PASSES + 1), ours.bucket_plan


def test_the_largest_buckets_are_tried_where_the_plan_is_nothing_new(run_ranks: RunRanks) -> None:
    for buckets, made in run_ranks(2, only_largest, fresh=True):
        assert buckets == [1] * TOLD + [2] * (WATCHED_PASSES + 1)
        assert made is not None
        assert (made.chosen, made.planned.seconds) == ("largest", None)


def too_long() -> tuple[list[int], BucketPlan | None]:
    with_plan(one, most_layers=1)
    planner.MAX_TRIAL = 0.5  # for one bucket fewer of whatever size would do
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    return train(ours, module, TOLD + 2), ours.bucket_plan


def test_the_largest_buckets_are_not_tried_where_they_should_take_long(run_ranks: RunRanks) -> None:
    for buckets, made in run_ranks(2, too_long, fresh=True):
        assert buckets == [1] * (TOLD + 2)
        assert made is not None
        assert made.largest is None


def as_good() -> tuple[int, str]:
    with_plan(one)
    said: list[str] = []
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    ours.announce_with(said.append)
    assert set(train(ours, module, TOLD + WATCHED_PASSES)) == {1}
    return len(said), "".join(said)


def test_nothing_is_tried_where_the_default_buckets_are_as_good(run_ranks: RunRanks) -> None:
    (lines, text), other = run_ranks(2, as_good, fresh=True)
    assert lines == 1
    assert "Gbit" in text
    assert "the 1 bucket of 0.0 MiB of the default rule" in text
    assert other == (0, ""), "rank 0 tells"


def other_parameters() -> list[int]:
    with_plan(one_per_piece)
    module = deep()
    for param in module[:3].parameters():
        param.requires_grad_(False)
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    buckets = train(ours, module, TOLD + WATCHED_PASSES + 1)
    for it in (module, ours.module):
        for param in it.parameters():
            param.requires_grad_(True)
    return buckets[-1:] + train(ours, module, TOLD + WATCHED_PASSES + 1)


def test_other_trainable_parameters_are_planned_anew(run_ranks: RunRanks) -> None:
    before, *after = run_ranks(2, other_parameters, fresh=True)[0]
    assert before == LAYERS, "two parameters a layer, of half of the layers"
    assert after[0] > 1
    assert after[-1] == 2 * LAYERS


def by_itself(**options: Any) -> tuple[BucketPlan | None, list[str]]:
    """Nothing forced."""
    module = deep()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto", **options)
    train(ours, module, 8)
    return ours.bucket_plan, [str(it.message) for it in caught if "bucket_cap_mb" in str(it.message)]


def test_a_real_link_is_measured_and_planned_for(run_ranks: RunRanks) -> None:
    for made, warned in run_ranks(3, by_itself):
        assert made is not None
        assert 0 < made.cost.seconds(SIZES[-1]) < 10
        assert made.planned.timeline.finish <= made.default.timeline.finish
        assert made.default.seconds > 0
        assert not warned


def test_alone_there_is_nothing_to_plan(run_ranks: RunRanks) -> None:
    assert run_ranks(1, by_itself) == [(None, [])]


def deterministic() -> tuple[BucketPlan | None, list[str]]:
    torch.use_deterministic_algorithms(True)
    return by_itself()


def test_deterministic_algorithms_fall_back_to_the_default_rule(run_ranks: RunRanks) -> None:
    for made, warned in run_ranks(2, deterministic, fresh=True):
        assert made is None
        assert len(warned) == 1
        assert "default rule" in warned[0]


def deterministic_on_one() -> str:
    torch.use_deterministic_algorithms(dist.get_rank() == 1)
    with pytest.raises((RankMismatchError, PeerFailureError)) as error:
        BucketDDP(deep(), bucket_cap_mb="auto")
    return str(error.value)


def test_ranks_that_differ_in_determinism_are_told(run_ranks: RunRanks) -> None:
    for text in run_ranks(2, deterministic_on_one, fresh=True):
        assert "indeterministic" in text


def interrupted() -> list[int]:
    with_plan(one_per_piece)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    buckets = train(ours, module, 2)

    def stop(grad: Tensor) -> None:
        raise ArithmeticError

    hook = ours.module[2].weight.register_hook(stop)
    loss = ours(torch.ones(1, 16)).sum()
    with pytest.raises(ArithmeticError), ours.backward_pass(loss):
        loss.backward()
    hook.remove()
    return buckets + train(ours, module, 2 * WATCHED_PASSES)


def test_a_pass_that_failed_everywhere_does_not_count(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, interrupted, fresh=True)
    assert first == second
    assert first[:TOLD] == [1] * TOLD
    assert first[TOLD] == 2 * LAYERS


def accumulated() -> list[int]:
    """Local passes neither count nor disturb."""
    with_plan(one_per_piece)
    ours = BucketDDP(deep(), bucket_cap_mb="auto")
    found = []
    for _ in range(TOLD + 1):
        ours.zero_grad()
        with ours.no_sync():
            ours(torch.ones(1, 16)).sum().backward()
        ours(torch.ones(1, 16)).sum().backward()
        record = ours.last_pass()
        assert record is not None
        found.append(len(record.buckets))
    return found


def test_local_passes_do_not_count(run_ranks: RunRanks) -> None:
    assert run_ranks(2, accumulated, fresh=True)[0] == [1] * TOLD + [2 * LAYERS]


def back_to_all(guarded: bool) -> list[str]:
    """A set that the ranks know, and that was never watched, comes when only last gradients are told of."""
    with_plan(one_per_piece)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")

    def freeze(frozen: bool) -> None:
        for it in (module, ours.module):
            for param in it[:3].parameters():
                param.requires_grad_(not frozen)

    train(ours, module, 1, guarded)
    freeze(True)
    train(ours, module, TOLD + WATCHED_PASSES + 1, guarded)
    assert not ours._reducer.hooks.everywhere
    freeze(False)
    train(ours, module, TOLD + WATCHED_PASSES + 1, guarded)
    plan = ours.bucket_plan
    assert plan is not None
    ready = [bucket.ready for bucket in plan.planned.timeline.buckets]
    assert ready[0] < ready[-1], "every gradient's time was taken"
    return [str(len(plan.planned.timeline.buckets)), *(str(names) for names in described(ours))]


@pytest.mark.parametrize("guarded", [False, True])
def test_a_known_set_that_was_never_watched(run_ranks: RunRanks, guarded: bool) -> None:
    first, second = run_ranks(2, back_to_all, guarded, fresh=True)
    assert first == second
    assert first[0] == str(2 * LAYERS)


def one_within_the_other() -> tuple[int, int, int]:
    """A plan for some of the parameters replaces that for all of them, and comes back where it is given up."""
    with_plan(one_per_piece)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    whole = train(ours, module, TOLD + WATCHED_PASSES + 1)[-1]
    for it in (module, ours.module):
        for param in it[:3].parameters():
            param.requires_grad_(False)
    with_plan(one)
    part = train(ours, module, TOLD + WATCHED_PASSES)[-1]
    plan = ours.bucket_plan
    assert plan is not None
    return whole, part, len(plan.planned.timeline.buckets)


def test_a_plan_for_some_parameters_is_not_bound_by_one_for_all(run_ranks: RunRanks) -> None:
    assert run_ranks(2, one_within_the_other, fresh=True) == [(2 * LAYERS, 1, 1)] * 2


def given_up_within() -> list[int]:
    with_plan(one_per_piece)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    train(ours, module, TOLD + WATCHED_PASSES + 1)
    for it in (module, ours.module):
        for param in it[:3].parameters():
            param.requires_grad_(False)
    with_plan(one, 1.0, 1.1)
    return train(ours, module, TOLD + WATCHED_PASSES)


def test_a_plan_for_some_that_is_given_up_leaves_the_one_for_all(run_ranks: RunRanks) -> None:
    for buckets in run_ranks(2, given_up_within, fresh=True):
        assert 1 in buckets, "it was tried"
        assert buckets[-1] == LAYERS


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16, sparse=True)
        self.body = deep()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.table(torch.arange(3)))


def sparse_phase() -> bool:
    with_plan(one_per_piece)
    torch.manual_seed(0)
    ours = BucketDDP(WithTable(), bucket_cap_mb="auto")
    for frozen in (False, True, False):
        ours.module.body.requires_grad_(not frozen)
        for _ in range(TOLD + 1):
            ours.zero_grad()
            ours(torch.ones(3, 16)).square().sum().backward()
    return ours.bucket_plan is not None


def test_a_phase_with_sparse_gradients_alone(run_ranks: RunRanks) -> None:
    assert run_ranks(2, sparse_phase, fresh=True) == [True, True]


def many_sets() -> int:
    """More sets than shape buckets."""
    with_plan(one_per_piece)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    train(ours, module, 1)
    for turn in range(10):
        for it in (module, ours.module):
            for at, layer in enumerate(it):
                layer.requires_grad_(bool((turn + 1) & (1 << at % 4)))
        train(ours, module, TOLD)
    return len(ours.layout.buckets)


def test_more_sets_than_are_planned_for(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, many_sets, fresh=True)
    assert first == second


def two_players() -> tuple[list[int], bool]:
    """Sets that take turns are planned each for itself."""
    with_plan(one_per_piece)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    buckets = []
    for turn in range(4 * WATCHED_PASSES + 6):
        for it in (module, ours.module):
            it[:2].requires_grad_(turn % 2 == 0)
            it[2:].requires_grad_(turn % 2 == 1)
        buckets += train(ours, module, 1)
    return buckets[-2:], not ours._reducer.hooks.everywhere


def test_sets_that_take_turns_have_their_plans(run_ranks: RunRanks) -> None:
    for buckets, few_hooks in run_ranks(2, two_players, fresh=True):
        assert buckets == [4, 2 * LAYERS - 4]
        assert few_hooks


def in_the_middle() -> None:
    """The new layout comes in a local pass, and what had accumulated moves along."""
    with_plan(one_per_piece)
    module = deep()
    ours = BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto")
    train(ours, module, TOLD)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in (ours, module):  # on top of the gradients of the last pass
        with ours.no_sync():
            model(x).square().sum().backward()
        model(2 * x).square().sum().backward()
    assert len(ours.layout.buckets) == 2 * LAYERS
    expected = mean_over_ranks(module)
    for name, param in ours.module.named_parameters():
        torch.testing.assert_close(param.grad, expected[name])


def test_a_plan_that_comes_in_the_middle_of_accumulation(run_ranks: RunRanks) -> None:
    run_ranks(2, in_the_middle, fresh=True)


def measured() -> tuple[float, float]:
    cost = measure_cost(Collectives(None), torch.device("cpu"))
    return cost.latency, cost.seconds_per_byte


def test_every_rank_measures_the_same_cost(run_ranks: RunRanks) -> None:
    costs = run_ranks(3, measured)
    assert costs == [costs[0]] * 3
    assert costs[0][0] + costs[0][1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": False}, "cannot be had"),
        ({"use_contiguous_buffers": False}, "cannot be had"),
        ({"comm_hook": "bf16"}, "either comm_hook or bucket_cap_mb"),
    ],
)
def test_what_cannot_be_planned_is_refused(run_ranks: RunRanks, options: dict[str, Any], message: str) -> None:
    run_ranks(1, refused, options, message)


def refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketDDP(deep(), bucket_cap_mb="auto", **options)


# -- arithmetic --------------------------------------------------------------------------------------


def test_a_pass_that_took_longer_than_simulated_corrects_the_cost() -> None:
    cost = CollectiveCost(1.0, 1.0)
    timeline = simulate([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], [1, 2, 3], cost)
    assert timeline.finish == 16
    corrected = calibrated(cost, timeline, 31.0)
    assert corrected.seconds(4) == pytest.approx(10.0, rel=1e-3)
    assert simulate([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], [1, 2, 3], corrected).finish == pytest.approx(31.0, rel=1e-3)


def test_a_pass_corrects_the_cost_by_a_factor_of_three_at_most() -> None:
    timeline = simulate([1.0], [4.0], [1], CollectiveCost(1.0, 1.0))
    assert calibrated(CollectiveCost(1.0, 1.0), timeline, 1000.0).latency == pytest.approx(3.0, rel=1e-3)


def test_a_pass_that_hides_everything_corrects_nothing() -> None:
    cost = CollectiveCost(1e-3, 1e-3)
    timeline = simulate([1.0, 100.0], [4.0, 4.0], [1, 2], cost)
    assert calibrated(cost, timeline, 101.0) is cost


def test_planned_ends_cut_where_they_are_and_nowhere_else() -> None:
    specs = [ParamSpec(str(at), (100,), (1,), torch.float32, "cpu") for at in range(6)]
    layout = plan(specs, [5, 4, 3, 2, 1, 0], bucket_cap_bytes=512, groups="aaaabb", ends={3, 0})
    assert [bucket.slots for bucket in layout.buckets] == [(5,), (4,), (3,), (2, 1, 0)]


def test_a_plan_speaks_for_itself() -> None:
    cost = CollectiveCost(0.0005, 4e-9)
    default = Candidate(simulate([0.01, 0.02], [2**20, 2**20], [1, 2], cost), 0.025)
    chosen = Candidate(simulate([0.01, 0.02], [2**20, 2**20], [2], cost), 0.024)
    text = str(BucketPlan(cost, default, chosen, None, "planned"))
    assert "0.50 ms" in text
    assert "2.00 Gbit" in text
    assert "1 bucket of 2.0 MiB (expected 28.9 ms a pass, measured 24.0 ms) rather than 2 buckets of 1.0 to" in text
    given_up = str(BucketPlan(cost, default, chosen, None, "default"))
    assert "measured 25.0 ms), those of the default rule, rather than 1 bucket" in given_up


def test_the_cost_and_the_line_go_to_the_logger_by_default(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, logged, fresh=True)
    assert len(first) == 1
    assert first[0].startswith('bucket_cap_mb="auto": an all-reduce costs')
    assert second == []


def logged() -> list[str]:
    with_plan(one)
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("lightning_bucketddp")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    train(BucketDDP(deep(), bucket_cap_mb="auto"), deep(), TOLD)
    return said


def misbelieved(latency: float, wire: float) -> list[int]:
    """A set-up that measured something else than the link."""
    real = wrapper.measure_cost

    def wrong(*arguments: Any) -> CollectiveCost:
        cost = real(*arguments)
        return CollectiveCost(cost.latency * latency, cost.seconds_per_byte * wire)

    wrapper.measure_cost = wrong
    module = deep()
    return train(BucketDDP(copy.deepcopy(module), bucket_cap_mb="auto"), module, 10)


@pytest.mark.parametrize(("latency", "wire"), [(0.1, 10.0), (10.0, 0.1), (0.0, 1.0), (1.0, 0.0)])
def test_gradients_are_right_whatever_is_believed_of_the_link(run_ranks: RunRanks, latency: float, wire: float) -> None:
    first, second = run_ranks(2, misbelieved, latency, wire, fresh=True)
    assert first == second
