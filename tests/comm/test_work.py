"""A collective as a sequence of stages: what starts when, what is waited for, and how it ends with an error."""

import time
from datetime import timedelta
from typing import Any

import pytest

from lightning_bucketddp.comm import work
from lightning_bucketddp.comm.work import Work


class Handle:
    """A collective that completes when the test says so, or in a wait without a timeout."""

    def __init__(self, name: str, log: list[str], error: str | None) -> None:
        self.name, self.log, self.error = name, log, error
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
    def __init__(self) -> None:
        self.log: list[str] = []
        self.handles: dict[str, Handle] = {}

    def start(self, name: str, error: str | None = None, **options: Any) -> Work:
        self.log.append(f"started {name}")
        handle = self.handles[name] = Handle(name, self.log, error)
        options = {"on_host": True, "left_behind": lambda why: self.log.append(f"left {name} behind: {why}"), **options}
        return Work(handle, lambda: self.log.append(f"finished {name}"), **options)

    def of(self, *names: str) -> Work:
        """A work of several stages; the first is started."""
        first = self.start(names[0])
        for name in names[1:]:
            first.then(lambda name=name: self.start(name))
        return first

    def started(self) -> list[str]:
        return [line.removeprefix("started ") for line in self.log if line.startswith("started")]


@pytest.fixture
def chain() -> Chain:
    return Chain()


def test_a_wait_runs_all_stages_once(chain: Chain) -> None:
    three = chain.of("a", "b", "c")
    assert not three.done()
    for _ in range(2):
        three.wait()
        assert chain.log == [f"{what} {name}" for name in "abc" for what in ("started", "waited for", "finished")]
        assert three.done()


def test_proceed_does_not_wait_for_the_last_stage(chain: Chain) -> None:
    three = chain.of("a", "b", "c")
    three.proceed()
    assert chain.log[-1] == "started c"
    assert not three.done()
    chain.handles["c"].completed = True
    assert three.done()


def test_stages_start_one_by_one(chain: Chain) -> None:
    two = chain.of("a", "b")
    assert two.start_next()
    assert chain.started() == ["a", "b"]
    assert not two.start_next()


def test_stages_of_a_stage_come_before_the_next(chain: Chain) -> None:
    chain.start("a").then(lambda: chain.of("b", "c")).then(lambda: chain.start("d")).wait()
    assert chain.started() == list("abcd")


def test_settle_finishes_completed_stages_on_the_host_alone(chain: Chain) -> None:
    on_host, on_device, several = chain.start("h"), chain.start("d", on_host=False), chain.of("a", "b")
    assert not any(each.settle() for each in (on_host, on_device, several))
    for name in "hda":
        chain.handles[name].completed = True
    assert [each.settle() for each in (on_host, on_device, several)] == [True, False, False]
    assert chain.log[3:] == ["waited for h", "finished h"], "settle starts nothing"


def test_proceed_waits_for_a_hook_that_sends_more(chain: Chain) -> None:
    chain.start("a", sends_more=True).proceed()
    assert chain.log == ["started a", "waited for a", "finished a"]


def test_a_failed_stage_leaves_its_own_group_behind(chain: Chain) -> None:
    three = chain.start("a").then(lambda: chain.start("b", "broken")).then(lambda: chain.start("c"))
    for _ in range(2):  # raised anew by every wait
        with pytest.raises(RuntimeError, match="broken"):
            three.wait()
    assert [line for line in chain.log if "behind" in line] == ["left b behind: broken"] * 2
    assert "finished b" not in chain.log
    assert chain.started() == ["a", "b"]


def test_a_wait_polls_on_the_host_alone(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "POLL_SECONDS", 0.01)
    polls: list[int] = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            raise KeyError("rank 1 failed")

    chain.start("d", on_host=False).wait(poll)
    assert not polls
    with pytest.raises(KeyError, match="rank 1 failed"):
        chain.start("h").wait(poll)
    assert chain.log[-1] == "left h behind: 'rank 1 failed'"
