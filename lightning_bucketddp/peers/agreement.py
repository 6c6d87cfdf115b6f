"""The errors of wrapping and of other ranks, and the entries that ranks compare to agree on something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WrapError(ValueError, RuntimeError):
    """A module that cannot be wrapped, or not with these options.

    torch's DDP raises a RuntimeError for some of these and a ValueError for others. Code may catch either.
    """


class RankMismatchError(ValueError, RuntimeError):
    """Ranks disagree on something that must be the same on all of them."""


class PeerFailureError(RuntimeError):
    """Another rank failed, so that this rank cannot complete its pass."""


class Entry(NamedTuple):
    """One line in a comparison of ranks.

    Attributes:
        subject: Such as ``"parameter 'net.0.weight'"``.
        value: This rank's, such as ``"shape (4, 3), torch.float32"``.
    """

    subject: str
    value: str


def first_difference(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]], other: int) -> str:
    """The first difference of two lists of entries, in words.

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
