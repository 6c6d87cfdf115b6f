"""The thread that carries collectives on while backward runs."""

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from lightning_bucketddp.comm import work
from lightning_bucketddp.comm.stage_thread import StageThread
from lightning_bucketddp.comm.work import Work

NAME = "bucketddp-stages"


class Handle:
    """A collective that completes when the test says so."""

    def __init__(self, error: str | None = None) -> None:
        self.completed, self._error = threading.Event(), error

    def is_completed(self) -> bool:
        return self.completed.is_set()

    def wait(self, timeout: timedelta = timedelta(seconds=20)) -> None:
        if not self.completed.wait(timeout.total_seconds()):
            raise RuntimeError("the time is up")
        if self._error is not None:
            raise RuntimeError(self._error)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def log() -> list[str]:
    return []


def two_stages(log: list[str], name: str, first: Handle, second: Handle) -> Work:
    def start() -> Work:
        log.append(f"{name} second, {threading.current_thread().name}")
        return Work(second, lambda: log.append(f"{name} ended, {threading.current_thread().name}"), on_host=True)

    return Work(first, on_host=True).then(start)


def test_second_stages_start_in_order_and_end_unasked(log: list[str]) -> None:
    stages, handles = StageThread(), {name: (Handle(), Handle()) for name in "abc"}
    taken = [stages.take(two_stages(log, name, *pair)) for name, pair in handles.items()]
    handles["b"][0].completed.set()
    time.sleep(0.05)
    assert log == [], "b waits for its turn"
    handles["a"][0].completed.set()
    handles["a"][1].completed.set()
    eventually(lambda: len(log) == 3)
    assert log[0] == f"a second, {NAME}"
    assert sorted(log[1:]) == [f"a ended, {NAME}", f"b second, {NAME}"]
    assert not any(each.done() for each in taken)
    for handle in (*handles["b"], *handles["c"]):
        handle.completed.set()
    for each in taken:
        each.wait()
        assert each.done()
    assert [line[:8] for line in log if "second" in line] == ["a second", "b second", "c second"]
    assert sorted(line[:7] for line in log if "ended" in line) == ["a ended", "b ended", "c ended"]


def test_an_error_of_either_stage_is_raised_by_the_wait(log: list[str]) -> None:
    stages = StageThread()
    for error_at in (0, 1):
        pair = [Handle("broken" if stage == error_at else None) for stage in (0, 1)]
        taken = stages.take(two_stages(log, "a", *pair))
        for handle in pair:
            handle.completed.set()
        with pytest.raises(RuntimeError, match="broken"):
            taken.wait()


def test_a_wait_that_is_given_up_leaves_the_group_behind(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "POLL_SECONDS", 0.01)

    def give_up() -> None:
        raise KeyError("rank 1 failed")

    stages, handle = StageThread(), Handle()
    taken = stages.take(Work(handle, on_host=True, left_behind=log.append))
    with pytest.raises(KeyError, match="rank 1 failed"):
        taken.wait(give_up)
    assert log == ["'rank 1 failed'"]
    handle.completed.set()


def test_the_thread_ends_with_its_owner(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "POLL_SECONDS", 0.01)
    before, stages = threads(), StageThread()
    taken = stages.take(two_stages(log, "never completes", Handle(), Handle()))
    (own,) = set(threads()) - set(before)
    del stages
    gc.collect()
    eventually(lambda: own not in threads())
    with pytest.raises(RuntimeError, match="closed"):
        taken.wait()
