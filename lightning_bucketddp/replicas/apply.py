"""Call modules in threads, with the results of calling them one after another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
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
    """Call every module with its inputs, at the same time.

    The first module runs in the caller's thread, each other one in a thread of its own. All have the caller's grad
    mode, inference mode, autocast state, default device, number of intra-op threads, context variables and current
    streams. Saved-tensor hooks and torch's function and dispatch modes hold in the caller's thread only: torch offers
    no way to hand them on.

    Args:
        modules: The modules.
        inputs: For each module a tuple or list of arguments, or its only argument.
        kwargs: For each module its keyword arguments.
        devices: For each module the device that is current while it runs. By default the caller's.
        thread_per_device: Run the modules of one device in one thread, one after another, and the first device's in
            the caller's thread. Modules of one device then draw the same random numbers in each run. If one raises,
            the rest of its device are not called.

    Returns:
        What each module returned.

    Raises:
        ValueError: If there are not as many inputs, kwargs or devices as modules.
        BaseException: The error of the first module, by place, that raised one. It is raised when all threads have
            ended, with its own traceback and a note that names the replica.
    """
    for what, given in (("inputs", inputs), ("kwargs", kwargs), ("devices", devices)):
        if given is not None and len(given) != len(modules):
            raise ValueError(f"expected {what} for each of the {len(modules)} modules, found {len(given)}")
    if not modules:
        return []
    current = accelerator_type() or "cpu"
    places = [as_device(device) for device in ([current] * len(modules) if devices is None else devices)]
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(indices: Sequence[int], state: AbstractContextManager[None]) -> None:
        """Call the modules of one thread until one raises."""
        index = indices[0]
        try:
            with state:
                for index in indices:
                    arguments = inputs[index] if isinstance(inputs[index], list | tuple) else (inputs[index],)
                    results[index] = modules[index](*arguments, **(kwargs[index] if kwargs else {}))
        except BaseException as error:
            errors[index] = error

    threads: dict[Any, list[int]] = {}
    for index, place in enumerate(places):
        threads.setdefault(place if thread_per_device else index, []).append(index)
    own, *others = threads.values()
    caller = _CallerState(places)
    pool = ThreadPoolExecutor(max(1, len(others)), "replica")
    try:
        with pool:
            for indices in others:
                device = places[indices[0]]
                pool.submit(copy_context().run, run, indices, caller.entered(device, _stream_of(device)))
            run(own, _current(places[own[0]], _stream_of(places[own[0]])))
    finally:
        pool.shutdown()  # waits again where an interrupt has ended the first wait
    if errors:
        first = min(errors)
        errors[first].add_note(f"raised in replica {first} on {places[first]}")
        raised = [errors[first]]
        errors.clear()  # The error's traceback holds this frame: it keeps alive what the frame refers to.
        results.clear()
        raise raised.pop()
    return [results[index] for index in range(len(modules))]


def _stream_of(device: torch.device) -> torch.Stream | None:
    """Return the caller's stream on an accelerator. It is a new object each time: one can be entered only once."""
    return torch.accelerator.current_stream(device) if device.type == accelerator_type() else None


@contextmanager
def _current(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    """Make a device and its stream current, if it has one."""
    with ExitStack() as stack:
        if stream is not None:
            stack.enter_context(torch.accelerator.device_index(device.index))
            stack.enter_context(stream)
        yield


class _CallerState:
    """The state that torch keeps per thread, as it is in the caller's.

    Args:
        devices: The devices in use.
    """

    def __init__(self, devices: Collection[torch.device]) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.default_device = torch.get_default_device()
        types = filter(torch.amp.is_autocast_available, {"cpu", *(device.type for device in devices)})
        self.autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in types if torch.is_autocast_enabled(kind)]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.intra_op_threads = torch.get_num_threads()

    @contextmanager
    def entered(self, device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
        """Give another thread the caller's state, with ``device`` as the current one."""
        torch.set_num_threads(self.intra_op_threads)  # OpenMP counts per thread: a new one would take all cores
        with ExitStack() as stack:
            stack.enter_context(_current(device, stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            default = device if self.default_device.type == device.type else self.default_device
            if default != torch.get_default_device():
                stack.enter_context(default)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.autocast_cache))
            yield
