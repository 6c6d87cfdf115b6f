"""The only caller of ``torch.distributed``. What differs per backend is decided here, once."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not in __all__

POLL_SECONDS = 0.5
"""How often a rank that waits for a collective looks whether another rank has failed."""

_AVERAGED_BY_THE_BACKEND = (torch.float32, torch.float64, torch.bfloat16)


class Pending:
    """A collective that was started.

    Args:
        work: What torch returned for it; None if there was nothing to do (one rank).
        after: Run once, on the waiting thread, when the collective has completed.
        blocking: Whether the host must wait for it (CPU tensors). On accelerators waiting only makes
            the current stream wait.
        left_behind: Called with the error when a wait ends with one, the collective being under way still.
    """

    def __init__(
        self,
        work: dist.Work | None = None,
        after: Callable[[], object] | None = None,
        blocking: bool = False,
        left_behind: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._left_behind = left_behind
        self._work = work
        self._after = after
        self._blocking = blocking

    def done(self) -> bool:
        """Whether it was waited for, or has completed by itself."""
        return self._work is None or self._work.is_completed()

    def wait(self, on_idle: Callable[[], None] | None = None) -> None:
        """Waits for the collective, in the sense of the device (host or current stream).

        Args:
            on_idle: Called every :data:`POLL_SECONDS` while the host waits; an exception it raises
                ends the wait.

        Raises:
            RuntimeError: What the backend raises when a peer is gone or the time is up.
        """
        try:
            self._wait(on_idle)
        except BaseException as error:
            self._left_behind(str(error))
            raise
        self._work = None
        if self._after is not None:
            self._after()
            self._after = None

    def _wait(self, on_idle: Callable[[], None] | None) -> None:
        work = self._work
        if work is not None:
            if on_idle is not None and self._blocking and not work.is_completed():
                done = threading.Event()
                work.get_future().add_done_callback(lambda _: done.set())
                while not done.wait(POLL_SECONDS):
                    on_idle()
            work.wait()


_left_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class Collectives:
    """Collectives of one process group.

    Args:
        process_group: The group; None for the default one.

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
        self._group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"process {dist.get_rank()} is not a member of the process group it was given")
        self.world_size = dist.get_world_size(group)
        self._backend_averages = False

    @property
    def name(self) -> str:
        """The group's name, the same on all its ranks and on no other group of the same store.

        torch numbers groups, and starts again after ``destroy_process_group()``: the members tell such groups apart.
        """
        members = hashlib.sha256(repr(dist.get_process_group_ranks(self._group)).encode()).hexdigest()
        return f"{self._group.group_name}/{members[:16]}"

    def leave_behind(self, why: str) -> None:
        """Remembers that collectives are under way in the group which not all ranks will join.

        Whatever is started after them would be paired with them.

        Args:
            why: What happened.
        """
        _left_behind[self._group] = why

    def require_nothing_left_behind(self) -> None:
        """Requires that the group is fit for use in this process.

        Raises:
            RuntimeError: If collectives of a failed pass are under way.
        """
        why = _left_behind.get(self._group)
        if why is not None:
            raise RuntimeError(
                "expected a process group without unfinished collectives, found one in which a pass failed half-way "
                f"({why}); start the processes anew, or make a new group"
            )

    def store(self, prefix: str) -> Store:
        """The group's key-value store, with ``prefix`` before every key."""
        return PrefixStore(prefix, self._group.get_group_store())

    def probe(self, device: torch.device) -> None:
        """Finds out whether the backend knows ``ReduceOp.AVG``. All ranks must call this, before any average.

        Args:
            device: The device whose tensors travel.

        Raises:
            RuntimeError: What the backend raises when a peer is gone or the time is up.
        """
        if self.world_size == 1:
            return
        value = torch.full((1,), float(self.rank), device=device)
        try:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=self._group)
        except (RuntimeError, ValueError) as error:
            if "AVG" not in str(error):
                raise
            return  # refused by name, on every rank alike
        self._backend_averages = value.item() == (self.world_size - 1) / 2

    def all_reduce_mean(self, flat: Tensor) -> Pending:
        """Starts replacing ``flat`` (1-D, floating) by its mean over the ranks, in place.

        fp16 is divided before it is summed: a sum of many ranks overflows at 65504.
        """
        if self._nothing_to_do(flat):
            return Pending()
        if flat.is_complex():
            flat = torch.view_as_real(flat)
        after = None
        op = dist.ReduceOp.SUM
        if flat.dtype is torch.float16:
            flat.mul_(1.0 / self.world_size)
        elif self._backend_averages and flat.dtype in _AVERAGED_BY_THE_BACKEND:
            op = dist.ReduceOp.AVG
        else:

            def after() -> object:
                return flat.mul_(1.0 / self.world_size)

        return self._started(dist.all_reduce(flat, op=op, group=self._group, async_op=True), after, flat)

    def all_reduce_sum(self, tensor: Tensor) -> Pending:
        """Starts replacing ``tensor`` by its sum over the ranks, in place."""
        if self._nothing_to_do(tensor):
            return Pending()
        return self._started(dist.all_reduce(tensor, group=self._group, async_op=True), None, tensor)

    def broadcast(self, tensor: Tensor) -> Pending:
        """Starts replacing ``tensor`` by the group's rank 0's, in place."""
        if self._nothing_to_do(tensor):
            return Pending()
        work = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
        return self._started(work, None, tensor)

    def _nothing_to_do(self, tensor: Tensor) -> bool:
        return self.world_size == 1 or tensor.numel() == 0

    def _started(self, work: dist.Work | None, after: Callable[[], object] | None, tensor: Tensor) -> Pending:
        return Pending(work, after, tensor.device.type == "cpu", self.leave_behind)
