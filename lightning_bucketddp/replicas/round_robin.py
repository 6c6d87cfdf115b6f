"""Replicas of one device that run one at a time, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class RoundRobin:
    """Lets one of a device's replicas run at a time, from its beginning to its end or to where it waits for others.

    Replicas of one device draw random numbers from one generator. In turns they draw them in the same order each time,
    and none draws between what a checkpointed layer notes in forward and its own draws. Replicas of different devices
    run at the same time.

    Args:
        devices: The replicas' devices.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._changed = threading.Condition()
        by_device: dict[torch.device, deque[int]] = {}
        for replica, device in enumerate(devices):
            by_device.setdefault(device, deque()).append(replica)
        self._queues = [by_device[device] for device in devices]  # the first of each runs

    @contextmanager
    def turn(self, replica: int) -> Iterator[None]:
        """Inside, the replica runs, from beginning to end."""
        try:
            self._wait(replica)
            yield
        finally:
            with self._changed:
                self._queues[replica].remove(replica)
                self._changed.notify_all()

    @contextmanager
    def away(self, replica: int) -> Iterator[None]:
        """Inside, the replica waits for others: the next ones on its device run, until they wait or end themselves."""
        queue = self._queues[replica]
        with self._changed:
            if queue and queue[0] == replica:
                queue.rotate(-1)
                self._changed.notify_all()
        try:
            yield
        finally:
            self._wait(replica)

    def _wait(self, replica: int) -> None:
        queue = self._queues[replica]
        with self._changed:
            self._changed.wait_for(lambda: replica not in queue or queue[0] == replica)
