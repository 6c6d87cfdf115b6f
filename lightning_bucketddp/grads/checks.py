"""The check behind ``max_abs_grad``."""

from __future__ import annotations

import math


class GradientError(RuntimeError):
    """A gradient is not finite or larger than ``max_abs_grad``, or more than ``max_skipped`` steps were skipped."""


def require_sound(largest: float, limit: float, rank: int, name: str) -> None:
    """Require that a gradient is finite and within a limit.

    Args:
        largest: Its largest absolute value; NaN if it holds any.
        limit: The limit.
        rank: The rank of the gradient.
        name: The parameter's name.

    Raises:
        GradientError: If it is not.
    """
    if math.isfinite(largest) and largest <= limit:
        return
    what = "NaN" if math.isnan(largest) else "Inf" if math.isinf(largest) else f"{largest:.4g} in absolute value"
    raise GradientError(
        f"rank {rank}: found {what} in the gradient of parameter {name!r} before it was averaged, where "
        f"max_abs_grad={limit} was asked for; look at this rank's batch and loss"
    )
