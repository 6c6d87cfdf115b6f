"""What the ranks must know together after a pass, as one small vector that is summed over them.

Layout, all int64::

    0            how many ranks failed in this pass
    1            how many ranks have run out of data
    2            tokens that the gradients were summed over
    3, 4         a fingerprint f of the rank's view of the pass, and f * f
    5, 6         how many steps the rank has begun, modulo 2 ** 20, and the square
    7, 8         how many training forwards the rank has run, modulo 2 ** 20, and the square
    9 ...        per slot: how many ranks have something to contribute

All ranks hold the same number f exactly if ``world * sum(f * f) == sum(f) ** 2`` (the equality case of
Cauchy-Schwarz), which every rank computes from the same two sums, so all of them notice or none does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives

HEADER = 9
TOKENS = 2
_BITS = 20  # f * f * world stays below 2 ** 63 up to 2 ** 23 ranks


def fingerprint(*parts: object) -> int:
    """A hash of ``parts`` in 20 bits, the same in every process."""
    return zlib.crc32(repr(parts).encode()) >> (32 - _BITS)


@dataclass
class Report:
    """What one rank says of its pass; participants add to it.

    Attributes:
        fingerprint: What :func:`fingerprint` gave for this rank's view of the pass.
        steps: How many steps this rank has begun.
        forwards: How many training forwards this rank has run.
        tokens: How many tokens this rank's gradients were summed over, as far as the host knows.
        tokens_on_device: More of them, as an int64 tensor of no dimension.
        failed: Whether backward raised on this rank.
        out_of_data: Whether this rank takes part for the others' sake alone.
    """

    fingerprint: int
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    tokens_on_device: Tensor | None = None
    failed: bool = False
    out_of_data: bool = False


def encode(report: Report, slots: int, used: Collection[int]) -> Tensor:
    """This rank's control vector, on the CPU, without the tokens that only the device knows.

    Args:
        report: What this rank says of its pass.
        slots: Number of slots in the layout.
        used: The slots to which this rank contributes.

    Returns:
        An int64 tensor of ``HEADER + slots`` elements.
    """
    vector = torch.zeros(HEADER + slots, dtype=torch.int64)
    if len(used) == slots:
        vector[HEADER:] = 1
    elif used:
        vector[torch.tensor(list(used)) + HEADER] = 1
    numbers = [report.failed, report.out_of_data, report.tokens]
    for number in (report.fingerprint, report.steps % 2**_BITS, report.forwards % 2**_BITS):
        numbers += [number, number * number]
    vector[:HEADER] = torch.tensor(numbers)
    return vector


class Control:
    """The summed vector.

    Args:
        summed: The sum of all ranks' vectors, on the CPU.
        world_size: How many ranks took part.

    Attributes:
        failed_ranks: On how many ranks backward raised.
        ranks_out_of_data: How many ranks took part for the others' sake alone.
        agreed: Whether all ranks had the same fingerprint.
        in_step: Whether all ranks have begun the same number of steps.
        same_forwards: Whether all ranks have run the same number of training forwards.
    """

    def __init__(self, summed: Tensor, world_size: int) -> None:
        self.failed_ranks, self.ranks_out_of_data, _, *pairs = summed[:HEADER].tolist()
        self.agreed, self.in_step, self.same_forwards = (
            world_size * squares == total * total for total, squares in zip(pairs[::2], pairs[1::2], strict=True)
        )
        self._used = summed[HEADER:]

    def used_somewhere(self, slot: int) -> bool:
        """Whether any rank contributed to ``slot``."""
        return bool(self._used[slot] > 0)


class ControlExchange:
    """One pass's control vector on its way; started by constructing it.

    Args:
        collectives: The group.
        device: The device whose tensors travel.
        report: As for :func:`encode`.
        slots: As for :func:`encode`.
        used: As for :func:`encode`.
    """

    def __init__(
        self,
        collectives: Collectives,
        device: torch.device,
        report: Report,
        slots: int,
        used: Collection[int],
    ) -> None:
        self._world_size = collectives.world_size
        vector = encode(report, slots, used)
        self._event: torch.Event | None = None
        if device.type != "cpu":
            vector = vector.pin_memory().to(device, non_blocking=True)
        if report.tokens_on_device is not None:
            vector[TOKENS] += report.tokens_on_device.to(device)
        self._vector = self._summed = vector
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

    def tokens(self) -> Tensor:
        """The tokens of all ranks, at least 1, as a tensor of no dimension on the device; wait first."""
        return self._summed[TOKENS].clamp(min=1)

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
