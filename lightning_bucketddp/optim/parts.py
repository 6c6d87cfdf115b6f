"""Which part of each parameter this rank's optimizers step on: all of it, or a run of elements in memory's order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bucketddp.layout.plan import ParamSpec
from lightning_bucketddp.layout.shards import Part


def in_memory_order(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """The elements of a tensor with a parameter's shape, as a 1-D tensor in the order of that parameter's memory."""
    if tensor.stride() == spec.strides or tensor.numel() < 2:
        return tensor.as_strided((tensor.numel(),), (1,))
    flat = torch.empty(spec.numel, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(spec.shape, spec.strides).copy_(tensor)
    return flat


class ParamPart(NamedTuple):
    """This rank's part of one parameter.

    Attributes:
        spec: The parameter.
        part: Which of its elements, and where they lie in the parameter's bucket.
    """

    spec: ParamSpec
    part: Part

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.part.stop - self.part.start

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor with the parameter's shape; 1-D, not always a copy."""
        return in_memory_order(whole, self.spec)[self.part.start : self.part.stop]

    def in_bucket(self, flat: Tensor) -> Tensor:
        """The part's place in a bucket; 1-D."""
        return flat[self.part.at : self.part.at + self.numel]

    def whole_in_bucket(self, flat: Tensor) -> Tensor:
        """The whole parameter's place in a bucket, with the parameter's shape and strides."""
        begin = self.part.at - self.part.start
        return flat.as_strided(self.spec.shape, self.spec.strides, flat.storage_offset() + begin)


class Parts:
    """This rank's part of each parameter: all of it, so that nothing is sent. See :class:`ShardedParams` for others."""

    swap_before_closure = True
    """Whether an optimizer may look for its parts before it calls its closure, as LBFGS does."""

    def find(self, param: Tensor) -> ParamPart | None:
        """This rank's part of a parameter; None if it is the whole parameter."""
        return None

    def param_part(self, param: Tensor) -> Tensor:
        """The memory of this rank's part, 1-D; the parameter itself if that is whole."""
        return param

    def grad_part(self, param: Tensor) -> Tensor | None:
        """The gradient of this rank's part; None if the parameter has none."""
        return param.grad

    def before_update(self) -> None:
        """Wait for parameters that are on their way, as they are about to be updated."""

    def half_updated(self) -> None:
        """Hear that a step raised after it had changed some of this rank's parts."""

    def updated(self, params: Iterable[Tensor]) -> None:
        """Let the versions of parameters tell that this rank's parts of them have new values."""

    def send(self, params: Iterable[Tensor], complete: bool = True) -> None:
        """Send the new values of these parameters, which are the step's last if it is complete."""

    def in_stages(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """The parameters in the order in which forward needs them, cut where they may be sent one after the other."""
        return []

    def wait(self) -> None:
        """Wait for all parameters that are on their way."""

    def replaced(self) -> None:
        """Send all parameters, of which each rank has written its own parts. All ranks must call this alike."""
