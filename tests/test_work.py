"""A collective as a sequence of stages: what starts when, what is waited for, and how it ends with an error."""

import inspect
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bucketddp.comm import collectives, work
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.comm.work import Work

RunRanks = Callable[..., list[Any]]


class Handle:
    """A collective that completes when the test says so, or when a wait without a timeout makes it."""

    def __init__(self, name: str, log: list[str], error: str | None = None) -> None:
        self.name = name
        self.log = log
        self.error = error
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None and not self.completed:
            time.sleep(timeout.total_seconds())
            raise RuntimeError("the time is up")
        self.log.append(f"waited for {self.name}")
        if self.error is not None:
            raise RuntimeError(self.error)
        self.completed = True


class Chain:
    """Works whose handles and calls are noted."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.handles: dict[str, Handle] = {}

    def start(self, name: str, error: str | None = None, **options: Any) -> Work:
        self.log.append(f"started {name}")
        self.handles[name] = Handle(name, self.log, error)
        return Work(
            self.handles[name],
            lambda: self.log.append(f"finished {name}"),
            **{"on_host": True, "left_behind": lambda why: self.log.append(f"left {name} behind: {why}"), **options},
        )

    def of(self, *names: str, early: tuple[str, ...] = ()) -> Work:
        """A work of several stages; the first is started."""
        first = self.start(names[0])
        for name in names[1:]:
            first.then(lambda name=name: self.start(name), early=name in early)
        return first


def test_a_wait_runs_all_stages_one_after_the_other() -> None:
    chain = Chain()
    three = chain.of("a", "b", "c")
    assert not three.done()
    three.wait()
    steps = [f"{what} {name}" for name in "abc" for what in ("started", "waited for", "finished")]
    assert chain.log == steps
    assert three.done()
    three.wait()
    assert chain.log == steps, "a second wait has nothing to do"


def test_proceed_starts_the_last_stage_and_does_not_wait_for_it() -> None:
    chain = Chain()
    three = chain.of("a", "b", "c")
    three.proceed()
    assert chain.log[-1] == "started c"
    assert not three.done()
    chain.handles["c"].completed = True
    assert three.done()


def test_only_early_stages_start_without_a_wait_and_none_before_its_time() -> None:
    chain = Chain()
    three = chain.of("a", "b", "c", early=("b",))
    assert not three.try_proceed()
    assert chain.log == ["started a"]
    chain.handles["a"].completed = True
    assert three.try_proceed()
    assert chain.log[-1] == "started b"
    chain.handles["b"].completed = True
    assert three.try_proceed()
    assert chain.log[-1] == "started b", "c is not an early stage: its place is the end of backward"


def test_early_stages_of_all_buckets_come_before_the_first_late_one() -> None:
    chain = Chain()
    buckets = [chain.of(f"{name}1", f"{name}2", f"{name}3", early=(f"{name}2",)) for name in "ab"]
    for each in buckets:
        each.proceed(early_only=True)
    for each in buckets:
        each.proceed()
    started = [line.removeprefix("started ") for line in chain.log if line.startswith("started")]
    assert started == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_stages_of_a_stage_come_before_those_behind_it() -> None:
    chain = Chain()
    outer = chain.start("a").then(lambda: chain.of("b", "c")).then(lambda: chain.start("d"))
    outer.wait()
    assert [line for line in chain.log if line.startswith("started")] == [f"started {name}" for name in "abcd"]


@pytest.mark.parametrize("on_host", [True, False])
def test_settle_finishes_what_has_completed_on_the_host_alone(on_host: bool) -> None:
    chain = Chain()
    one = chain.start("a", on_host=on_host)
    assert not one.settle()
    chain.handles["a"].completed = True
    assert one.settle() is on_host
    assert ("finished a" in chain.log) is on_host
    several = chain.of("b", "c", early=("c",))
    chain.handles["b"].completed = True
    assert not several.settle()
    assert "started c" not in chain.log, "settle starts nothing"


def test_proceed_waits_for_a_collective_that_may_start_others() -> None:
    chain = Chain()
    chain.start("a", sends_more=True).proceed()
    assert chain.log == ["started a", "waited for a", "finished a"]


def test_a_stage_that_fails_leaves_its_own_group_behind_and_starts_nothing() -> None:
    chain = Chain()
    three = chain.start("a").then(lambda: chain.start("b", "broken")).then(lambda: chain.start("c"))
    for _ in range(2):  # raised anew by every wait
        with pytest.raises(RuntimeError, match="broken"):
            three.wait()
    assert [line for line in chain.log if "behind" in line] == ["left b behind: broken"] * 2
    assert "finished b" not in chain.log
    assert "started c" not in chain.log


@pytest.mark.parametrize("on_host", [True, False])
def test_a_wait_polls_while_the_host_waits_and_ends_with_what_poll_raises(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "POLL_SECONDS", 0.01)
    chain = Chain()
    one = chain.start("a", on_host=on_host)
    polls: list[int] = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            raise KeyError("rank 1 failed")

    if on_host:
        with pytest.raises(KeyError, match="rank 1 failed"):
            one.wait(poll)
        assert len(polls) == 3
        assert chain.log == ["started a", "left a behind: 'rank 1 failed'"]
    else:
        one.wait(poll)
        assert not polls


# -- what lies between its callers and torch.distributed ---------------------------------------------


def frames_of_comm(start: Callable[[], Work], name: str) -> int:
    """How many of the package's functions are on the stack when ``dist``'s function is called."""
    found: list[int] = []
    before = getattr(dist, name)

    def counting(*args: Any, **options: Any) -> Any:
        modules = [frame.frame.f_globals["__name__"] for frame in inspect.stack()]
        found.append(sum(module.startswith("lightning_bucketddp.") for module in modules))
        return before(*args, **options)

    setattr(dist, name, counting)
    try:
        start().wait()
    finally:
        setattr(dist, name, before)
    (frames,) = found
    return frames


def count_frames() -> dict[str, int]:
    group = Collectives(None)
    group.probe(torch.device("cpu"))
    shards = ShardGroups(group)
    exact, odd, gathered = torch.ones(8), torch.ones(7), collectives._ALL_GATHER
    cases: dict[str, tuple[Callable[[Tensor], Work], Tensor, str]] = {
        "all-reduce": (group.all_reduce_mean, exact, "all_reduce"),
        "all-reduce in bf16": (lambda it: group.all_reduce_mean(it, torch.bfloat16), exact, "all_to_all_single"),
        "reduce-scatter": (shards.reduce_scatter_mean, exact, "all_to_all_single"),
        "reduce-scatter, padded": (shards.reduce_scatter_mean, odd, "all_to_all_single"),
        "all-gather": (shards.gathering.all_gather_shards, exact, gathered),
    }
    found = {what: frames_of_comm(lambda s=start, f=flat: s(f), name) for what, (start, flat, name) in cases.items()}
    shards.end()
    return found


def test_at_most_two_frames_lie_between_a_caller_and_torch(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, count_frames):
        assert found == {
            "all-reduce": 1,
            "all-reduce in bf16": 1,
            "reduce-scatter": 2,
            "reduce-scatter, padded": 2,
            "all-gather": 1,
        }
