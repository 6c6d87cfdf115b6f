"""This rank's part of each parameter: all of it, or a range of its elements in memory order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bucketddp.layout.plan import ParamSpec
from lightning_bucketddp.layout.shards import Part


class ParamPart(NamedTuple):
    """This rank's part of one parameter.

    Attributes:
        spec: The parameter.
        part: The range of its elements, and its place in the parameter's bucket.
    """

    spec: ParamSpec
    part: Part

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.part.stop - self.part.start

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which optimizers see the part: 1-D, unless shards are cut between parameters."""
        return self.spec.shape if self.part.whole and self.numel else (self.numel,)

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor with the parameter's shape; a view where that is possible."""
        return self.shaped(self.run(whole)[self.part.start : self.part.stop])

    def run(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor with the parameter's or the part's shape in the order of memory, 1-D."""
        if tensor.shape == self.spec.shape and tensor.numel() > 1 and tensor.stride() != self.spec.strides:
            memory = torch.empty_strided(self.spec.shape, self.spec.strides, dtype=tensor.dtype, device=tensor.device)
            tensor = memory.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def shaped(self, run: Tensor) -> Tensor:
        """View the elements of the part, 1-D, in the shape in which optimizers see it."""
        whole = self.part.whole and self.numel
        return run.as_strided(self.spec.shape, self.spec.strides, run.storage_offset()) if whole else run

    def in_bucket(self, flat: Tensor) -> Tensor:
        """View the part in the flat tensor of its bucket; 1-D."""
        return flat[self.part.at : self.part.at + self.numel]

    def whole_in_bucket(self, flat: Tensor) -> Tensor:
        """View the whole parameter in the flat tensor of its bucket, with the parameter's shape and strides."""
        begin = self.part.at - self.part.start
        return flat.as_strided(self.spec.shape, self.spec.strides, flat.storage_offset() + begin)

    def splits(self, key: str, shape: Sequence[int]) -> bool:
        """Tell whether an entry of the whole parameter's state has one value per element.

        Args:
            key: The entry's name.
            shape: Its shape.

        Raises:
            ValueError: If it has neither the parameter's shape nor one element.
        """
        if key != "step" and tuple(shape) == self.spec.shape:
            return True
        if torch.Size(shape).numel() == 1:
            return False
        raise ValueError(
            f"expected optimizer state {key!r} of parameter {self.spec.name!r} to have the parameter's shape "
            f"{self.spec.shape}, or one element, found {tuple(shape)}: this state cannot be sharded, or is another "
            "model's"
        )

    def is_split(self, key: str, value: object) -> bool:
        """Tell whether an entry of the part's state has one value per element."""
        return isinstance(value, Tensor) and key != "step" and value.shape == self.shape


class Parts:
    """This rank's part of each parameter, and the way of new values to the other ranks.

    Here every rank owns all, and nothing is sent. :class:`ShardedParams` overrides this where parameters are divided.
    """

    swap_before_closure = True
    """Whether shards and masters are in place before ``step`` calls its closure. LBFGS looks at them first."""

    @property
    def gathering(self) -> bool:
        """Whether parameters are on their way."""
        return False

    def find(self, param: Tensor) -> ParamPart | None:
        """Return this rank's part of a parameter; None if it is the whole parameter."""
        return None

    def param_part(self, param: Tensor) -> Tensor:
        """Return the memory of this rank's part; the parameter itself if that is whole."""
        return param

    def grad_part(self, param: Tensor) -> Tensor | None:
        """Return the gradient of this rank's part; None if the parameter has no gradient."""
        return param.grad

    def keep_place(self) -> None:
        """Let parameters stay where they are, as optimizer state lies there too."""

    def before_update(self) -> None:
        """Wait for parameters that are on their way, before an optimizer updates them."""

    def half_updated(self) -> None:
        """Note that a step raised after it had changed some parts."""

    def updated(self, params: Sequence[Tensor]) -> None:
        """Send the new values of parameters. All ranks must call this alike.

        Args:
            params: The parameters that the step has updated on all ranks.
        """

    def wait(self) -> None:
        """Wait for all parameters that are on their way."""

    def in_forward(self, trains: bool) -> AbstractContextManager[None]:
        """The wrapper's forward, in which modules wait for their parameters.

        Args:
            trains: Whether it is a training forward.
        """
        return nullcontext()

    def replaced(self) -> None:
        """Send all parameters, after each rank has written its own parts. All ranks must call this alike."""
