"""``bucket_cap_mb="auto"``: watches a few passes, plans the buckets that finish first, and keeps them if they do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.layout.plan import MAX_DEFAULT_BUCKET_BYTES, MIB, Layout, cut_by_size
from lightning_bucketddp.layout.schedule import CollectiveCost, Timeline, plan_for_unsure_cost, simulate
from lightning_bucketddp.reducer.link_cost import slowest
from lightning_bucketddp.reducer.ready_times import ReadyTimes

WATCHED_PASSES = 3
"""Passes with the default buckets whose times a plan is made from, and passes that buckets are tried for in a turn."""

TURNS = 3
"""How often candidates take turns: what else goes on in a machine changes more from one second to another than a
comparison may be wrong by. Of all passes with the same buckets the shortest counts, which was disturbed least."""

CLEARLY_WORSE = 1.15
"""How many times as long as the best of the others candidates take that get no further turn."""

MAX_PIECES = 512
"""Of how many pieces a plan is made at most: parameters that are small and follow each other count as one."""

HIDDEN = 1.03
"""Up to how many times the time of its backward a pass may take for its communication to count as hidden."""

MAX_CALIBRATION = 3.0
"""By which factor a pass may correct what the set-up measured. Part of what it shows is not the link's doing."""

WORSE = 1.02
"""How much longer than with the default buckets a pass may take for a plan to be kept; less is noise."""

MAX_TRIAL = 1.5
"""How many times as long as with the default buckets a pass is expected to take at most for buckets to be tried."""


@dataclass(frozen=True)
class Candidate:
    """Buckets that were considered.

    Attributes:
        timeline: A simulated pass with them.
        seconds: How long the shortest pass with them took: backward on the slowest rank, and what came after it on the
            rank that waited least, the others having been there too early. None as long as they have not been tried.
    """

    timeline: Timeline
    seconds: float | None = None

    def __str__(self) -> str:
        measured = "" if self.seconds is None else f", measured {self.seconds * 1e3:.1f} ms"
        return f"{_buckets(self.timeline)} (expected {self.timeline.finish * 1e3:.1f} ms a pass{measured})"


@dataclass(frozen=True)
class BucketPlan:
    """What ``bucket_cap_mb="auto"`` has found out and decided for one trainable set.

    Attributes:
        cost: What an all-reduce costs.
        default: The default buckets.
        planned: Those with which the last all-reduce should be through first.
        largest: Buckets of 25 MiB, which leave most of the processors to backward where communication needs them too;
            None if they are the same as others, or should take too long to be worth a try.
        chosen: Which of the three are in use, or will be unless another is found to be better.
    """

    cost: CollectiveCost
    default: Candidate
    planned: Candidate
    largest: Candidate | None
    chosen: Literal["default", "planned", "largest"]

    @property
    def candidates(self) -> dict[_Name, Candidate]:
        """Those that there are, by name."""
        found: dict[_Name, Candidate] = {"default": self.default, "planned": self.planned}
        return found if self.largest is None else {**found, "largest": self.largest}

    @property
    def in_use(self) -> Candidate:
        """The chosen buckets."""
        return self.candidates[self.chosen]

    def __str__(self) -> str:
        per_second = 8 / self.cost.seconds_per_byte / 1e9 if self.cost.seconds_per_byte else float("inf")
        link = f"an all-reduce costs {self.cost.latency * 1e3:.2f} ms and 1 s per {per_second:.2f} Gbit"
        others = [self.default]
        if self.planned.timeline.buckets != self.default.timeline.buckets:
            others.append(self.planned)
        if self.largest is not None:
            others.append(self.largest)
        if len(others) == 1:
            return f"{link}; the {_buckets(self.default.timeline)} of the default rule are as good as any"
        rejected = " or ".join(str(it) for it in others if it is not self.in_use)
        by_rule = ", those of the default rule," if self.chosen == "default" else ""
        return f"{link}; {self.in_use}{by_rule} rather than {rejected}"


def _buckets(timeline: Timeline) -> str:
    sizes = [bucket.nbytes / MIB for bucket in timeline.buckets]
    each = f" of {min(sizes):.1f} to {max(sizes):.1f} MiB" if len(sizes) > 1 else f" of {sizes[0]:.1f} MiB"
    return f"{len(sizes)} bucket{'s' if len(sizes) > 1 else ''}{each}"


_Name = Literal["default", "planned", "largest"]


class _Watched:
    """What is known of one trainable set."""

    def __init__(self, trainable: TrainableSet) -> None:
        self.trainable = trainable
        self.passes: list[ReadyTimes] = []
        self.plan: BucketPlan | None = None
        self.slots: frozenset[int] = frozenset()  # whose buckets are planned
        # Behind which of these slots buckets end, by candidate: as they were before (by the default rule, or a plan for
        # another set), and those to be tried.
        self.ends: dict[_Name, frozenset[int]] = {}
        self.turn = 0
        self.to_try: list[_Name] = []  # in this turn; the first is being tried
        self.decided = False


class Planner:
    """Watches passes and plans buckets; what it decides is the same on every rank.

    Args:
        slots: The slots, which are told where buckets end.
        collectives: The group.
        cost: What an all-reduce costs, as measured at set-up; None if nothing is to be planned.
        turns: How often candidates are tried.

    Attributes:
        last: The plan that was made or judged last.
        news: The same if it was decided on in the last pass, for good.
    """

    def __init__(
        self, slots: SlotTable, collectives: Collectives, cost: CollectiveCost | None, turns: int | None = None
    ) -> None:
        self._turns = TURNS if turns is None else turns
        self._slots = slots
        self._collectives = collectives
        self._cost = cost
        self._watched: dict[TrainableSet, _Watched] = {}
        self._present: _Watched | None = None
        self._times: ReadyTimes | None = None
        self.last: BucketPlan | None = None
        self.news: BucketPlan | None = None

    @property
    def watching(self) -> bool:
        """Whether the present pass is watched."""
        return self._times is not None

    def will_watch(self, trainable: TrainableSet) -> bool:
        """Whether the next synchronised pass is to be watched, if it is one of a trainable set."""
        # Sets that shape no buckets share theirs with others.
        if self._cost is None or not self._slots.shapes_buckets(trainable):
            return False
        watched = self._watched.get(trainable)
        return watched is None or not watched.decided

    def begin(self, trainable: TrainableSet, learning: bool, device: torch.device) -> None:
        """A synchronised pass begins.

        Args:
            trainable: The set that was trainable since the last reduction.
            learning: Whether the order of readiness is not known yet.
            device: Where the gradients are.
        """
        self._times = self._present = None
        if not learning and self.will_watch(trainable):
            self._present = self._watched.setdefault(trainable, _Watched(trainable))
            self._times = ReadyTimes(device)

    def busy(self) -> bool:
        """Whether more passes with the present trainable set are to be watched."""
        return self._present is not None and not self._present.decided

    def ready(self, slot: int) -> None:
        """The gradient of a slot is ready."""
        if self._times is not None:
            self._times.ready(slot)

    def backward_ended(self) -> None:
        """The backward of the present pass has ended."""
        if self._times is not None:
            self._times.backward_ended()

    def start_again(self) -> None:
        """The pass has failed on every rank: it does not count."""
        self._times = None

    def finish(self, layout: Layout, device: torch.device, on_idle: Callable[[], None]) -> bool:
        """The present pass has ended. All ranks must call this.

        Args:
            layout: The layout of the pass.
            device: The device whose tensors travel.
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.

        Returns:
            Whether buckets are to be laid out anew.
        """
        self.news = None
        watched, times, self._times = self._present, self._times, None
        if watched is None or times is None:
            return False
        times.finished()
        watched.passes.append(times)
        if len(watched.passes) < WATCHED_PASSES:
            return False
        passes, watched.passes = watched.passes, []
        if watched.plan is None:
            again = self._plan(watched, passes, layout, device, on_idle)
        else:
            again = self._judge(watched, watched.plan, passes, device, on_idle)
        self.news = self.last if watched.decided else None
        return again

    def _plan(
        self,
        watched: _Watched,
        passes: list[ReadyTimes],
        layout: Layout,
        device: torch.device,
        on_idle: Callable[[], None],
    ) -> bool:
        assert self._cost is not None
        count = len(self._slots)
        found = [times.seconds() for times in passes]
        mine = [_median([seconds[slot] for seconds in found if slot in seconds]) for slot in range(count)]
        backward, after = _ends_of(passes)
        middle = [_median(backward), _median(after)]
        both = slowest(self._collectives, mine + middle + backward + after, device, on_idle)
        ready, (backward_end, not_exposed), ends = both[:count], both[count : count + 2], both[count + 2 :]
        ready = [backward_end if at < 0 else at for at in ready]
        seconds = backward_end - not_exposed

        members = [bucket.slots for bucket in layout.buckets if self._slots.is_in(bucket.slots[0], watched.trainable)]
        cost = calibrated(self._cost, _simulated(members, ready, layout, self._cost, backward_end), seconds)
        runs = self._slots.runs_of(watched.trainable)
        watched.slots = frozenset(slot for run in runs for slot in run)
        by_size = frozenset(slot for run in runs for slot in _ends_by_size(run, layout))

        def candidate(ends: frozenset[int]) -> Candidate:
            cut = [piece for run in runs for piece in _cut(run, ends)]
            rest = [slots for slots in members if not watched.slots & set(slots)]
            position = {slot: at for at, slot in enumerate(slot for slots in members for slot in slots)}
            buckets = sorted([*cut, *rest], key=lambda slots: position[slots[-1]])
            return Candidate(_simulated(buckets, ready, layout, cost, backward_end))

        default = Candidate(_simulated(members, ready, layout, cost, backward_end), _shortest(ends))
        decided = torch.zeros(count + 1, dtype=torch.int64)  # ends of the plan, and whether to try the largest buckets
        if self._collectives.rank == 0:
            for run in runs:
                for slot in _planned_ends(run, members, ready, layout, cost):
                    decided[slot] = 1
            decided[count] = candidate(by_size).timeline.finish <= default.timeline.finish * MAX_TRIAL
        decided = decided.to(device)
        self._collectives.broadcast(decided).wait(on_idle)
        *flags, try_largest = decided.tolist()
        chosen = frozenset(slot for slot, flag in enumerate(flags) if flag)
        ends_now = frozenset(slots[-1] for slots in members) & watched.slots
        watched.ends = {"default": self._slots.bucket_ends & watched.slots, "planned": chosen, "largest": by_size}
        if chosen != ends_now:
            watched.to_try.append("planned")
        if try_largest and by_size not in (chosen, ends_now):
            watched.to_try.append("largest")
        largest = candidate(by_size) if "largest" in watched.to_try else None
        tried = watched.to_try[0] if watched.to_try else "default"
        watched.plan = self.last = BucketPlan(cost, default, candidate(chosen), largest, tried)
        return self._use(watched, tried)

    def _use(self, watched: _Watched, name: _Name) -> bool:
        """Lets buckets end as in a candidate; returns whether that is a change."""
        before = self._slots.bucket_ends
        self._slots.bucket_ends = before - watched.slots | watched.ends[name]
        watched.decided = not watched.to_try
        return self._slots.bucket_ends != before

    def _judge(
        self,
        watched: _Watched,
        plan: BucketPlan,
        passes: list[ReadyTimes],
        device: torch.device,
        on_idle: Callable[[], None],
    ) -> bool:
        backward, after = _ends_of(passes)
        seconds = _shortest(slowest(self._collectives, backward + after, device, on_idle))  # the same on every rank
        tried = watched.to_try.pop(0)
        before = plan.candidates[tried]
        found = replace(before, seconds=seconds if before.seconds is None else min(seconds, before.seconds))
        plan = replace(plan, **{tried: found})  # type: ignore[arg-type]
        if not watched.to_try:
            watched.turn += 1
            contenders = _contenders(plan)
            if watched.turn < self._turns and len(contenders) > 1:
                watched.to_try = contenders
        plan = replace(plan, chosen=watched.to_try[0] if watched.to_try else _best_of(plan))
        watched.plan = self.last = plan
        return self._use(watched, plan.chosen)


def _best_of(plan: BucketPlan) -> _Name:
    """Whose passes were shortest, where the difference is more than noise."""
    assert plan.default.seconds is not None
    best: _Name = "default"
    least = plan.default.seconds
    if plan.planned.seconds is not None and plan.planned.seconds <= least * WORSE:
        best, least = "planned", plan.planned.seconds
    if plan.largest is not None and plan.largest.seconds is not None and plan.largest.seconds * WORSE < least:
        best = "largest"
    return best


def _contenders(plan: BucketPlan) -> list[_Name]:
    """The candidates that have been tried and may be the best."""
    seconds = {name: it.seconds for name, it in plan.candidates.items() if it.seconds is not None}
    least = min(seconds.values())
    return [name for name, taken in seconds.items() if taken <= least * CLEARLY_WORSE]


def _ends_of(passes: list[ReadyTimes]) -> tuple[list[float], list[float]]:
    """When backward had ended in each pass, and what the pass took after that, negated.

    The largest of the negated is the least: a rank that is there before the others waits for them, not for the wire.
    """
    backward = [times.seconds_of_backward() for times in passes]
    after = [times.seconds_of_pass() - end for times, end in zip(passes, backward, strict=True)]
    return backward, [-seconds for seconds in after]


def _shortest(ends: Sequence[float]) -> float:
    """How long the shortest pass took, by what :func:`_ends_of` gives, of all ranks together."""
    half = len(ends) // 2
    return min(backward - after for backward, after in zip(ends[:half], ends[half:], strict=True))


def calibrated(cost: CollectiveCost, simulated: Timeline, seconds: float) -> CollectiveCost:
    """The cost that explains how long a pass took, where communication was what it took long for.

    Where all of it was hidden a pass tells little about its cost.

    Args:
        cost: What was measured otherwise.
        simulated: The pass as it should have been.
        seconds: How long it took.
    """
    if seconds <= simulated.backward_end * HIDDEN:
        return cost
    ready = [bucket.ready for bucket in simulated.buckets]
    nbytes = [bucket.nbytes for bucket in simulated.buckets]
    each = range(1, len(ready) + 1)
    low, high = 1 / MAX_CALIBRATION, MAX_CALIBRATION
    for _ in range(30):
        factor = (low * high) ** 0.5
        if simulate(ready, nbytes, each, cost.scaled(factor)).finish < seconds:
            low = factor
        else:
            high = factor
    return cost.scaled((low * high) ** 0.5)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else -1.0


def _nbytes(slots: Sequence[int], layout: Layout) -> int:
    return sum(layout.slots[slot].spec.nbytes for slot in slots)


def _simulated(
    members: Sequence[Sequence[int]],
    ready: Sequence[float],
    layout: Layout,
    cost: CollectiveCost,
    backward_end: float,
) -> Timeline:
    """A pass with the given buckets."""
    at = [max(ready[slot] for slot in slots) for slots in members]
    sizes = [_nbytes(slots, layout) for slots in members]
    return simulate(at, sizes, range(1, len(members) + 1), cost, backward_end)


def _ends_by_size(run: Sequence[int], layout: Layout) -> list[int]:
    """The slots of a run, in launch order, behind which a bucket ends if buckets are as large as they may be."""
    sizes = [layout.slots[slot].spec.nbytes for slot in run]
    return [run[stop - 1] for _, stop in cut_by_size(sizes, MAX_DEFAULT_BUCKET_BYTES)]


def _planned_ends(
    run: Sequence[int],
    members: Sequence[Sequence[int]],
    ready: Sequence[float],
    layout: Layout,
    cost: CollectiveCost,
) -> list[int]:
    """The slots of a run, in launch order, behind which a bucket should end."""
    ends_now = {slots[-1] for slots in members}
    pieces = _pieces(run, ends_now, layout)
    times = list(accumulate((max(ready[slot] for slot in piece) for piece in pieces), max))
    sizes = [_nbytes(piece, layout) for piece in pieces]
    fallback = [at for at, piece in enumerate(pieces, 1) if piece[-1] in ends_now]
    boundaries = plan_for_unsure_cost(times, sizes, cost, fallback)
    return [pieces[at - 1][-1] for at in boundaries]


def _pieces(run: Sequence[int], ends: set[int], layout: Layout) -> list[list[int]]:
    """Cuts a run into pieces of equal size at most, as fine as is worth it, and behind each of ``ends``."""
    largest = _nbytes(run, layout) / MAX_PIECES
    pieces: list[list[int]] = [[]]
    held = 0
    for slot in run:
        size = layout.slots[slot].spec.nbytes
        if pieces[-1] and (pieces[-1][-1] in ends or held + size > largest):
            pieces.append([])
            held = 0
        pieces[-1].append(slot)
        held += size
    return pieces


def _cut(run: Sequence[int], ends: frozenset[int]) -> list[tuple[int, ...]]:
    cut: list[list[int]] = [[]]
    for slot in run:
        cut[-1].append(slot)
        if slot in ends:
            cut.append([])
    return [tuple(slots) for slots in cut if slots]
