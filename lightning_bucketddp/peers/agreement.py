"""What ranks that agree on something compare, and the errors for ranks that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WrapError(ValueError, RuntimeError):
    """A module or its options that cannot be wrapped.

    torch's DDP raises a RuntimeError for some of these and a ValueError for others: code that catches either is right.
    """


class RankMismatchError(ValueError, RuntimeError):
    """Ranks disagree on something that must be the same on all of them."""


class PeerFailureError(RuntimeError):
    """Another rank failed in the pass that this rank is in, so that it cannot complete."""


class Entry(NamedTuple):
    """One line of what ranks compare.

    Attributes:
        subject: What it is about, e.g. ``"parameter 'net.0.weight'"``.
        value: What this rank has there, e.g. ``"shape (4, 3), torch.float32"``.
    """

    subject: str
    value: str


def first_difference(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]], other: int) -> str:
    """Where two lists of entries differ, in words.

    Args:
        first: Rank 0's.
        second: Another rank's.
        other: That rank.
    """
    for mine, theirs in zip(first, second, strict=False):
        if mine == theirs:
            continue
        if mine[0] == theirs[0]:
            return f"{mine[0]}: rank 0 has {mine[1]}, rank {other} has {theirs[1]}"
        return f"rank 0 has {mine[0]} ({mine[1]}) where rank {other} has {theirs[0]} ({theirs[1]})"
    longer, rank = (first, 0) if len(first) > len(second) else (second, other)
    extra = longer[min(len(first), len(second))]
    return f"only rank {rank} has {extra[0]} ({extra[1]})"
