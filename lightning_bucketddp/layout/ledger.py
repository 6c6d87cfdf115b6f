"""The ledger of bytes: what a collective sends between nodes and inside of them, by the backend's algorithm.

An all-reduce of B bytes on two nodes of two ranks, per node. In a ring, ranks send to the next one::

    rank                0   1 | 2   3
    a ring              -> -> | -> -> back       one rank of a node sends to the other node: 2 (N - 1) / N B leave it
    two levels          reduce-scatter inside; each rank's half as a ring of two; gather inside: 2 (M - 1) / M B
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
Algorithm = Literal["ring", "tree"]
"""How an all-reduce is done. gloo has rings; NCCL chooses, and has trees for all-reduces between nodes only."""

_IN_8_BITS = 33 / 128
"""Of the bytes in fp32: integers, and a step for each block."""


class Sent(NamedTuple):
    """Bytes that one node sends.

    Attributes:
        between: To other nodes.
        inside: From rank to rank.
    """

    between: float
    inside: float


def sent(kind: Kind, nbytes: float, nodes: Sequence[Hashable], algorithm: Algorithm = "ring") -> Sent:
    """What one collective sends, per node: the mean over the nodes of its group.

    Args:
        kind: The collective.
        nbytes: Bytes of the whole message: of an all-reduce's tensor, of all parts that a rank scatters or gathers.
        nodes: The node of each rank of the group, by rank.
        algorithm: How an all-reduce is done. A tree sends each byte up and down each edge between nodes, of which there
            is one less than nodes, and so inside of them.
    """
    ranks, count = len(nodes), len(set(nodes))
    if kind == "all_to_all":
        away = sum(one != other for one in nodes for other in nodes)
        each = nbytes / ranks
        return Sent(away * each / count, (ranks * (ranks - 1) - away) * each / count)
    if kind == "all_reduce" and algorithm == "tree":
        return Sent(2 * (count - 1) * nbytes / count, 2 * (ranks - count) * nbytes / count)
    away = sum(node != nodes[rank - 1] for rank, node in enumerate(nodes))
    each = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * nbytes
    return Sent(away * each / count, (ranks - away) * each / count)


def leaving(nodes: Sequence[Hashable]) -> dict[str, float]:
    """What leaves a node in a pass, by option, in units of the gradients' size in fp32: the mean over the nodes.

    Args:
        nodes: The node of each rank, by rank; as many ranks on each, one node after the other.
    """
    ring, across = (sent("all_reduce", 1, of).between for of in (nodes, range(len(set(nodes)))))
    one_level = sent("all_to_all", 0.5, nodes).between + sent("all_gather", 0.5, nodes).between
    return {
        "a ring of all ranks": ring,
        "trees": sent("all_reduce", 1, nodes, "tree").between,
        "two levels, `hierarchical=True`": across,
        "two levels, sharded, `hierarchical=True`": across,
        'two levels, `wire_dtype="bfloat16"`': across / 2,
        'two levels, sharded, `wire_dtype="bfloat16"`': across * 3 / 4,
        'two levels, `wire_dtype="int8"`': across * _IN_8_BITS,
        'two levels, sharded, `wire_dtype="int8"`': across * (1 + _IN_8_BITS) / 2,
        '`comm_hook="bf16"`': ring / 2,
        'one level, `wire_dtype="bfloat16"`': one_level,
    }
