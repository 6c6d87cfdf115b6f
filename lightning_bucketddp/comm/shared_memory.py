"""Memory that the ranks of a node share.

One rank has the system make it, without a name (``memfd_create``, on Linux): it goes with the last process that has it.
The others open it through ``/proc``. Where they cannot, as in containers of their own, there is none.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TOKEN_BYTES = 16


class _Place(NamedTuple):
    pid: int
    handle: int
    token: bytes


def shared_memory(nbytes: int, exchange: Callable[[Any], list[Any]], is_maker: bool) -> Tensor | None:
    """Share memory with other ranks. All of them must call this.

    Args:
        nbytes: Its size, the same on all ranks.
        exchange: Exchanges an object with the other ranks; returns every rank's.
        is_maker: Whether this rank makes the memory; one does.

    Returns:
        Bytes (1-D); None, on all ranks alike, if some rank cannot open the memory.

    Raises:
        OSError: If the system has no memory.
    """
    if sys.platform != "linux":
        return None
    with ExitStack() as until_all_have_it:
        mine: _Place | None = None
        if is_maker:
            mine = _Place(os.getpid(), os.memfd_create("lightning_bucketddp"), os.urandom(_TOKEN_BYTES))
            until_all_have_it.callback(os.close, mine.handle)
            os.truncate(mine.handle, nbytes)
            os.pwrite(mine.handle, mine.token, 0)
        (place,) = filter(None, exchange(mine))
        memory = _opened(place, nbytes)
        if not all(exchange(memory is not None)):
            return None
    assert memory is not None
    return torch.frombuffer(memory, dtype=torch.uint8)


def _opened(place: _Place, nbytes: int) -> mmap.mmap | None:
    """Open memory; None if that cannot be, or if it is not the maker's but that of a process with the same number."""
    try:
        with open(f"/proc/{place.pid}/fd/{place.handle}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError):
        return None
    return memory if memory[:_TOKEN_BYTES] == place.token else None
