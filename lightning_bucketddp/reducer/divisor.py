"""The divisor of the sum of gradients over the ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import is_accelerator, widest_float
from lightning_bucketddp.layout.options import DivideBy
from lightning_bucketddp.peers.control import ControlExchange, Report
from lightning_bucketddp.reducer.joining import Joining
from lightning_bucketddp.reducer.participant import Participant, PassResult
from lightning_bucketddp.reducer.state import Pass, Role


class GradientDivisor(Participant):
    """Rescales the mean over all ranks, which collectives give, to the divisor that the user chose.

    Args:
        divide_by: The user's choice.
        collectives: The group.
        joining: Knows whether joined ranks are left out of the mean.

    Attributes:
        factor: The factor by which the last reduction multiplied the mean over all ranks; None for no factor.
    """

    def __init__(self, divide_by: DivideBy, collectives: Collectives, joining: Joining) -> None:
        self._divide_by, self._joining = divide_by, joining
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self.factor: float | Tensor | None = None
        self._opened: Pass | None = None
        self._uncleared: str | None = None
        self._counted_before: int | Tensor | None = None  # in local passes since the last reduction
        self._counted: int | Tensor | None = None  # since the last pass

    @property
    def rescales(self) -> bool:
        """Whether the user asked for another divisor than the world size."""
        return self._divide_by != "world_size"

    @property
    def counted(self) -> bool:
        """Whether something was counted since the last pass."""
        return self._counted is not None

    @property
    def weight(self) -> int | None:
        """The factor of this rank's gradients in the last reduction; None for 1."""
        return None if self._opened is None else self._opened.weight

    def count(self, number: int | Tensor, what: Literal["tokens", "samples"]) -> None:
        """Add to the number of tokens, or of samples, that this rank's gradients are taken over.

        Raises:
            ValueError: If the number is negative or not whole, as far as the host knows it.
            RuntimeError: If gradients are divided by something else.
        """
        if self._divide_by != what:
            raise RuntimeError(
                f'expected gradient_divide_by="{what}" where count_{what}() is called, found '
                f"gradient_divide_by={self._divide_by!r}; leave out the call, or change the option"
            )
        if isinstance(number, Tensor) and is_accelerator(number.device) and what == "tokens":
            self._counted = _sum(self._counted, number.detach().to(torch.int64, copy=True).reshape(()))
            return
        known = number.item() if isinstance(number, Tensor) else number
        if not (known >= 0 and known % 1 == 0):  # NaN and Inf are neither
            raise ValueError(f"expected a whole number of {what} from 0, found {known}")
        self._counted = _sum(self._counted, int(known))

    def note_uncleared_grads(self, uncleared: str | None, cleared: bool) -> None:
        """Take note of ``.grad`` before backward.

        Args:
            uncleared: A parameter with the gradient of an earlier reduction, which would be rescaled once more.
            cleared: Whether the gradients of local passes are gone. What was counted then does not count either.
        """
        self._uncleared = uncleared
        if cleared:
            self._counted_before = None

    def opened(self, this_pass: Pass) -> None:
        """Require cleared gradients and a count, where the sum is not divided by the world size.

        Raises:
            RuntimeError: If either is missing.
        """
        self._opened, uncleared, self._uncleared = this_pass, self._uncleared, None
        if uncleared is not None:
            raise RuntimeError(
                f"rank {self._rank}: expected cleared gradients before a pass with gradient_divide_by="
                f"{self._divide_by!r}, found {uncleared!r} with the gradient of an earlier one, which would be "
                "rescaled once more; call optimizer.zero_grad() or zero_grad_buffer() after each step"
            )
        if not this_pass.synchronised or self._divide_by not in ("tokens", "samples"):
            return
        counted = _sum(self._counted_before, self._counted)
        if counted is None and this_pass.role is Role.ACTIVE:
            raise RuntimeError(
                f"rank {self._rank}: expected count_{self._divide_by}() before each synchronised backward with "
                f'gradient_divide_by="{self._divide_by}", found no call since the last one; call it with 0 for a batch '
                "without any"
            )
        if self._divide_by == "samples":
            this_pass.weight = int(counted or 0)

    def require_root(self, name: str) -> None:
        """Refuse another divisor in a backward without a root.

        Args:
            name: The first parameter with a gradient.

        Raises:
            RuntimeError: If the user asked for another divisor than the world size.
        """
        if self.rescales:
            raise RuntimeError(
                f"rank {self._rank}: expected a backward from an output of forward, or inside backward_pass(), with "
                f"gradient_divide_by={self._divide_by!r}; found neither for the gradient of parameter {name!r}. Use "
                "backward_pass()"
            )

    def backward_ended(self, raised: bool) -> None:
        """Keep the count of a local pass with its gradients."""
        if not raised and self._opened is not None and not self._opened.synchronised:
            self._counted_before, self._counted = _sum(self._counted_before, self._counted), None

    def report(self, report: Report) -> None:
        """Report the tokens, or samples."""
        tokens = _sum(self._counted_before, self._counted)
        if isinstance(tokens, Tensor):
            report.tokens_on_device = tokens
        else:
            report.tokens = tokens or 0

    def use_reports(self, result: PassResult) -> None:
        """Rescale the reduced gradients."""
        self.factor = self._factor(result.exchange)
        for progress in result.this_pass.active:
            self.rescale(progress.bucket.flat)

    def rescale(self, gradients: Tensor) -> None:
        """Multiply reduced gradients, of a dimension or more, by the factor of this pass, if there is one."""
        factor = self.factor
        if isinstance(factor, Tensor):
            factor = factor.to(gradients.device)
            if is_accelerator(gradients.device):
                # CUDA rounds a factor of no dimension, which is in its memory, to the gradients' dtype.
                factor = factor.to(torch.promote_types(gradients.dtype, torch.float32)).view(1)
        if factor is not None:
            gradients.mul_(factor)

    def _factor(self, exchange: ControlExchange) -> float | Tensor | None:
        if self._divide_by in ("tokens", "samples"):
            tokens = exchange.tokens()  # not in torch's default dtype, which may be of low precision
            return self._world_size / tokens.to(widest_float(tokens.device))
        if isinstance(self._divide_by, int):
            return self._world_size / self._divide_by
        if self._joining.divides_by_active and (joined := exchange.read().joined_ranks):
            return self._world_size / (self._world_size - joined)
        return None

    def ended(self) -> None:
        """Forget the count of gradients that were reduced, or dropped."""
        self._counted = self._counted_before = None


def _sum(first: int | Tensor | None, second: int | Tensor | None) -> int | Tensor | None:
    """The sum of two counts; None if nothing was counted."""
    return second if first is None else first if second is None else first + second
