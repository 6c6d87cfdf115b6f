"""When gradients are ready in a pass, by the clock of the device that makes them."""

from __future__ import annotations

import time

import torch


class ReadyTimes:
    """The times of one pass, from the moment this is made.

    On accelerators events are recorded on the stream that is current, and looked at only when somebody asks.

    Args:
        device: Where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._now()
        self._ready: dict[int, float | torch.Event] = {}
        self._backward_end = self._finish = self._begin

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def ready(self, slot: int) -> None:
        """The gradient of a slot is ready."""
        self._ready[slot] = self._now()

    def backward_ended(self) -> None:
        """The last gradient has been computed."""
        self._backward_end = self._now()

    def finished(self) -> None:
        """All gradients have been reduced."""
        self._finish = self._now()

    def _since_begin(self, at: float | torch.Event) -> float:
        if isinstance(at, float):
            assert isinstance(self._begin, float)
            return at - self._begin
        assert isinstance(self._begin, torch.Event)
        assert isinstance(self._finish, torch.Event)
        self._finish.synchronize()
        return float(self._begin.elapsed_time(at)) / 1000

    def seconds(self) -> dict[int, float]:
        """Per slot that had a gradient, when it was ready. The host waits for the device."""
        return {slot: self._since_begin(at) for slot, at in self._ready.items()}

    def seconds_of_backward(self) -> float:
        """When the last gradient had been computed. The host waits for the device."""
        return self._since_begin(self._backward_end)

    def seconds_of_pass(self) -> float:
        """When everything had been reduced. The host waits for the device."""
        return self._since_begin(self._finish)
