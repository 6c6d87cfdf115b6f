"""The stages of a reduction, and the lanes that run them."""

import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest

from lightning_bucketddp.comm import work
from lightning_bucketddp.comm.lane import Lane, ThreadLane
from lightning_bucketddp.comm.work import DirectWork, Stage, Stages, Work
from tests.reference import eventually


class Handle:
    """A collective that completes when the test says so, or in a wait without a timeout."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.error: str | None = None
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


class Reductions:
    """Reductions whose stages have names, and a log of what has happened to them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lanes: list[Lane] = []
        self._handles: dict[str, Handle] = {}

    def handle(self, name: str) -> Handle:
        return self._handles.setdefault(name, Handle(name, self.log))

    def complete(self, *names: str) -> None:
        for name in names:
            self.handle(name).completed = True

    def stages(self, *names: str) -> Stages:
        for name in names:
            self.log.append(f"started {name}")
            yield Stage(self.handle(name))
            self.log.append(f"finished {name}")

    def direct(self, *names: str, on_host: bool = True) -> Work:
        stages = self.stages(*names)
        return DirectWork(next(stages, None), stages, on_host, self.left_behind)

    def left_behind(self, why: str) -> None:
        self.log.append(f"left behind: {why}")

    def names(self, what: str = "started") -> list[str]:
        return [line.removeprefix(f"{what} ") for line in self.log if line.startswith(what)]


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reductions]:
    monkeypatch.setattr(work, "POLL_SECONDS", 0.01)
    reductions = Reductions()
    yield reductions
    reductions.lanes.clear()  # a thread that waits holds the log, hence the lanes


def threads(reductions: Reductions, starts_here: bool = False) -> Lane:
    reductions.lanes.append(ThreadLane(reductions.left_behind, starts_here))  # ends when it is dropped
    return reductions.lanes[-1]


def test_a_wait_runs_all_stages_once(reductions: Reductions) -> None:
    three = reductions.direct("a", "b", "c")
    assert not three.done()
    for _ in range(2):
        three.wait()
        assert reductions.log == [f"{what} {name}" for name in "abc" for what in ("started", "waited for", "finished")]
        assert three.done()


def test_a_reduction_of_nothing_is_done(reductions: Reductions) -> None:
    for nothing in (Work(), reductions.direct(), threads(reductions).run(reductions.stages())):
        nothing.wait()
        assert nothing.done()


def test_only_the_host_sees_a_collective_complete(reductions: Reductions) -> None:
    on_host, on_device = reductions.direct("h"), reductions.direct("d", on_host=False)
    reductions.complete("h", "d")
    assert (on_host.done(), on_device.done()) == (True, False), "an accelerator is not asked"


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_failed_stage_is_raised_by_every_wait(reductions: Reductions, in_thread: bool) -> None:
    reductions.handle("b").error = "broken"
    names = "a", "b", "c"
    reductions.complete("a", "b")
    three = threads(reductions).run(reductions.stages(*names)) if in_thread else reductions.direct(*names)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            three.wait()
    assert reductions.names("left behind:") == ["broken"] * 2
    assert reductions.names("finished") == ["a"]
    assert reductions.names() == ["a", "b"]


def test_a_wait_polls_on_the_host_alone(reductions: Reductions, monkeypatch: pytest.MonkeyPatch) -> None:
    give_up = Mock(side_effect=KeyError("rank 1 failed"))
    with work.polling(give_up):
        reductions.direct("d", on_host=False).wait()
    for run in (reductions.direct, lambda name: threads(reductions).run(reductions.stages(name))):
        poll = Mock(side_effect=[None, None, KeyError("rank 1 failed")])
        with pytest.raises(KeyError, match="rank 1 failed"), work.polling(poll):
            run("h").wait()
    assert reductions.names("left behind:") == ["'rank 1 failed'"] * 2
    monkeypatch.setattr(work, "AWAKE_SECONDS", 60)
    soon = reductions.direct("s")
    with patch.object(reductions.handle("s"), "is_completed", side_effect=[False, False, True, True]):
        with work.polling(give_up):
            soon.wait()  # stays awake until then


@pytest.mark.parametrize("starts_here", [False, True])
def test_threads_start_stages_in_order_and_finish_them(reductions: Reductions, starts_here: bool) -> None:
    lane = threads(reductions, starts_here)
    works = [lane.run(reductions.stages(*names)) for names in (("a1", "a2"), ("b1", "b2"), ("c1",))]
    eventually(lambda: reductions.names() == ["a1", "b1", "c1"])
    reductions.complete("b1")
    time.sleep(0.05)
    assert reductions.names() == ["a1", "b1", "c1"], "b waits for its turn"
    reductions.complete("a1", "a2")
    eventually(works[0].done)
    eventually(lambda: "started b2" in reductions.log)
    assert reductions.names() == ["a1", "b1", "c1", "a2", "b2"]
    assert not works[1].done()
    reductions.complete("b2", "c1")
    for each in works:
        each.wait()
        assert each.done()
    assert sorted(reductions.names("finished")) == ["a1", "a2", "b1", "b2", "c1"]


def test_after_an_error_threads_start_nothing(reductions: Reductions) -> None:
    reductions.handle("a").error = "broken"
    reductions.complete("a")
    lane = threads(reductions)
    first = lane.run(reductions.stages("a"))
    with pytest.raises(RuntimeError, match="broken"):
        first.wait()
    with pytest.raises(RuntimeError, match="broken"):
        lane.run(reductions.stages("b")).wait()
    assert reductions.names() == ["a"]


def test_an_error_before_the_first_collective_is_raised_where_it_starts(reductions: Reductions) -> None:
    def refuse() -> Stages:
        raise RuntimeError("no memory for this")
        yield

    with pytest.raises(RuntimeError, match="no memory"):
        threads(reductions, starts_here=True).run(refuse())
    with pytest.raises(RuntimeError, match="no memory"):
        threads(reductions).run(refuse()).wait()


def test_the_common_group_is_for_the_thread_that_trains(reductions: Reductions) -> None:
    lane = threads(reductions)
    lane.run(reductions.stages("a"))
    assert isinstance(lane.run(reductions.stages("b"), common=True), DirectWork)


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "bucketddp-lane"}


def test_threads_end_with_their_lane(reductions: Reductions) -> None:
    before, lane = lane_threads(), threads(reductions)
    taken = lane.run(reductions.stages("a", "b"))
    reductions.complete("a")
    eventually(lambda: "started b" in reductions.log)
    own = lane_threads() - before
    assert own
    del lane, reductions.lanes[:]
    gc.collect()
    eventually(lambda: not own & lane_threads())
    with pytest.raises(RuntimeError, match="closed"):
        taken.wait()


def test_threads_end_after_an_error_that_went_through_what_holds_the_lane(reductions: Reductions) -> None:
    before = lane_threads()
    reductions.handle("a").error = "broken"
    reductions.complete("a")

    def fail() -> None:
        lane = threads(reductions)
        with pytest.raises(RuntimeError, match="broken"):
            lane.run(reductions.stages("a")).wait()

    fail()
    own = lane_threads() - before
    assert own
    del reductions.lanes[:]

    def have_ended() -> bool:
        gc.collect()  # again: the thread may have held the lane while it handled the error
        return not own & lane_threads()

    eventually(have_ended)
