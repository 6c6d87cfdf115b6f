"""Ending what this process does in a process group, so that nobody stays blocked in it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_UNUSED_TAG = 2**30


def abort(group: dist.ProcessGroup) -> None:
    """Make blocked collectives raise, here and on ranks that wait for this one. The group is of no use afterwards.

    May be called from any thread. gloo's own ``abort()`` leaves a blocked rank blocked. But gloo closes all connections
    of a group when one of its receives is not served in time.
    """
    with suppress(RuntimeError):  # without a backend for the CPU, or aborted before
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    with suppress(RuntimeError):
        group.abort()
