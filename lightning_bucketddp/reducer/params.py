"""The module's parameters, as the reducer sees them."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from torch import nn

from lightning_bucketddp.peers.agreement import Entry


class Params(Protocol):
    """The module's parameters, looked up anew when the module has changed.

    Attributes:
        named: Each parameter once, in registration order.
        sparse: Names of parameters with sparse gradients.
        changes: How often parameters were taken in.
    """

    named: list[tuple[str, nn.Parameter]]
    sparse: frozenset[str]
    changes: int

    def changed(self) -> bool:
        """Whether parameters were added, removed, replaced or re-typed since they were looked up."""

    def take_in(self, trained: Callable[[], Container[int]]) -> None:
        """Look the parameters up anew; raises a WrapError if that cannot be.

        Args:
            trained: Gives the ids of the parameters that are trained or were.
        """

    def entries(self) -> list[Entry]:
        """The facts that must be the same on all ranks, line by line."""
