"""A collective as a sequence of stages, and the thread that carries collectives on while backward runs."""

import gc
import threading
import time
from datetime import timedelta
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lightning_bucketddp.comm import work
from lightning_bucketddp.comm.stage_thread import StageThread
from lightning_bucketddp.comm.work import Work
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


class Chain:
    def __init__(self) -> None:
        self.log: list[str] = []
        self._handles: dict[str, Handle] = {}

    def _handle(self, name: str) -> Handle:
        return self._handles.setdefault(name, Handle(name, self.log))

    def complete(self, *names: str) -> None:
        for name in names:
            self._handle(name).completed = True

    def start(self, name: str, error: str | None = None, **options: Any) -> Work:
        self.log.append(f"started {name}")
        handle = self._handle(name)
        handle.error = error
        options = {"on_host": True, "left_behind": lambda why: self.log.append(f"left {name} behind: {why}"), **options}
        return Work(handle, lambda: self.log.append(f"finished {name}"), **options)

    def of(self, *names: str) -> Work:
        """A work of several stages; the first is started."""
        first = self.start(names[0])
        for name in names[1:]:
            first.then(lambda name=name: self.start(name))
        return first

    def names(self, what: str = "started") -> list[str]:
        return [line.removeprefix(f"{what} ") for line in self.log if line.startswith(what)]


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Chain:
    monkeypatch.setattr(work, "POLL_SECONDS", 0.01)
    return Chain()


def test_a_wait_runs_all_stages_once(chain: Chain) -> None:
    three = chain.of("a", "b", "c")
    assert not three.done()
    for _ in range(2):
        three.wait()
        assert chain.log == [f"{what} {name}" for name in "abc" for what in ("started", "waited for", "finished")]
        assert three.done()


def test_stages_start_one_by_one_and_the_last_is_not_waited_for(chain: Chain) -> None:
    two, three = chain.of("h", "i"), chain.of("a", "b", "c")
    assert two.start_next()
    assert chain.names() == ["h", "a", "i"]
    assert not two.start_next()
    three.proceed()
    assert chain.log[-1] == "started c"
    assert not three.done()
    chain.complete("c")
    assert three.done()
    chain.start("d", sends_more=True).proceed()  # a hook whose collectives must be started in order
    assert chain.log[-3:] == ["started d", "waited for d", "finished d"]


def test_stages_of_a_stage_come_before_the_next(chain: Chain) -> None:
    chain.start("a").then(lambda: chain.of("b", "c")).then(lambda: chain.start("d")).wait()
    assert chain.names() == list("abcd")


def test_settle_finishes_completed_stages_on_the_host_alone(chain: Chain) -> None:
    works = [chain.start("h"), chain.start("d", on_host=False), chain.of("a", "b"), chain.start("e", "broken")]
    assert not any(each.settle() for each in works)
    chain.complete(*"hdae")
    assert [each.settle() for each in works] == [True, False, False, False]
    assert chain.names("finished") == ["h"]
    assert chain.names() == list("hdae"), "settle starts nothing"
    with pytest.raises(RuntimeError, match="broken"):
        works[-1].wait()


def test_a_failed_stage_leaves_its_own_group_behind(chain: Chain) -> None:
    three = chain.start("a").then(lambda: chain.start("b", "broken")).then(lambda: chain.start("c"))
    for _ in range(2):  # raised anew by every wait
        with pytest.raises(RuntimeError, match="broken"):
            three.wait()
    assert chain.names("left") == ["b behind: broken"] * 2
    assert chain.names("finished") == ["a"]
    assert chain.names() == ["a", "b"]


def test_a_wait_polls_on_the_host_alone(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    give_up = Mock(side_effect=KeyError("rank 1 failed"))
    chain.start("d", on_host=False).wait(give_up)
    stages = StageThread()
    for work_of in (chain.start, lambda name: stages.take(chain.start(name))):
        with pytest.raises(KeyError, match="rank 1 failed"):
            work_of("h").wait(Mock(side_effect=[None, None, KeyError("rank 1 failed")]))
    assert chain.names("left") == ["h behind: 'rank 1 failed'"] * 2
    monkeypatch.setattr(work, "AWAKE_SECONDS", 60)
    soon = chain.start("s")
    with patch.object(chain._handle("s"), "is_completed", side_effect=[False, False, True, True]):
        soon.wait(give_up)  # stays awake until then


def test_the_thread_starts_stages_in_order_and_ends_them(chain: Chain) -> None:
    stages = StageThread()
    taken = [stages.take(it) for it in (chain.of("a1", "a2"), chain.of("b1", "b2"), chain.start("c"))]
    chain.complete("b1")
    eventually(lambda: chain.names() == ["a1", "b1", "c"])
    time.sleep(0.05)  # in which b2 would start
    assert chain.names() == ["a1", "b1", "c"], "b waits for its turn"
    chain.complete("a1", "a2")
    eventually(lambda: "finished a2" in chain.log and "started b2" in chain.log)
    assert chain.names() == ["a1", "b1", "c", "a2", "b2"]
    assert not any(each.done() for each in taken)
    chain.complete("b2", "c")
    eventually(lambda: "finished c" in chain.log)
    for each in taken:
        each.wait()
        assert each.done()
    assert sorted(chain.names("finished")) == ["a1", "a2", "b1", "b2", "c"]


@pytest.mark.parametrize("errors", [("broken", None), (None, "broken")])
def test_an_error_in_the_thread_is_raised_by_the_wait(chain: Chain, errors: tuple[str | None, str | None]) -> None:
    stages = StageThread()
    taken = stages.take(chain.start("a", errors[0]).then(lambda: chain.start("b", errors[1])))
    chain.complete("a", "b")
    with pytest.raises(RuntimeError, match="broken"):
        taken.wait()


def test_after_an_error_the_thread_starts_nothing(chain: Chain) -> None:
    stages = StageThread()
    taken = [stages.take(it) for it in (chain.start("a", "broken"), Work().then(lambda: chain.start("b")))]
    chain.complete("a")
    for each in taken:
        with pytest.raises(RuntimeError, match="broken"):
            each.wait()
    assert chain.names() == ["a"]


def test_the_thread_ends_with_its_owner(chain: Chain) -> None:
    before, stages = {*threading.enumerate()}, StageThread()
    taken = stages.take(chain.of("a", "b"))
    (own,) = {*threading.enumerate()} - before
    del stages
    gc.collect()
    eventually(lambda: not own.is_alive())
    with pytest.raises(RuntimeError, match="closed"):
        taken.wait()
