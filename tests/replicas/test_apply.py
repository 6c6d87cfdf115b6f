"""Modules are called at the same time as if the caller had called them; errors reach the caller."""

import contextvars
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bucketddp.replicas import apply as apply_file
from lightning_bucketddp.replicas.replicas import parallel_apply

COLOUR = contextvars.ContextVar("COLOUR", default="none")
CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # the CPU too, but another device to compare with
TWO_OF_EACH = [CPU, OTHER, CPU, OTHER]


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def each(count: int, function: Callable[..., Any]) -> list[nn.Module]:
    return [Calls(function) for _ in range(count)]


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps ``OTHER`` from being taken for ``CPU``."""
    monkeypatch.setattr(apply_file, "as_device", torch.device)


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("replica")]


def test_arguments_reach_their_modules_and_results_come_in_order() -> None:
    modules = each(3, lambda *args, **kwargs: (args, kwargs))
    found = parallel_apply(modules, [(1, 2), [3], 4], [{"a": 1}, {}, {"b": 2}], ["cpu"] * 3)
    assert found == [((1, 2), {"a": 1}), ((3,), {}), ((4,), {"b": 2})]
    assert parallel_apply(each(2, lambda x: tuple(x.shape)), list(torch.ones(2, 3, 4))) == [(3, 4)] * 2
    assert parallel_apply([], []) == []
    for name in ("inputs", "kwargs", "devices"):
        given: dict[str, Any] = {"inputs": [1, 2], name: ["cpu"]}
        with pytest.raises(ValueError, match=f"{name} for each of the 2 modules, found 1"):
            parallel_apply(each(2, int), **given)


def test_each_module_has_a_thread_and_the_first_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []  # OpenMP's own count cannot be seen: asking torch for it sets it
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    barrier = threading.Barrier(3, timeout=30)
    found = parallel_apply(each(3, lambda _: (barrier.wait(), threading.get_ident())[1]), [0, 1, 2])
    assert len(set(found)) == 3
    assert found[0] == threading.get_ident()
    assert told == [torch.get_num_threads()] * 2


def told_of_state() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return *autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(1).device, COLOUR.get()


def test_the_callers_state_holds_in_every_thread() -> None:
    token = COLOUR.set("blue")
    autocasts = torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16, cache_enabled=False)
    for context in (torch.no_grad(), torch.inference_mode(), *autocasts, torch.device("meta")):
        with context:
            assert parallel_apply(each(3, told_of_state), [()] * 3) == [told_of_state()] * 3
        assert parallel_apply(each(3, told_of_state), [()] * 3) == [told_of_state()] * 3, "threads leave nothing behind"
    COLOUR.reset(token)


@pytest.mark.parametrize("place", [0, 1], ids=["in the caller's thread", "elsewhere"])
def test_the_first_error_is_raised_when_all_have_ended(place: int) -> None:
    later_failed, ended = threading.Event(), []

    def the_line_that_fails(index: int) -> None:
        if index == place:
            assert later_failed.wait(30)
            raise KeyboardInterrupt
        if index == 2:
            later_failed.set()
            raise ArithmeticError("earlier in time, later in place")
        ended.append(index)

    with pytest.raises(KeyboardInterrupt) as caught:
        parallel_apply(each(4, the_line_that_fails), [0, 1, 2, 3], devices=["cpu"] * 4)
    assert sorted(ended) == [1 - place, 3]
    assert "the_line_that_fails" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert caught.value.__notes__ == [f"raised in replica {place} on cpu"]


def test_devices_run_beside_each_other_and_their_modules_take_turns(other_device: None) -> None:
    beside = threading.Barrier(2, timeout=30)
    weight, saved = torch.ones(2, requires_grad=True), []

    def run(index: int) -> tuple[int, int]:
        beside.wait()  # the first of both devices, then the second of both
        weight.pow(2)
        return index, threading.get_ident()

    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        found = parallel_apply(each(4, run), [0, 1, 2, 3], devices=TWO_OF_EACH, thread_per_device=True)
    mine, other = threading.get_ident(), found[1][1]
    assert found == [(0, mine), (1, other), (2, mine), (3, other)]
    assert mine != other
    assert len(saved) == 2, "the caller's modes hold for its device"


@pytest.mark.parametrize("thread_per_device", [False, True])
def test_the_right_device_and_stream_are_current(monkeypatch: pytest.MonkeyPatch, thread_per_device: bool) -> None:
    """Pretended accelerators note, for each thread, which is current and with which stream."""
    current, caller = threading.local(), threading.current_thread().name

    @contextmanager
    def within(name: str, value: Any) -> Iterator[None]:
        before = vars(current).copy()
        setattr(current, name, value)
        yield
        vars(current).clear()
        vars(current).update(before)

    def as_device(name: Any) -> torch.device:
        return torch.device("cuda", getattr(current, "index", 0)) if name == "cuda" else torch.device(name)

    def stream(device: torch.device) -> Any:
        return within("stream", (device.index, threading.current_thread().name))

    monkeypatch.setattr(apply_file, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(apply_file, "as_device", as_device)
    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: within("index", index))

    def told() -> tuple[dict[str, Any], torch.device]:
        return vars(current).copy(), torch.get_default_device()

    def on(index: int) -> dict[str, Any]:
        return {"index": index, "stream": (index, caller)}

    devices = ["cuda:2", "cpu", "cuda:1", "cuda:2"]
    given = torch.device("cuda", 0)  # as default, which the caller's own thread keeps
    with given:
        found = parallel_apply(each(4, told), [()] * 4, devices=devices, thread_per_device=thread_per_device)
    assert [now for now, _ in found] == [on(2), {}, on(1), on(2)]
    own = given if thread_per_device else torch.device("cuda", 2)
    assert [default for _, default in found] == [given, given, torch.device("cuda", 1), own]
    with within("index", 1):
        assert [now for now, _ in parallel_apply(each(2, told), [()] * 2)] == [on(1)] * 2
    assert not vars(current), "the caller's device stays what it was"
