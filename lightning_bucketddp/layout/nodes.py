"""The nodes of a group's ranks: pure arithmetic, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten


@dataclass(frozen=True)
class Nodes:
    """The nodes on which ranks run.

    Attributes:
        names: By rank, the name of its node.
    """

    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return len(set(self.names))

    @property
    def one(self) -> bool:
        """Whether all ranks share one node."""
        return self.count == 1

    @property
    def ranks_each(self) -> int | None:
        """How many ranks each node has; None if nodes differ in that, or if a node's ranks do not follow each other."""
        size = len(self.names) // self.count
        in_turn = [self.names[rank // size * size] for rank in range(len(self.names))]
        return size if in_turn == list(self.names) and size * self.count == len(self.names) else None

    @property
    def described(self) -> str:
        """The ranks of each node, in words."""
        ranks: dict[str, list[str]] = {}
        for rank, name in enumerate(self.names):
            ranks.setdefault(name, []).append(str(rank))
        return shorten("; ".join(f"ranks {', '.join(each)} on one node" for each in ranks.values()), 200)
