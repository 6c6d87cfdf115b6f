"""What the ranks must know together after a pass, as one small vector that is summed over them.

Layout, all int64::

    0            how many ranks failed in this pass
    1, 2         a fingerprint f of the rank's view of the pass, and f * f
    3, 4         how many steps c the rank has begun, modulo 2 ** 20, and c * c
    5 ...        per slot: how many ranks have something to contribute

All ranks hold the same number f exactly if ``world * sum(f * f) == sum(f) ** 2`` (the equality case of
Cauchy-Schwarz), which every rank computes from the same two sums, so all of them notice or none does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from lightning_bucketddp.collectives import Collectives

HEADER = 5
_BITS = 20  # f * f * world stays below 2 ** 63 up to 2 ** 23 ranks


def fingerprint(*parts: object) -> int:
    """A hash of ``parts`` in 20 bits, the same in every process."""
    return zlib.crc32(repr(parts).encode()) >> (32 - _BITS)


def encode(slots: int, used: Collection[int], fingerprint: int, steps: int, failed: bool) -> Tensor:
    """This rank's control vector, on the CPU.

    Args:
        slots: Number of slots in the layout.
        used: The slots to which this rank contributes.
        fingerprint: What :func:`fingerprint` gave for this rank's view of the pass.
        steps: How many steps this rank has begun.
        failed: Whether backward raised on this rank.

    Returns:
        An int64 tensor of ``HEADER + slots`` elements.
    """
    vector = torch.zeros(HEADER + slots, dtype=torch.int64)
    if len(used) == slots:
        vector[HEADER:] = 1
    elif used:
        vector[torch.tensor(list(used)) + HEADER] = 1
    steps %= 2**_BITS
    vector[:HEADER] = torch.tensor([int(failed), fingerprint, fingerprint * fingerprint, steps, steps * steps])
    return vector


class Control:
    """The summed vector.

    Args:
        summed: The sum of all ranks' vectors, on the CPU.
        world_size: How many ranks took part.

    Attributes:
        failed_ranks: On how many ranks backward raised.
        agreed: Whether all ranks had the same fingerprint.
        in_step: Whether all ranks have begun the same number of steps.
    """

    def __init__(self, summed: Tensor, world_size: int) -> None:
        failed, total, squares, steps, squared_steps = summed[:HEADER].tolist()
        self.failed_ranks: int = failed
        self.agreed: bool = world_size * squares == total * total
        self.in_step: bool = world_size * squared_steps == steps * steps
        self._used = summed[HEADER:]

    def used_somewhere(self, slot: int) -> bool:
        """Whether any rank contributed to ``slot``."""
        return bool(self._used[slot] > 0)


class ControlExchange:
    """One pass's control vector on its way; started by constructing it.

    Args:
        collectives: The group.
        device: The device whose tensors travel.
        slots: As for :func:`encode`.
        used: As for :func:`encode`.
        fingerprint: As for :func:`encode`.
        steps: As for :func:`encode`.
        failed: As for :func:`encode`.
    """

    def __init__(
        self,
        collectives: Collectives,
        device: torch.device,
        *,
        slots: int,
        used: Collection[int],
        fingerprint: int,
        steps: int,
        failed: bool,
    ) -> None:
        self._world_size = collectives.world_size
        vector = encode(slots, used, fingerprint, steps, failed)
        self._event: torch.Event | None = None
        if device.type != "cpu":
            vector = vector.pin_memory().to(device, non_blocking=True)
        self._vector = vector
        self._pending = collectives.all_reduce_sum(vector)

    def wait(self, on_idle: Callable[[], None]) -> None:
        """Waits for the sum in the sense of the device, and starts its copy to the host.

        Args:
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.
        """
        self._pending.wait(on_idle)
        if self._vector.device.type != "cpu":
            on_host = torch.empty(self._vector.shape, dtype=self._vector.dtype, pin_memory=True)
            on_host.copy_(self._vector, non_blocking=True)
            self._event = torch.Event(self._vector.device)
            self._event.record()
            self._vector = on_host

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self._vector.nbytes

    def arrived(self) -> bool:
        """Whether :meth:`read` would return without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> Control:
        """The sum; waits until it has come to the host."""
        if self._event is not None:
            self._event.synchronize()
        return Control(self._vector, self._world_size)
