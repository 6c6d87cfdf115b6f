"""Copies of tensors on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bucketddp.comm.devices import is_accelerator


def bytes_of(tensor: Tensor) -> bytearray:
    """Return a tensor's values as bytes. ``Tensor.numpy()`` needs NumPy, which torch does not bring."""
    values = bytearray(tensor.nbytes)
    if values:
        torch.frombuffer(values, dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return values


class HostCopy:
    """A copy on the host. On an accelerator the host goes on, and waits when it reads.

    Args:
        tensor: The tensor. Its values are those at this point of the current stream.
        missing: A value that its last element never has, for :meth:`landed`.

    Attributes:
        waits: Whether :meth:`read` may wait for an accelerator; the same on every rank.
    """

    def __init__(self, tensor: Tensor, missing: int | None = None) -> None:
        self.waits = is_accelerator(tensor.device)
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.waits)
        self._missing = missing
        if missing is not None and self.waits:
            self._copy[-1] = missing
        self._copy.copy_(tensor, non_blocking=True)
        self._event: torch.Event | None = None
        self._device_index = tensor.device.index
        if self.waits:
            self._event = torch.Event(tensor.device)
            self._event.record(torch.accelerator.current_stream(tensor.device))  # autograd may be on another device

    def arrived(self) -> bool:
        """Whether :meth:`read` would return without waiting."""
        if self._event is None:
            return True
        # Threads begin with device 0, where CUDA would make a context, which takes half a gigabyte.
        with torch.accelerator.device_index(self._device_index):
            return self._event.query()

    def landed(self) -> bool:
        """Whether the last element has come, as other threads may ask at any time.

        The device is not asked: that would end the capture of a CUDA graph, whatever thread captures it.
        """
        return self._event is None or bool(self._copy[-1] != self._missing)

    def read(self) -> Tensor:
        """The values, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
