"""The control vector: flags, counts and fingerprints of a pass, summed over the ranks.

Its elements are small integers, so that their sums are exact in fp32 for 4,096 ranks::

    0            how many ranks are to end
    1            how many ranks have joined, and a multiple of how many others ask to drop the pass
    2 ... 5      tokens that the gradients were summed over, in limbs of 12 bits
    6 ... 29     three numbers of 24 bits: a fingerprint of the rank's view of the pass, how many steps it has begun,
                 how many training forwards it has run; each in four limbs x of 6 bits, as x and x * x
    30 ...       per slot: how many ranks have something to contribute

All ranks hold the same limb x exactly if ``world * sum(x * x) == sum(x) ** 2`` (the equality case of Cauchy-Schwarz).
Every rank computes this from the same two sums, so either all of them notice a difference or none does.

The vector travels behind the gradients of the pass's last bucket, or in a collective of its own.
"""

from __future__ import annotations

import ctypes
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.host_copy import HostCopy
from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.diagnose import LOCAL_BACKWARD
from lightning_bucketddp.peers.end_signals import end_signals
from lightning_bucketddp.peers.ranks import Ranks

HEADER = 30
MAX_RANKS_IN_FP32 = 4096
"""Sums of limbs of 12 bits over more ranks are not exact in fp32."""

_C_TYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
}
_MANY = {torch.float32: MAX_RANKS_IN_FP32 + 1, torch.float64: 2**32, torch.int64: 2**32}
"""The multiple of the second count in element 1: more than all ranks add to the first, few enough for exact sums.

No rank adds to both counts.
"""

_TOKENS = slice(2, 6)
_TOKEN_BITS, _LIMB_BITS = 12, 6


def fingerprint(*parts: object) -> int:
    """A hash of ``parts`` in 24 bits, the same in every process."""
    return zlib.crc32(repr(parts).encode()) >> 8


@dataclass
class Report:
    """One rank's report on its pass; the reducer's participants add to it.

    Attributes:
        fingerprint: :func:`fingerprint` of this rank's view of the pass.
        steps: How many steps this rank has begun.
        forwards: How many training forwards this rank has run.
        tokens: How many tokens this rank's gradients were summed over, as far as the host knows; below 2 ** 48.
        tokens_on_device: Further tokens, as an int64 tensor of no dimension.
        joined: Whether this rank has joined.
        drop: Whether this rank asks all ranks to drop the pass. Not told by a rank that has joined.
        to_end: Whether a signal has asked this rank to end.
    """

    fingerprint: int
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    tokens_on_device: Tensor | None = None
    joined: bool = False
    drop: bool = False
    to_end: bool = False


def write(vector: Tensor, report: Report, used: Collection[int]) -> None:
    """Write this rank's control vector.

    Args:
        vector: ``HEADER`` elements and one per slot, on the CPU.
        report: This rank's report.
        used: The slots to which this rank contributes.
    """
    second = 1 if report.joined else report.drop * _MANY[vector.dtype]
    header = [int(report.to_end), second, *_limbs(report.tokens, _TOKEN_BITS)]
    for number in (report.fingerprint, report.steps, report.forwards):
        for limb in _limbs(number, _LIMB_BITS):
            header += [limb, limb * limb]
    everything = len(used) == len(vector) - HEADER
    vector.fill_(int(everything))
    _header_of(vector)[:] = header
    if used and not everything:
        vector[torch.tensor(list(used), device="cpu") + HEADER] = 1


def _fill(vector: Tensor, report: Report, used: Collection[int]) -> None:
    """Write this rank's control vector on any device. The host does not wait."""
    if vector.is_cpu:
        write(vector, report, used)
    else:
        pinned = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
        write(pinned, report, used)
        vector.copy_(pinned, non_blocking=True)
    if report.tokens_on_device is not None:
        vector[_TOKENS] += torch.stack(_limbs(report.tokens_on_device.to(vector.device), _TOKEN_BITS))


def _header_of(vector: Tensor) -> ctypes.Array[Any]:
    """The memory of a vector's header. In small steps torch's operations on it would take some percent of the time."""
    return (_C_TYPES[vector.dtype] * HEADER).from_address(vector.data_ptr())


def _limbs(number: Any, bits: int) -> list[Any]:
    """Four limbs of a number, which may be a tensor."""
    return [(number >> (bits * place)) % 2**bits for place in range(4)]


class Control:
    """The summed vector.

    Args:
        summed: The sum of all ranks' vectors, on the CPU.
        world_size: How many ranks took part.

    Attributes:
        joined_ranks: How many ranks have joined.
        dropping_ranks: How many ranks ask to drop the pass.
        ranks_to_end: How many ranks a signal has asked to end.
        agreed: All ranks had the same fingerprint.
        in_step: All ranks have begun the same number of steps.
        same_forwards: All ranks have run the same number of training forwards.
    """

    def __init__(self, summed: Tensor, world_size: int) -> None:
        header = [*map(int, _header_of(summed))]
        self.ranks_to_end = header[0]
        self.dropping_ranks, self.joined_ranks = divmod(header[1], _MANY[summed.dtype])
        pairs = header[_TOKENS.stop :]
        same = [world_size * squares == total * total for total, squares in zip(pairs[::2], pairs[1::2], strict=True)]
        self.agreed, self.in_step, self.same_forwards = all(same[:4]), all(same[4:8]), all(same[8:])
        self._summed = summed

    def used_somewhere(self, slot: int) -> bool:
        """Whether any rank contributed to ``slot``."""
        return bool(self._summed[HEADER + slot] > 0)


class ControlExchange:
    """One pass's control vector on its way.

    Args:
        vector: The vector, which is summed in place.
        world_size: Number of ranks.
        work: The collective; None if the vector travels in a bucket, which the reducer waits for.

    Attributes:
        nbytes: Bytes that travel.
    """

    def __init__(self, vector: Tensor, world_size: int, work: Work | None = None) -> None:
        self._vector = vector
        self.nbytes = vector.nbytes
        self._world_size, self._work = world_size, work or Work()
        self._copy: HostCopy | None = None

    def wait(self) -> None:
        """Wait for the sum as :meth:`Work.wait` does, and start its copy to the host."""
        self._work.wait()
        self._copy = HostCopy(self._vector, missing=-1)  # counts are not negative

    def forget_on_device(self) -> None:
        """Keep what comes to the host alone: the vector may lie in the memory of a bucket."""
        self._vector = torch.empty(0, device="cpu")

    def tokens(self) -> Tensor:
        """The tokens of all ranks, at least 1, as an int64 tensor of no dimension on the device; wait first."""
        limbs = self._vector[_TOKENS].to(torch.int64)
        places = torch.arange(4, device=limbs.device)  # made there: a copy from the host would make it wait
        return (limbs << (_TOKEN_BITS * places)).sum().clamp(min=1)

    def arrived(self) -> bool:
        """Whether :meth:`read` would return without waiting."""
        return self._copy is None or self._copy.arrived()

    def landed(self) -> bool:
        """Whether the sum has come to the host, for other threads; see :meth:`HostCopy.landed`."""
        return self._copy is None or self._copy.landed()

    def read(self) -> Control:
        """The sum; waits until it has come to the host."""
        return Control(self._vector if self._copy is None else self._copy.read(), self._world_size)


class ControlChannel:
    """Sends control vectors, and reads them: at once, or on accelerators when they have come to the host.

    Ranks that meet in a pass must be in the same step. Where nobody counts steps, ranks may meet after different
    numbers of forwards because one skipped a backward: this warns of it, once.

    Args:
        ranks: The ranks.
        device: The device of the gradients.

    Attributes:
        last: The control vector of the last pass; on accelerators, those of the last two.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._collectives, self._peers, self._device = ranks.collectives, ranks.peers, device
        self.last: deque[ControlExchange] = deque(maxlen=2 if is_accelerator(device) else 1)
        self._unread: deque[ControlExchange] = deque()
        self._warned_of_forwards = False

    def report(self, trainable: Sequence[bool], joined: bool) -> Report:
        """This rank's report on a pass, before participants add to it."""
        peers, at = self._peers, self._peers.position
        seen = fingerprint(peers.number, at.pass_number, zlib.crc32(bytes(trainable)), at.updates[1])
        return Report(seen, at.step, at.forward, joined=joined, to_end=end_signals.received > 0)

    def send(self, report: Report, slots: int, used: Collection[int]) -> ControlExchange:
        """Send the control vector in a collective of its own.

        Args:
            report: This rank's report.
            slots: Number of slots in the layout.
            used: The slots to which this rank contributes.
        """
        vector = torch.empty(HEADER + slots, dtype=torch.int64, device=self._device)
        _fill(vector, report, used)
        return ControlExchange(vector, self._collectives.world_size, self._collectives.all_reduce_sum(vector))

    def put_behind(
        self, flat: Tensor, flat_with_control: Tensor, report: Report, slots: int, used: Collection[int]
    ) -> ControlExchange:
        """Write the control vector behind a bucket, whose reduction sums it too. Arguments as for :meth:`send`."""
        vector = flat_with_control[flat.numel() : flat.numel() + HEADER + slots]
        _fill(vector, report, used)
        return ControlExchange(vector, self._collectives.world_size)

    def read(self, exchange: ControlExchange, needed: bool) -> Control | None:
        """Require that all ranks met in the same pass, now if that is needed or costs nothing; else later.

        Raises:
            PeerFailureError: If a rank failed, and what came from the device may be any values.
            RankMismatchError: If ranks met from different places of the program.
        """
        self.last.append(exchange)
        if needed or exchange.arrived():
            control = exchange.read()
            if is_accelerator(self._device):
                self._peers.require_usable()  # an abort ends what a device waits for, and leaves any values
            return self.require_same_pass(control)
        self._unread.append(exchange)
        self._peers.here.on_device = self._not_ended
        return None

    def require_same_pass(self, control: Control) -> Control:
        """Require that all ranks met in the same pass.

        Raises:
            RankMismatchError: If ranks met from different places of the program.
        """
        peers, at = self._peers, self._peers.position
        here, number = f"rank {peers.rank}: ranks", at.pass_number
        with peers.failing():
            if not control.agreed:
                raise RankMismatchError(
                    f"{here} met in pass {number}, but in passes of different models, or with different trainable "
                    "parameters, or after different optimizer steps; run the same program on every rank"
                )
            if control.joined_ranks:  # a joined rank counts neither steps nor forwards
                return control
            if not control.in_step:
                raise RankMismatchError(
                    f"{here} met in pass {number} from different steps: {peers.steps()}. Some rank skipped a backward "
                    "that the others ran, or ran one more: look for a backward in a branch that depends on the rank or "
                    "on its data"
                )
        if not control.same_forwards and not at.step and not self._warned_of_forwards:
            self._warned_of_forwards = True
            warnings.warn(
                f"{here} met in pass {number} after different numbers of training forwards, {at.forward} on this "
                "rank. If some rank skipped a backward, gradients of different batches are being averaged; a forward "
                f"that only some ranks run belongs under torch.no_grad(). {LOCAL_BACKWARD}",
                stacklevel=2,
            )
        return control

    def to_end(self, no_pass_follows: bool) -> bool:
        """Whether a signal has asked some rank to end; the same on every rank. See :meth:`BucketDDP.preempted`.

        The last pass tells. On accelerators it is the pass before, for which the host hardly waits.
        """
        end_signals.watch()
        if no_pass_follows:
            end_signals.ending |= any(map(int, self._peers.exchange("whether to end", str(end_signals.received))))
        end_signals.ending |= bool(self.last) and self.last[0].read().ranks_to_end > 0
        return end_signals.ending

    def _not_ended(self) -> int:
        """How many passes the device has not ended. Other threads ask for it."""
        return sum(not exchange.landed() for exchange in list(self._unread))

    def read_what_arrived(self) -> None:
        """Look at the control vectors of earlier passes, without waiting for the device.

        Raises:
            RankMismatchError: As for :meth:`require_same_pass`.
        """
        while self._unread and self._unread[0].arrived():
            self.require_same_pass(self._unread.popleft().read())
