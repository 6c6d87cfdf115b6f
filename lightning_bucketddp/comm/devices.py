"""What devices differ in."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch


def is_accelerator(device: torch.device) -> bool:
    """Whether the host runs ahead of a device, which works in streams."""
    return device.type != "cpu"


def wait_for_device(device: torch.device) -> None:
    """Let the host wait until an accelerator has finished. Nobody waits for a CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def use_in_this_thread(device: torch.device | None) -> None:
    """Make an accelerator's device this thread's: threads begin with device 0, where CUDA would make a context."""
    if device is not None and is_accelerator(device):
        torch.accelerator.set_device_index(device)


def finishes_within(device: torch.device, seconds: float) -> bool:
    """Whether all streams of an accelerator finish within a number of seconds."""

    def wait() -> None:
        with suppress(RuntimeError):  # whoever uses the device next raises it
            use_in_this_thread(device)
            wait_for_device(device)

    thread = threading.Thread(target=wait, name="bucketddp-device", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def widest_float(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on MPS, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def has_foreach(device: torch.device) -> bool:
    """Whether torch changes lists of tensors at once there; it refuses MPS."""
    return device.type != "mps"


def has_addresses(device: torch.device) -> bool:
    """Whether a pointer to memory is an address, as far as is known."""
    return device.type in ("cpu", "cuda")
