"""The accelerator of tests marked ``gpu``: a real one where there is one, else the simulated one.

What ``torch.accelerator`` has no function for is here, for both.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
"""In the processes of ranks. pytest's own process has the CPU, unless there is a real accelerator."""
BACKEND = dist.Backend.default_device_backend_map.get(DEVICE.type, "")
"""The device's own."""


def simulated() -> Any:
    """The module ``tests.simulated.device``, which ``import torch`` has imported in ranks' processes."""
    return sys.modules["tests.simulated.device"]


def sleep(seconds: float = 0.1) -> None:
    """Keep the current stream busy."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles; torch.accelerator has nothing like it
    else:
        simulated().library.sleep(seconds)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one. A ``torch.Stream`` by itself can be entered once at a time."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextmanager
def _cuda_waits_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_waits_raise() -> AbstractContextManager[None]:
    """Make operations raise that wait for a value: ``item()``, copies to pageable memory."""
    return _cuda_waits_raise() if DEVICE.type == "cuda" else simulated().host_waits_raise()
