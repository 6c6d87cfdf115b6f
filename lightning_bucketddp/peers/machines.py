"""The node on which each rank runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from lightning_bucketddp.comm.groups import Group
from lightning_bucketddp.layout.nodes import Nodes
from lightning_bucketddp.peers.peers import Peers


class Node(NamedTuple):
    """This rank's node, where whoever made the ranks says that there are several nodes.

    Attributes:
        rank: The node's number.
        ranks: How many ranks run on it.
    """

    rank: int
    ranks: int


def nodes_of(group: Group, peers: Peers, node: Node | None = None) -> Nodes:
    """The nodes of all ranks; the same on every rank. All ranks must call this.

    Args:
        group: The group.
        peers: Its ranks.
        node: This rank's node, if that is known.
    """
    return Nodes(tuple(peers.exchange("the node", node_name(*group.among_all(), os.environ, node))))


def node_name(rank: int, processes: int, environment: Mapping[str, str], node: Node | None = None) -> str:
    """The name of this rank's node.

    A known node decides. Else the launcher's variables do, and else the host name: cloned machines and containers may
    bear the same one.

    Args:
        rank: This process's rank among all processes.
        processes: Number of all processes.
        environment: The environment variables. Launchers such as ``torchrun`` set ``LOCAL_WORLD_SIZE``, the number of
            ranks that they started here, and ``LOCAL_RANK``, this rank's place among them.
        node: This rank's node, if that is known.
    """
    if node is not None:
        return f"node {node.rank} of {node.ranks} ranks"
    started, place = (environment.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    started_here = int(started) if started.isdecimal() else 0
    if not 0 < started_here < processes:
        return f"host {socket.gethostname()}"
    known = place.isdecimal() and int(place) < started_here
    return f"{started_here} ranks from {rank - (int(place) if known else rank % started_here)} on"
