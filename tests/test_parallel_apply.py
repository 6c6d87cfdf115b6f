"""Modules are called at the same time as if the caller had called them; errors reach the caller."""

import contextvars
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bucketddp.replicas import apply as parallel_apply_file
from lightning_bucketddp.replicas.replicas import parallel_apply

COLOUR = contextvars.ContextVar("COLOUR", default="none")


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def each(count: int, function: Callable[..., Any]) -> list[nn.Module]:
    return [Calls(function) for _ in range(count)]


CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # the CPU too, but another device to compare with


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps ``OTHER`` from being taken for ``CPU``."""
    monkeypatch.setattr("lightning_bucketddp.replicas.apply.as_device", torch.device)


def test_arguments_reach_their_modules_and_results_come_in_order() -> None:
    modules = each(3, lambda *args, **kwargs: (args, kwargs))
    found = parallel_apply(modules, [(1, 2), [3], 4], [{"a": 1}, {}, {"b": 2}], ["cpu"] * 3)
    assert found == [((1, 2), {"a": 1}), ((3,), {}), ((4,), {"b": 2})]
    assert parallel_apply([], []) == []


def test_modules_run_at_the_same_time_in_threads_that_end() -> None:
    before = threading.enumerate()
    barrier = threading.Barrier(3, timeout=30)

    def meet(index: int) -> int:
        barrier.wait()
        return threading.get_ident()

    found = parallel_apply(each(3, meet), [0, 1, 2])
    assert len(set(found)) == 3
    assert found[0] == threading.get_ident(), "the first runs in the caller's thread"
    assert threading.enumerate() == before


def test_each_thread_is_told_how_many_threads_its_operations_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's own count cannot be seen: asking torch for it sets it."""
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: told.append((threading.current_thread().name, count)))
    parallel_apply(each(3, int), [0, 1, 2])
    assert [count for _, count in told] == [torch.get_num_threads()] * 2
    assert all(name.startswith("replica_") for name, _ in told)


def test_an_interrupt_is_raised_when_all_threads_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    join, interrupted = threading.Thread.join, []

    def interrupted_once(self: threading.Thread, *args: Any) -> None:
        if not interrupted:
            interrupted.append(self.name)
            raise KeyboardInterrupt
        join(self, *args)

    monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    may_end = threading.Event()
    threading.Timer(0.2, may_end.set).start()
    with pytest.raises(KeyboardInterrupt):
        parallel_apply(each(3, lambda index: index == 0 or may_end.wait(30)), [0, 1, 2])
    assert len(interrupted) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica_")]


def test_a_call_that_failed_keeps_nothing_alive() -> None:
    held: list[weakref.ref[Any]] = []

    def one(index: int) -> Any:
        mine = nn.Linear(1, 1)
        held.append(weakref.ref(mine))
        if index == 1:
            raise ArithmeticError
        return mine

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ArithmeticError) as caught:
            parallel_apply(each(3, one), [0, 1, 2])
        while_it_is_looked_at = sum(ref() is not None for ref in held)
        del caught
        gone = [ref() is None for ref in held]
    finally:
        gc.enable()
    assert while_it_is_looked_at == 1, "what the one that raised had, in its own frame"
    assert gone == [True] * 3


def told_of_state() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(1).device,
        "dtype": torch.empty(1).dtype,
        "colour": COLOUR.get(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.mark.parametrize(
    "context",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_the_callers_state_holds_in_every_thread(context: Callable[[], AbstractContextManager[Any]]) -> None:
    token, dtype = COLOUR.set("blue"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with context():
            expected = told_of_state()
            found = parallel_apply(each(3, told_of_state), [()] * 3)
        assert found == [expected] * 3
        after = parallel_apply(each(3, told_of_state), [()] * 3)
        assert after == [told_of_state()] * 3, "threads leave nothing behind"
    finally:
        torch.set_default_dtype(dtype)
        COLOUR.reset(token)


class OwnError(Exception):
    """With a constructor that cannot be called with a message alone."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


def test_the_first_replicas_error_comes_with_its_own_traceback_after_all_have_ended() -> None:
    before = threading.enumerate()
    second_failed = threading.Event()
    ended = []

    def the_line_that_fails(index: int) -> int:
        if index == 1:
            assert second_failed.wait(30)
            raise OwnError(7, "odd")
        if index == 2:
            second_failed.set()
            raise ArithmeticError("earlier in time, later in place")
        ended.append(index)
        return index

    with pytest.raises(OwnError) as caught:
        parallel_apply(each(4, the_line_that_fails), [0, 1, 2, 3], devices=["cpu"] * 4)
    assert sorted(ended) == [0, 3], "the others were waited for"
    assert threading.enumerate() == before, "a thread is left"
    assert caught.value.code == 7
    assert "the_line_that_fails" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "raised in replica 1 on cpu" in "".join(traceback.format_exception(caught.value))


def test_an_error_in_the_callers_own_replica_waits_for_the_others() -> None:
    begun, ended = threading.Event(), []

    def run(index: int) -> None:
        if index == 0:
            assert begun.wait(30)
            raise KeyboardInterrupt
        begun.set()
        ended.append(index)

    with pytest.raises(KeyboardInterrupt) as caught:
        parallel_apply(each(2, run), [0, 1])
    assert ended == [1]
    assert getattr(caught.value, "__notes__", ["raised in replica 0 on cpu"]) == ["raised in replica 0 on cpu"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": [1]}, "inputs for each of the 2 modules, found 1"),
        ({"inputs": [1, 2], "kwargs": [{}]}, "kwargs for each of the 2 modules, found 1"),
        ({"inputs": [1, 2], "devices": ["cpu"] * 3}, "devices for each of the 2 modules, found 3"),
    ],
)
def test_counts_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel_apply(each(2, lambda value: value), **given)


def test_a_tensor_is_one_argument_and_not_many() -> None:
    def shape(x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    assert parallel_apply(each(2, shape), list(torch.ones(2, 3, 4))) == [(3, 4)] * 2


def fails_in_the_third(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Has the third replica's thread not start, or fail before the replica is called."""
    start = threading.Thread.start

    def start_two(self: threading.Thread) -> None:
        if self.name == "replica_1":
            raise RuntimeError("can't start new thread")
        start(self)

    def set_in_two(count: int) -> None:
        if threading.current_thread().name == "replica_1":
            raise RuntimeError("can't set threads")

    @contextmanager
    def place_two(*args: Any) -> Iterator[None]:
        if threading.current_thread().name == "replica_1":
            raise RuntimeError("can't place")
        yield

    if what == "start":
        monkeypatch.setattr(threading.Thread, "start", start_two)
    elif what == "place":
        monkeypatch.setattr(parallel_apply_file._CallerState, "entered", place_two)
    else:
        monkeypatch.setattr(torch, "set_num_threads", set_in_two)


@pytest.mark.parametrize("what", ["start", "set", "place"])
def test_a_thread_that_cannot_run_its_module_is_an_error_when_the_others_have_ended(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    fails_in_the_third(monkeypatch, what)
    called: list[int] = []
    with pytest.raises(RuntimeError, match=f"can't {what}") as caught:
        parallel_apply(each(4, lambda index: (time.sleep(0.1), called.append(index))), [0, 1, 2, 3])
    assert what == "start" or len(called) < 4
    assert ("raised in replica" in " ".join(getattr(caught.value, "__notes__", ()))) == (what != "start")
    monkeypatch.undo()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica_")]


# -- a thread per device -----------------------------------------------------------------------------


def test_modules_of_the_first_device_run_in_the_callers_thread_and_those_of_another_beside_them(
    other_device: None,
) -> None:
    beside = threading.Barrier(2, timeout=30)
    order: list[int] = []

    def run(index: int) -> tuple[int, int]:
        beside.wait()  # the first of both devices, then the second of both
        order.append(index)
        return index, threading.get_ident()

    found = parallel_apply(each(4, run), [0, 1, 2, 3], devices=[CPU, OTHER, CPU, OTHER], thread_per_device=True)
    assert [index for index, _ in found] == [0, 1, 2, 3]
    threads = [thread for _, thread in found]
    assert threads[0] == threads[2] == threading.get_ident()
    assert threads[1] == threads[3] != threading.get_ident()
    assert sorted(order[:2]) == [0, 1]


def test_one_device_needs_no_thread_and_modes_of_the_caller_hold_for_all_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    weight = torch.ones(2, requires_grad=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = parallel_apply(each(3, weight.pow), [2, 2, 2], devices=["cpu"] * 3, thread_per_device=True)
    assert len(outputs) == len(saved) == 3


@pytest.mark.parametrize(("raising", "called"), [({0}, {0, 1, 3}), ({1}, {0, 1, 2}), ({2, 3}, {0, 1, 2, 3})])
def test_a_module_that_raises_ends_its_device_and_the_first_by_place_reaches_the_caller(
    raising: set[int], called: set[int], other_device: None
) -> None:
    seen: set[int] = set()

    def run(index: int) -> None:
        seen.add(index)
        if index in raising:
            raise ArithmeticError(f"in {index}")

    with pytest.raises(ArithmeticError, match=f"in {min(raising)}"):
        parallel_apply(each(4, run), [0, 1, 2, 3], devices=[CPU, OTHER, CPU, OTHER], thread_per_device=True)
    assert seen == called


# -- a thread's state --------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_an_error_on_leaving_a_threads_state_reaches_the_caller_but_for_the_modules_own(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    class Leaves:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            raise OSError("cannot leave")

    def run(index: int) -> None:
        if own and index == 1:
            raise ArithmeticError("cannot compute")

    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(torch, "autocast", Leaves)
        expected = (OSError, "cannot leave")
        with pytest.raises(expected[0], match=expected[1]) as caught:
            parallel_apply(each(2, run), [0, 1])
        monkeypatch.undo()
    assert getattr(caught.value, "__notes__", ["raised in replica 1 on cpu"]) == ["raised in replica 1 on cpu"]


class Accelerators:
    """Pretended accelerators that note, for each thread, which is current and with which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = threading.local()
        accelerator = torch.accelerator
        monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
        monkeypatch.setattr(accelerator, "current_device_index", lambda: getattr(self.current, "index", 0))
        monkeypatch.setattr(accelerator, "current_stream", lambda device: self.stream(device.index))
        monkeypatch.setattr(accelerator, "device_index", lambda index: self.within("index", index))

    @contextmanager
    def within(self, name: str, value: Any) -> Iterator[None]:
        before = vars(self.current).copy()
        setattr(self.current, name, value)
        try:
            yield
        finally:
            vars(self.current).clear()
            vars(self.current).update(before)

    def stream(self, index: int) -> Any:
        return self.within("stream", (index, threading.current_thread().name))


@pytest.mark.parametrize("thread_per_device", [False, True])
def test_a_modules_device_is_current_with_the_callers_stream_and_the_default_one(
    monkeypatch: pytest.MonkeyPatch, thread_per_device: bool
) -> None:
    pretended = Accelerators(monkeypatch)
    caller = threading.current_thread().name

    def told() -> tuple[dict[str, Any], torch.device]:
        return vars(pretended.current).copy(), torch.get_default_device()

    monkeypatch.setattr(
        "lightning_bucketddp.replicas.apply.as_device",
        lambda it: torch.device(it) if it != "cuda" else torch.device("cuda", getattr(pretended.current, "index", 0)),
    )
    devices = ["cuda:2", "cpu", "cuda:1", "cuda:2"]
    with torch.device("cuda", 0):
        found = parallel_apply(each(4, told), [()] * 4, devices=devices, thread_per_device=thread_per_device)
    assert [current for current, _ in found] == [
        {"index": 2, "stream": (2, caller)},
        {},
        {"index": 1, "stream": (1, caller)},
        {"index": 2, "stream": (2, caller)},
    ]
    given = torch.device("cuda", 0)  # which the caller's own thread keeps
    own = given if thread_per_device else torch.device("cuda", 2)
    assert [default for _, default in found] == [given, given, torch.device("cuda", 1), own]
    assert not vars(pretended.current), "the caller's device stays what it was"

    with pretended.within("index", 1):
        found = parallel_apply(each(2, told), [()] * 2)
    assert [current for current, _ in found] == [{"index": 1, "stream": (1, caller)}] * 2
