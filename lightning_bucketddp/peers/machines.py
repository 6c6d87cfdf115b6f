"""Whether the ranks share one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from lightning_bucketddp.peers.peers import Peers


class Node(NamedTuple):
    """This rank's node, where whoever made the ranks says that there are several nodes.

    Attributes:
        rank: The node's number.
        ranks: How many ranks run on it.
    """

    rank: int
    ranks: int


def on_one_machine(peers: Peers, node: Node | None = None) -> bool:
    """Whether all ranks share one machine; the same on every rank. All ranks must call this.

    They do if all are on the same machine by name. They do not if only some of the ranks were started here.

    Args:
        peers: The other ranks.
        node: This rank's node, if that is known.
    """
    machines = set(peers.exchange("the machine", machine_name(peers.world_size, os.environ, node)))
    return len(machines) == 1 and machines != {""}  # some rank knows of ranks on other machines


def machine_name(world_size: int, environment: Mapping[str, str], node: Node | None = None) -> str:
    """The name of this machine; empty if this rank knows of ranks on other machines.

    A known node decides. Else the launcher's variable does, and else the host name: cloned machines and containers may
    bear the same one.

    Args:
        world_size: Number of ranks in the group.
        environment: The environment variables. Launchers such as ``torchrun`` set ``LOCAL_WORLD_SIZE``, the number of
            ranks that they started here.
        node: This rank's node, if that is known.
    """
    if node is not None:
        return "" if node.ranks < world_size else f"node {node.rank}"
    started_here = environment.get("LOCAL_WORLD_SIZE", "")
    if started_here.isdecimal() and int(started_here) < world_size:
        return ""
    return socket.gethostname()
