"""Whether the ranks share one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from lightning_bucketddp.peers.peers import Peers


def on_one_machine(peers: Peers) -> bool:
    """Whether all ranks share one machine; the same on every rank. All ranks must call this.

    They do if all have the same host name. They do not if a launcher has started only some of the ranks here.
    """
    machines = set(peers.exchange("the machine", machine_name(peers.world_size, os.environ)))
    return len(machines) == 1 and machines != {""}  # some rank knows of ranks on other hosts


def machine_name(world_size: int, environment: Mapping[str, str]) -> str:
    """The name of this host; empty if this rank knows of ranks on other hosts.

    Args:
        world_size: Number of ranks in the group.
        environment: The environment variables. Launchers such as ``torchrun`` set ``LOCAL_WORLD_SIZE``, the number of
            ranks that they started here.
    """
    started_here = environment.get("LOCAL_WORLD_SIZE", "")
    if started_here.isdecimal() and int(started_here) < world_size:
        return ""
    return socket.gethostname()
