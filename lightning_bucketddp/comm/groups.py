"""Process groups: a group as its ranks know it, groups of some of its ranks, a second group of all, the abort."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not in __all__

_UNUSED_TAG = 2**30

ABORT_SECONDS = 10.0
"""How long to wait for an abort. NCCL's may wait for a rank of the same machine that is gone."""

_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]]
_subgroups = weakref.WeakKeyDictionary()
"""The groups that were made of a group's ranks."""

_left_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""Why collectives are under way in a group that some of its ranks will never join."""

# Held weakly: torch holds a group until it is destroyed, and its threads must not outlive that.
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, weakref.ref[dist.ProcessGroup]]]
_kept = weakref.WeakKeyDictionary()
"""Groups that were made of a group's ranks, and that later wrappers use again."""


class Group:
    """A process group, of which this process is a member.

    Args:
        process_group: The group; None for the default one.

    Attributes:
        group: The process group.
        rank: This process's rank in it.
        world_size: How many ranks it has.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialised.
        ValueError: If this process is not in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "expected torch.distributed to be initialised, found no default process group; call "
                "torch.distributed.init_process_group() first (a Trainer with strategy='bucketddp' does)"
            )
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        _leave_groups_to_this_process()
        self.group: dist.ProcessGroup = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"process {dist.get_rank()} is not a member of the process group it was given")
        self.world_size = dist.get_world_size(group)

    @property
    def name(self) -> str:
        """The group's name: the same on all its ranks, and another on each group of the same store.

        torch numbers groups, and starts again after ``destroy_process_group()``. Their members tell such groups apart.
        """
        members = hashlib.sha256(repr(dist.get_process_group_ranks(self.group)).encode()).hexdigest()
        return f"{self.group.group_name}/{members[:16]}"

    def has_all_processes(self) -> bool:
        """Whether the group has all processes, in their order. torch makes groups of some ranks together with all."""
        return dist.get_process_group_ranks(self.group) == list(range(dist.get_world_size()))

    def among_all(self) -> tuple[int, int]:
        """This process's rank among all processes, and their number."""
        return dist.get_rank(), dist.get_world_size()

    def is_default(self) -> bool:
        """Whether the group is the default one, of all processes."""
        return self.group is dist.group.WORLD

    def store(self, prefix: str) -> Store:
        """The group's key-value store, with ``prefix`` before every key."""
        return PrefixStore(prefix, self.group.get_group_store())

    def leave_behind(self, why: str) -> None:
        """Note that collectives are under way which some ranks will never join.

        The next collectives of those ranks would be paired with them.

        Args:
            why: What happened.
        """
        _left_behind[self.group] = why

    def left_behind(self) -> str:
        """Why collectives of a failed pass are under way, in the group or in a subgroup; empty if none is."""
        return next(filter(None, map(_left_behind.get, (self.group, *_subgroups.get(self.group, ())))), "")

    def require_nothing_left_behind(self) -> None:
        """Require that no collectives of a failed pass are under way, in the group or in a subgroup.

        Raises:
            RuntimeError: If some are.
        """
        if why := self.left_behind():
            raise RuntimeError(
                "expected a process group without unfinished collectives, found one that was given up after a failure "
                f"({why}); start the processes anew, or make a new group"
            )


def subgroup_of(
    group: Group, members: Sequence[Sequence[int]], backend: str | None = None, number: int | None = None
) -> dist.ProcessGroup:
    """Make subgroups of a group, and return this rank's. All ranks of the group must call this.

    By one call where the backend splits communicators. Elsewhere torch makes one group after the other.

    Args:
        group: The group.
        members: Per new group, its ranks within the group. Every rank is in one of them.
        backend: The groups' backend; that of ``group`` if None.
        number: If given, the groups are kept for later calls with the same arguments.

    Raises:
        ValueError: If some processes are not in the group.
    """
    if not group.has_all_processes():
        raise ValueError(
            "expected a process group of all processes where groups are made of its ranks, found one of "
            f"{group.world_size} of {dist.get_world_size()} processes; use the default group, or leave out async_save"
        )
    ranks, given = [list(each) for each in members], backend
    if backend is None and not group.is_default():  # torch's default is the default group's
        backend = dist.get_backend_config(group.group)

    def make() -> dist.ProcessGroup:
        timeout = timeout_of(group.group)
        if given is None and splits(group.group):
            mine = dist.split_group(group.group, ranks, timeout=timeout)
        else:
            mine, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend)
        assert mine is not None, "every rank is in one of them"
        _belongs_to(mine, group.group)
        return mine

    return make() if number is None else _made_once(group.group, (str(ranks), backend, number), make)


def splits(group: dist.ProcessGroup) -> bool:
    """Whether ``dist.split_group`` can make subgroups of a group: an accelerator's alone, with a bound default group.

    A default group that was given a ``device_id`` is bound, and has its communicator already. Lightning gives one.
    """
    accelerator, world = torch.accelerator.current_accelerator(), dist.group.WORLD
    if accelerator is None or getattr(world, "bound_device_id", None) is None:
        return False
    if set(dist.get_backend_config(group).split(",")) != {f"{accelerator.type}:{dist.get_backend(group)}"}:
        return False
    with suppress(RuntimeError):  # no backend for it
        return bool(group._get_backend(accelerator).supports_splitting)
    return False


def _made_once(group: dist.ProcessGroup, key: object, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    kept = _kept.setdefault(group, {})
    made = kept[key]() if key in kept else None
    if made is None:
        made = make()
        kept[key] = weakref.ref(made)
    return made


@cache
def _leave_groups_to_this_process() -> None:
    """Have children that are forked, as data loaders' workers, free no group: it would wait for threads they lack."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=gc.freeze)


def end_subgroup(subgroup: dist.ProcessGroup) -> None:
    """Destroy a group that was made of another one's ranks, unless something is under way in it.

    gloo sends nothing for that. NCCL waits for the other ranks.
    """
    if _left_behind.get(subgroup) is None:
        with suppress(ValueError):  # it went with the default group
            dist.destroy_process_group(subgroup)


def _belongs_to(subgroup: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Note that a group was made of the ranks of another one: whoever aborts that aborts both."""
    _subgroups.setdefault(group, weakref.WeakSet()).add(subgroup)


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

    def make() -> dist.ProcessGroup:
        group = dist.new_group(timeout=timeout)
        _belongs_to(group, world)
        return group

    return _made_once(world, "apart", make)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the collectives of a group wait; None, which means torch's default, where torch does not tell.

    This is private to torch, which gives groups of some ranks its own default, and not that of all ranks.
    """
    cpu = torch.device("cpu")
    for device in (cpu, torch.accelerator.current_accelerator() or cpu):
        with suppress(AttributeError, RuntimeError):  # no backend for it
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

    Groups that were made of its ranks are aborted as well, all at once: on a device, the abort of one may wait for what
    runs in another. Call it from any thread.
    """
    groups = _with_subgroups(group)
    threads = [threading.Thread(target=_abort_alone, args=(each,), name="bucketddp-abort") for each in groups]
    for thread in threads:
        thread.daemon = True
        thread.start()
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _with_subgroups(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    yield group
    for subgroup in list(_subgroups.get(group, ())):
        yield from _with_subgroups(subgroup)


def _abort_alone(group: dist.ProcessGroup) -> None:
    """Abort a group. gloo's own ``abort()`` leaves a blocked rank blocked.

    But gloo closes all connections of a group when one of its receives takes longer than its timeout. A receive from
    a rank that has closed its connection raises at once, and closes no other one.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # no backend for the CPU, aborted before, or closed by that rank
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    with suppress(RuntimeError):
        group.abort()
