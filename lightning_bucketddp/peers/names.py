"""Ranks in words: their numbers, and where their processes run."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

Process = tuple[str, int]
"""A host's name and a process id."""

_UNKNOWN: Process = ("", 0)
_MOST_HOSTS = 4
"""Of how many hosts the words tell. More would hide the rest of a message."""


def this_process() -> Process:
    """Where this rank runs."""
    return socket.gethostname(), os.getpid()


def in_words(ranks: Sequence[int], processes: Mapping[int, Process] = MappingProxyType({})) -> str:
    """Ascending ranks in words, such as ``ranks 0 to 6, 9`` and ``rank 1 (host node17, pid 4711)``.

    Args:
        ranks: The ranks.
        processes: The processes of ranks, as far as they are known.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(processes.get(rank, _UNKNOWN)[0], []).append(rank)
    if len(by_host) > _MOST_HOSTS:
        return in_words(ranks)
    return ", ".join(_on_one_host(part, processes) for part in by_host.values()) or "no rank"


def _on_one_host(ranks: Sequence[int], processes: Mapping[int, Process]) -> str:
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    words = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    many = "s" if len(ranks) > 1 else ""
    host, _ = processes.get(ranks[0], _UNKNOWN)
    pids = ", ".join(str(processes[rank][1]) for rank in ranks) if host else ""
    return f"rank{many} {words}" + (f" (host {host}, pid{many} {pids})" if host else "")
