"""Process groups: the available backends, a second group of all processes, the abort of a group."""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_UNUSED_TAG = 2**30

_parts: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakKeyDictionary()

# Held weakly: torch holds a group until it is destroyed, and its threads must not outlive that.
_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def belongs_to(part: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Note that a group was made of the ranks of another one, so that :func:`abort` aborts both."""
    _parts.setdefault(group, weakref.WeakSet()).add(part)


def available_backends() -> list[str]:
    """Names of the communication backends that this build of torch has."""
    if not dist.is_available():
        return []
    return [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]


def debug_level() -> str:
    """Level of torch's debugging in this process: ``"OFF"``, ``"INFO"`` or ``"DETAIL"``."""
    return dist.get_debug_level().name  # type: ignore[attr-defined]  # documented, not in __all__


def group_apart(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A second group of all processes, made once. Its collectives have an order of their own.

    All processes must call this at the same point.

    Args:
        timeout: How long its collectives wait, if this call makes the group. None for torch's default.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _apart.get(world)
    group = known() if known is not None else None
    if group is None:
        group = dist.new_group(timeout=timeout)
        _apart[world] = weakref.ref(group)
        belongs_to(group, world)
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the collectives of a group wait; None, which means torch's default, where torch does not tell.

    This is private to torch, which gives groups of some ranks its own default, and not that of all ranks.
    """
    for device in getattr(group, "_device_types", ()):
        with suppress(AttributeError, RuntimeError):
            return group._get_backend(device).options._timeout
    return None


def started_collectives(group: dist.ProcessGroup | None) -> int:
    """How many collectives this rank has started in a group; 0 where torch does not tell.

    The count is private to torch. Nothing public tells two barriers in the same line apart.
    """
    with suppress(RuntimeError):  # a backend that does not count
        return int(getattr(group, "_get_sequence_number_for_group", int)())
    return 0


def abort(group: dist.ProcessGroup) -> None:
    """Make blocked collectives raise, here and on ranks that wait for this one. The group cannot be used afterwards.

    Groups that were made of its ranks are aborted as well. Call it from any thread. gloo's own ``abort()`` leaves a
    blocked rank blocked. But gloo closes all connections of a group when one of its receives takes longer than its
    timeout.
    """
    for part in list(_parts.get(group, ())):
        abort(part)
    with suppress(RuntimeError):  # without a backend for the CPU, or aborted before
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    with suppress(RuntimeError):
        group.abort()
