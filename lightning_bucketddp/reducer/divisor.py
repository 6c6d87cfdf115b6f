"""What the sum of gradients over the ranks is divided by."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bucketddp.layout.options import DivideBy
from lightning_bucketddp.peers.control import ControlExchange, Report
from lightning_bucketddp.reducer.participant import Participant, Settled
from lightning_bucketddp.reducer.state import Pass, Role


class GradientDivisor(Participant):
    """Turns the mean over all ranks, which is what collectives give, into what was asked for.

    Args:
        divide_by: What was asked for.
        rank: This rank.
        world_size: How many ranks there are.

    Attributes:
        divide_by_active: Whether ranks that have run out of data are left out of the mean.
        tokens: How many tokens this rank's gradients were summed over since the last reduction, as far as the host
            knows.
        tokens_on_device: More of them; an int64 tensor of no dimension.
        factor: What the last reduction multiplied the mean over all ranks by; None for nothing.
    """

    def __init__(self, divide_by: DivideBy, rank: int, world_size: int) -> None:
        self._divide_by = divide_by
        self._rank = rank
        self._world_size = world_size
        self.divide_by_active = False
        self.tokens = 0
        self.tokens_on_device: Tensor | None = None
        self._of_local_passes: tuple[int, Tensor | None] = (0, None)
        self._counted = self._counted_since = False
        self._synchronised = False
        self._uncleared: str | None = None
        self.factor: float | Tensor | None = None

    def look(self, uncleared: str | None, holds_gradients: bool) -> None:
        """See what is there before backward.

        Args:
            uncleared: A parameter with the gradient of an earlier pass, which would be rescaled once more.
            holds_gradients: Whether any accumulated since the last reduction; if not, tokens counted so far are gone.
        """
        self._uncleared = uncleared
        if not holds_gradients:
            self._drop_local_tokens()

    def opened(self, it: Pass) -> None:
        """Require gradients that were cleared, and tokens that were counted.

        Raises:
            RuntimeError: If not, where the sum is not divided by the world size.
        """
        self._synchronised = it.synchronised
        if self._uncleared is not None:
            raise RuntimeError(
                f"rank {self._rank}: expected cleared gradients before a pass whose sum is not divided by the world "
                f"size, found {self._uncleared!r} with the gradient of an earlier one, which would be rescaled once "
                "more; call optimizer.zero_grad() after each step"
            )
        counts = it.synchronised and it.role is Role.ACTIVE
        if counts and self._divide_by == "tokens" and not self._counted:
            raise RuntimeError(
                f"rank {self._rank}: expected count_tokens() before each synchronised backward with "
                'gradient_divide_by="tokens", found no call since the last one; call it with 0 for a batch without any'
            )

    def backward_ended(self, raised: bool) -> None:
        """What was counted before the end of a local pass belongs to gradients that are there now."""
        self._uncleared = None
        if not raised and not self._synchronised:
            self._of_local_passes = (self.tokens, self.tokens_on_device)
            self._counted_since = False

    def report(self, report: Report) -> None:
        """Report the tokens."""
        report.tokens, report.tokens_on_device = self.tokens, self.tokens_on_device

    def settle(self, settled: Settled) -> None:
        """Rescale what was reduced."""
        factor = self.factor = self._factor(settled.exchange)
        if factor is not None:
            for bucket in settled.buckets.active:
                bucket.flat.mul_(factor.to(bucket.flat.device) if isinstance(factor, Tensor) else factor)

    def ended(self) -> None:
        """Forget the tokens of gradients that have been reduced."""
        self.tokens, self.tokens_on_device = 0, None
        self._of_local_passes = (0, None)
        self._counted = self._counted_since = False

    def _drop_local_tokens(self) -> None:
        """The gradients of the local passes since the last reduction were dropped, and their tokens are with them."""
        tokens, on_device = self._of_local_passes
        self.tokens -= tokens
        if on_device is not None and self.tokens_on_device is not None:
            self.tokens_on_device = self.tokens_on_device - on_device
        self._of_local_passes = (0, None)
        self._counted = self._counted_since

    @property
    def rescales(self) -> bool:
        """Whether another divisor than the world size was asked for."""
        return self._divide_by != "world_size"

    def count_tokens(self, tokens: float | Tensor) -> None:
        """Adds to the number of tokens that this rank's gradients are summed over.

        Raises:
            ValueError: If the number is negative or not whole, as far as the host knows it.
            RuntimeError: If gradients are divided by something else.
        """
        if self._divide_by != "tokens":
            raise RuntimeError(
                'expected gradient_divide_by="tokens" where tokens are counted, found '
                f"gradient_divide_by={self._divide_by!r}"
            )
        if isinstance(tokens, Tensor) and tokens.device.type == "cpu":
            tokens = tokens.item()
        if isinstance(tokens, Tensor):
            more = tokens.detach().to(torch.int64).reshape(())
            self.tokens_on_device = more.clone() if self.tokens_on_device is None else self.tokens_on_device + more
        elif not (tokens >= 0 and tokens % 1 == 0):  # NaN and Inf are neither
            raise ValueError(f"expected a whole number of tokens, found {tokens}")
        else:
            self.tokens += int(tokens)
        self._counted = self._counted_since = True

    def require_root(self, name: str) -> None:
        """Requires that nothing but the mean was asked for, in a backward whose beginning nobody saw.

        Args:
            name: The first parameter that got a gradient.

        Raises:
            RuntimeError: If not.
        """
        if self.rescales:
            raise RuntimeError(
                f"rank {self._rank}: expected a backward by way of what forward returned, or inside backward_pass(), "
                f"where gradients are divided by {self._divide_by!r}; found one by neither, in which parameter "
                f"{name!r} got a gradient"
            )

    def _factor(self, exchange: ControlExchange) -> float | Tensor | None:
        """What the mean over all ranks is to be multiplied by; None for nothing.

        Args:
            exchange: The control vector of the pass, which has been waited for.
        """
        if self._divide_by == "tokens":
            tokens = exchange.tokens()  # not in torch's default dtype, which may be of low precision
            return self._world_size / tokens.to(torch.float32 if tokens.device.type == "mps" else torch.float64)
        if isinstance(self._divide_by, int):
            return self._world_size / self._divide_by
        if self.divide_by_active and (without_data := exchange.read().ranks_out_of_data):
            return self._world_size / (self._world_size - without_data)
        return None
