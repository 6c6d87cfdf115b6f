"""Modules called in threads, as if the caller had called them one after another."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_bucketddp.replicas.scatter_gather import Device, accelerator_type, as_device


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
    *,
    thread_per_device: bool = False,
) -> list[Any]:
    """Calls every module with its inputs, all at the same time, or those of different devices.

    The first module is called in the caller's thread and each of the others in one of its own, with the
    caller's grad mode, inference mode, autocast state, default device, number of intra-op threads, context variables
    and current streams. Modes of torch that are kept per thread and have no public way out of it (hooks for saved
    tensors, function and dispatch modes) hold in the caller's thread alone.

    Args:
        modules: The modules.
        inputs: For each the tuple or list of its arguments, or its only argument.
        kwargs: For each its keyword arguments.
        devices: For each the device that is current while it runs. By default the caller's.
        thread_per_device: Whether modules of one device are called one after the other in one thread, those of the
            first device in the caller's. They draw random numbers in the same order each time. When one raises, the
            rest of its device are not called.

    Returns:
        What each module returned.

    Raises:
        ValueError: If there are not as many inputs, kwargs or devices as modules.
        BaseException: The first module's that raised any, by its place and not by time, after all modules have ended;
            with its own traceback and a note that says which module it was.
    """
    for what, given in (("inputs", inputs), ("kwargs", kwargs), ("devices", devices)):
        if given is not None and len(given) != len(modules):
            raise ValueError(f"expected {what} for each of the {len(modules)} modules, found {len(given)}")
    if not modules:
        return []
    places = [as_device(device) for device in devices] if devices is not None else [_present_device()] * len(modules)
    calls = [
        _Call(module, arguments, kwargs[index] if kwargs else {}, index, places[index])
        for index, (module, arguments) in enumerate(zip(modules, inputs, strict=True))
    ]
    lines: dict[Any, list[_Call]] = {}
    for call in calls:
        lines.setdefault(call.device if thread_per_device else call.index, []).append(call)
    _run_all(list(lines.values()), _ThreadState(place.type for place in places if place is not None))
    error = next((call.take_error() for call in calls if call.error is not None), None)
    if error is not None:
        calls.clear()  # else the traceback, which holds this frame, would keep every replica's results alive
        lines.clear()
        del call
        try:
            raise error
        finally:
            del error
    return [call.result for call in calls]


def _present_device() -> torch.device | None:
    """The caller's current device, if there is an accelerator: threads begin with another."""
    kind = accelerator_type()
    return None if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def _run_all(lines: Sequence[list[_Call]], state: _ThreadState) -> None:
    """Makes all calls, the first line's in this thread."""
    threads: list[threading.Thread] = []
    try:
        for line in lines[1:]:
            run, name = contextvars.copy_context().run, f"replica-{line[0].index}"
            thread = threading.Thread(target=run, args=(_run, line, state.applied(line[0].device)), name=name)
            thread.start()
            threads.append(thread)
        _run(lines[0], contextlib.nullcontext())
    finally:
        _join_all(threads)


def _run(line: Sequence[_Call], state: contextlib.AbstractContextManager[None]) -> None:
    """Makes one thread's calls, until one raises.

    Args:
        line: The calls.
        state: A context in which the thread has its caller's state.
    """
    try:
        with state, line[0].current():
            for call in line:
                call.run()
                if call.error is not None:
                    return
    except BaseException as error:
        if all(call.error is None for call in line):  # a module's own says more
            line[0].error = error


def _join_all(threads: Sequence[threading.Thread]) -> None:
    """Waits for all threads. An interrupt is raised when they have ended; another one at once."""
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for thread in threads:
            thread.join()
        raise


@dataclass
class _Call:
    """One module's call: what it is called with, and what came of it."""

    module: nn.Module
    inputs: Any
    kwargs: Mapping[str, Any]
    index: int
    device: torch.device | None
    result: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        on_accelerator = self.device is not None and self.device.type == accelerator_type()
        self._stream = torch.accelerator.current_stream(self.device) if on_accelerator else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Inside, the call's device is current, and on it the stream that was."""
        if self._stream is None or self.device is None:
            yield
            return
        with torch.accelerator.device_index(self.device.index), self._stream:
            yield

    def run(self) -> None:
        """Calls the module and keeps what it returns or raises."""
        try:
            arguments = self.inputs if isinstance(self.inputs, list | tuple) else (self.inputs,)
            self.result = self.module(*arguments, **self.kwargs)
        except BaseException as error:  # whatever it is, the others are waited for
            self.error = error

    def take_error(self) -> BaseException:
        """The error, with a note that says where it was raised."""
        error, self.error = self.error, None
        assert error is not None
        note = f"raised in replica {self.index}" + (f" on {self.device}" if self.device is not None else "")
        if sys.version_info >= (3, 11):
            error.add_note(note)
        elif len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}\n{note}",)
        return error


class _ThreadState:
    """What torch keeps per thread and a caller expects to hold in all of them.

    Args:
        device_types: Types of the devices in use, besides the CPU and the accelerator.
    """

    def __init__(self, device_types: Iterable[str]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = torch.get_default_device()
        types = {"cpu", accelerator_type() or "cpu", *filter(torch.amp.is_autocast_available, device_types)}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(types)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.intra_op_threads = torch.get_num_threads()

    @contextlib.contextmanager
    def applied(self, device: torch.device | None) -> Iterator[None]:
        """Holds it in another thread, whose current device is given."""
        # OpenMP has a number of its own for each thread: libraries behind torch would take all cores in a new one.
        torch.set_num_threads(self.intra_op_threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            default = self.default_device
            if device is not None and default.type == device.type:  # given without an index, it is the current one
                default = device
            if default != torch.get_default_device():
                stack.enter_context(default)
            for kind, dtype, enabled in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.autocast_cache))
            yield
