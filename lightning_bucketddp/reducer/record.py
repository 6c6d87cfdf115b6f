"""What happened in a pass, for people: a frozen record, its table, and log lines.

``TORCH_DISTRIBUTED_DEBUG`` (or ``torch.distributed.set_debug_level``) decides what the logger ``lightning_bucketddp``
gets, at level INFO; a rank may have another setting than the others, as nothing here is sent:

    OFF       nothing
    INFO      one line whenever gradients are laid out
    DETAIL    the table of each synchronised pass as well

All times are the host's, by ``time.perf_counter``. On accelerators a collective is launched, and waited for, long
before the device gets to it; a profiler tells when.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from lightning_bucketddp.comm.groups import debug_level
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.layout.plan import Bucket, Layout

logger = logging.getLogger("lightning_bucketddp")


@dataclass(frozen=True)
class BucketRecord:
    """One bucket in a synchronised pass.

    Attributes:
        index: Its place in the layout, ``BucketDDP.layout.buckets``.
        parameters: Qualified names of its parameters, by offset.
        dtype: Of the gradients.
        device: Of the gradients, as a string.
        nbytes: Bytes that were reduced, padding included.
        launched_early: Whether its collective was started before backward had ended.
        launched_at: When it was started, in seconds since the pass opened.
    """

    index: int
    parameters: tuple[str, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    launched_early: bool
    launched_at: float


@dataclass(frozen=True)
class PassRecord:
    """What this rank saw of a synchronised pass; ``str()`` gives a table.

    Attributes:
        number: Which synchronised pass, counted from 0, as in errors.
        rank: This rank.
        world_size: Number of ranks.
        relaid: Whether gradients have been laid out anew since the record before.
        layouts: How many layouts there have been so far, the first included.
        local_passes: Passes inside ``no_sync`` since the reduction before.
        buckets: The buckets that were reduced, in launch order.
        control_nbytes: Bytes of the control vector, which is reduced behind the last bucket.
        sparse_nbytes: Bytes that this rank received for parameters with sparse gradients, in whichever layout.
        backward_seconds: From the opening to the end of backward. A pass opens with the first gradient in plain
            PyTorch, and before backward in a Trainer, in ``backward_pass`` or with ``find_unused_parameters``.
        exposed_seconds: From the end of backward until the gradients were there: launching what was left, and waiting
            for the buckets, the control vector and, where there are any, sparse gradients and the order of readiness.
        unused_here: Parameters that were trainable since the reduction before and had no gradient on this rank.
        unused_everywhere: Those of them that had none on any rank.
    """

    number: int
    rank: int
    world_size: int
    relaid: bool
    layouts: int
    local_passes: int
    buckets: tuple[BucketRecord, ...]
    control_nbytes: int
    sparse_nbytes: int
    backward_seconds: float
    exposed_seconds: float
    unused_here: tuple[str, ...]
    unused_everywhere: tuple[str, ...]

    @property
    def grad_nbytes(self) -> int:
        """Bytes of gradients that were reduced in buckets, padding included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def __str__(self) -> str:
        early = sum(bucket.launched_early for bucket in self.buckets)
        relaid = ", new in this pass" if self.relaid else ""
        lines = [
            f"pass {self.number}, rank {self.rank} of {self.world_size}: backward "
            f"{self.backward_seconds * 1e3:.3f} ms, exposed {self.exposed_seconds * 1e3:.3f} ms (host time)",
            f"  {_size(self.grad_nbytes)} in {len(self.buckets)} buckets, {early} launched early; control vector "
            f"{_size(self.control_nbytes)}; layout {self.layouts}{relaid}; {self.local_passes} local passes before",
        ]
        if self.sparse_nbytes:
            lines.append(f"  {_size(self.sparse_nbytes)} received for sparse gradients")
        row = "  {:>6}  {:>12}  {:5}  {:>10}  {:8}  {:8}  {}".format
        if self.buckets:
            lines.append(row("bucket", "launched", "", "size", "dtype", "device", "parameters"))
        for bucket in self.buckets:
            at, when = f"{bucket.launched_at * 1e3:.3f} ms", "early" if bucket.launched_early else ""
            size, dtype = _size(bucket.nbytes), str(bucket.dtype).removeprefix("torch.")
            lines.append(row(bucket.index, at, when, size, dtype, bucket.device, _range(bucket.parameters)))
        if self.unused_here:
            lines.append(f"  without a gradient on this rank: {', '.join(self.unused_here)}")
        if self.unused_everywhere:
            lines.append(f"  without a gradient on any rank: {', '.join(self.unused_everywhere)}")
        return "\n".join(lines)


class PassNotes:
    """What is written down while a pass runs: a few times and references; :meth:`record` works the rest out.

    Made when the pass opens.

    Args:
        number: Which synchronised pass.
        layout: The layout of this pass.
        slots: The parameters.
        trainable: The parameters that were trainable since the reduction before.
        layouts: How many layouts there have been.
        before: The notes of the pass before; not kept.
        local_passes: Passes inside ``no_sync`` since the reduction before.

    Attributes:
        backward_ended: When backward had ended, on ``time.perf_counter``.
        used_somewhere: Tells whether any rank used a slot; None while not known, as where this rank used all of them.
    """

    def __init__(
        self,
        number: int,
        layout: Layout,
        slots: SlotTable,
        trainable: TrainableSet,
        layouts: int,
        before: PassNotes | None,
        local_passes: int,
    ) -> None:
        self._opened = time.perf_counter()
        self._number = number
        self._layout = layout
        self._slots = slots
        self._trainable = trainable
        self._layouts = layouts
        self._relaid = layouts != (before._layouts if before is not None else 1)
        self._local_passes = local_passes
        self.backward_ended = self._opened
        self.used_somewhere: Callable[[int], bool] | None = None

    def end(
        self,
        launches: Sequence[tuple[int, float]],
        *,
        early: int,
        used: Collection[int],
        sparse_used: Collection[int],
        sparse_used_somewhere: Collection[int],
        sparse_nbytes: int,
        control_nbytes: int,
    ) -> None:
        """Called when the last wait is over, before anything is reset.

        Args:
            launches: Index and time of launch of each bucket, in launch order.
            early: How many of them were launched before backward ended.
            used: Slots with a gradient on this rank; kept as it is.
            sparse_used: Parameters without slot that had a gradient on this rank; kept as it is.
            sparse_used_somewhere: Those that had one on any rank.
            sparse_nbytes: Bytes received for parameters without slot.
            control_nbytes: Bytes of the control vector.
        """
        self._ended = time.perf_counter()
        self._launches = launches
        self._early = early
        self._used = used
        self._sparse_used = sparse_used
        self._sparse_used_somewhere = sparse_used_somewhere
        self._sparse_nbytes = sparse_nbytes
        self._control_nbytes = control_nbytes

    def record(self, rank: int, world_size: int) -> PassRecord:
        """The record of this pass, which must have ended."""
        layout = self._layout
        buckets = []
        for place, (index, launched) in enumerate(self._launches):
            bucket = layout.buckets[index]
            buffer = layout.buffers[bucket.buffer]
            buckets.append(
                BucketRecord(
                    index=index,
                    parameters=_names(layout, bucket),
                    dtype=buffer.dtype,
                    device=buffer.device,
                    nbytes=layout.bucket_nbytes(bucket),
                    launched_early=place < self._early,
                    launched_at=launched - self._opened,
                )
            )
        here, everywhere = self._unused()
        return PassRecord(
            number=self._number,
            rank=rank,
            world_size=world_size,
            relaid=self._relaid,
            layouts=self._layouts,
            local_passes=self._local_passes,
            buckets=tuple(buckets),
            control_nbytes=self._control_nbytes,
            sparse_nbytes=self._sparse_nbytes,
            backward_seconds=self.backward_ended - self._opened,
            exposed_seconds=self._ended - self.backward_ended,
            unused_here=here,
            unused_everywhere=everywhere,
        )

    def _unused(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the parameters without a gradient on this rank, and on any rank; in registration order."""
        here: list[str] = []
        everywhere: list[str] = []
        for index, name in enumerate(self._slots.names):
            if not self._trainable[index]:
                continue
            slot = self._slots.slot_of(index)
            if slot is None:
                used, somewhere = index in self._sparse_used, index in self._sparse_used_somewhere
            else:
                used = slot in self._used
                somewhere = used or (self.used_somewhere is not None and self.used_somewhere(slot))
            if not used:
                here.append(name)
            if not somewhere:
                everywhere.append(name)
        return tuple(here), tuple(everywhere)


def log_layout(layout: Layout, rank: int, pass_number: int) -> None:
    """Logs where gradients lie from a pass on, if the debug level is INFO or DETAIL."""
    if debug_level() == "OFF":
        return
    buckets = [f"{_size(layout.bucket_nbytes(bucket))} {_range(_names(layout, bucket))}" for bucket in layout.buckets]
    logger.info(
        "rank %d: gradients of %d parameters laid out for pass %d: %s in %d buckets, in launch order: %s",
        rank,
        len(layout.slots),
        pass_number,
        _size(layout.nbytes),
        len(buckets),
        "; ".join(buckets),
    )


def log_pass(notes: PassNotes, rank: int, world_size: int) -> None:
    """Logs the table of a pass, if the debug level is DETAIL."""
    if debug_level() == "DETAIL":
        logger.info("%s", notes.record(rank, world_size))


def _names(layout: Layout, bucket: Bucket) -> tuple[str, ...]:
    return tuple(layout.slots[slot].spec.name for slot in bucket.slots)


def _size(nbytes: int) -> str:
    if nbytes < 1024:
        return f"{nbytes} B"
    return f"{nbytes / 1024:.1f} KiB" if nbytes < 1024 * 1024 else f"{nbytes / 1024 / 1024:.1f} MiB"


def _range(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
