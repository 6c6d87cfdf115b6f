"""The record of a pass, for people: frozen values, a table, pictures, and log lines.

``TORCH_DISTRIBUTED_DEBUG``, or ``torch.distributed.set_debug_level``, chooses the lines that the logger
``lightning_bucketddp`` gets at level INFO. Ranks may differ in it, as nothing here is sent:

    OFF       nothing
    INFO      one line whenever gradients are laid out
    DETAIL    the table of each synchronised pass as well

All times are the host's, by ``time.perf_counter``. On accelerators the host launches a collective, and waits for it,
long before the device runs it; a profiler shows the device's times.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_bucketddp.comm.groups import debug_level
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.plan import Layout, PlannedBucket, size_text
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.participant import Participant, PassResult
from lightning_bucketddp.reducer.sparse import SparseGrads
from lightning_bucketddp.reducer.state import Pass

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
        ready_at: When its last gradient was ready; ``launched_at`` if not all of its gradients came.
        done_at: When this rank saw that the collective was complete. It looks before each launch and at the end of
            backward, and waits after that. On accelerators it sees this when it has queued the wait.
    """

    index: int
    parameters: tuple[str, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    launched_early: bool
    launched_at: float
    ready_at: float
    done_at: float


@dataclass(frozen=True)
class PassRecord:
    """A synchronised pass as this rank saw it; ``str()`` gives a table.

    Attributes:
        number: Which synchronised pass, counted from 0, as in errors.
        rank: This rank.
        world_size: Number of ranks.
        rebuilt: Whether buckets were rebuilt since the record before.
        layouts: How many layouts there have been so far, the first included.
        local_passes: Local passes since the reduction before.
        buckets: The buckets that were reduced, in launch order.
        control_nbytes: Bytes of the control vector, which travels with the last bucket or behind it.
        sparse_nbytes: Bytes that this rank received for parameters with sparse gradients.
        backward_seconds: From the opening to the end of backward. A pass opens with the first gradient in plain
            PyTorch, and before backward in a Trainer, in ``backward_pass`` or with ``find_unused_parameters``.
        exposed_seconds: From the end of backward until gradients were published: launching the remaining buckets, and
            waiting for all collectives.
        unused_here: Parameters that were trainable since the reduction before and had no gradient on this rank.
        unused_everywhere: Parameters among these that had no gradient on any rank.
    """

    number: int
    rank: int
    world_size: int
    rebuilt: bool
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

    @property
    def early_launches(self) -> int:
        """How many buckets were launched before backward had ended."""
        return sum(bucket.launched_early for bucket in self.buckets)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the buckets over time: ready, launched, done, and the end of backward. Needs matplotlib.

        Args:
            path: The file; its ending chooses the format, as ``.png`` or ``.svg``.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

        end, exposed = self.backward_seconds * 1e3, self.exposed_seconds * 1e3
        figure = Figure(figsize=(10, 2.2 + 0.26 * len(self.buckets)), layout="constrained")
        axes = figure.add_subplot(
            title=f"Pass {self.number}, rank {self.rank}: backward {end:.1f} ms, then {exposed:.1f} ms exposed",
            xlabel="ms since the pass opened, by the host's clock",
        )
        names = [f"bucket {bucket.index}, {size_text(bucket.nbytes)}" for bucket in self.buckets]
        moments = "ready_at", "launched_at", "done_at"
        ready, launched, done = ([1e3 * getattr(bucket, moment) for bucket in self.buckets] for moment in moments)
        axes.hlines(names, ready, launched, "0.5", label="ready to launched: waits for its turn, is packed", lw=2)
        axes.hlines(names, launched, done, "tab:blue", label="launched to done", lw=9)
        axes.axvline(end, color="tab:red", linestyle="--", label="end of backward")
        axes.axvline(end + exposed, color="tab:green", linestyle=":", label="gradients published")
        axes.invert_yaxis()  # the first bucket on top
        figure.legend(loc="outside lower center", ncols=2)
        figure.savefig(path)

    def __str__(self) -> str:
        rebuilt = ", new in this pass" if self.rebuilt else ""
        control = size_text(self.control_nbytes)
        lines = [
            f"pass {self.number}, rank {self.rank} of {self.world_size}: backward "
            f"{self.backward_seconds * 1e3:.3f} ms, exposed {self.exposed_seconds * 1e3:.3f} ms (host time)",
            f"  {size_text(self.grad_nbytes)} in {len(self.buckets)} buckets, {self.early_launches} launched early; "
            f"control vector {control}; layout {self.layouts}{rebuilt}; {self.local_passes} local passes before",
        ]
        if self.sparse_nbytes:
            lines.append(f"  {size_text(self.sparse_nbytes)} received for sparse gradients")
        row = "  {:>6}  {:>12}  {:5}  {:>10}  {:8}  {:8}  {}".format
        if self.buckets:
            lines.append(row("bucket", "launched", "", "size", "dtype", "device", "parameters"))
        for bucket in self.buckets:
            at, when = f"{bucket.launched_at * 1e3:.3f} ms", "early" if bucket.launched_early else ""
            size, dtype = size_text(bucket.nbytes), str(bucket.dtype).removeprefix("torch.")
            lines.append(row(bucket.index, at, when, size, dtype, bucket.device, _range(bucket.parameters)))
        if self.unused_here:
            lines.append(f"  without a gradient on this rank: {', '.join(self.unused_here)}")
        if self.unused_everywhere:
            lines.append(f"  without a gradient on any rank: {', '.join(self.unused_everywhere)}")
        return "\n".join(lines)


class PassRecorder(Participant):
    """Notes when passes open and end, and what they reduce. Logs layouts and passes.

    Args:
        peers: The other ranks.
        sparse: Reduces sparse gradients.

    Attributes:
        last: Gives the record of the last synchronised pass that published gradients; None before the first.
    """

    def __init__(self, peers: Peers, sparse: SparseGrads) -> None:
        self._peers, self._sparse = peers, sparse
        self._done = 0  # of the launched buckets, in launch order, this many were seen to be done
        self.last: Callable[[], PassRecord | None] = lambda: None
        self._layouts, self._layouts_before = 0, 1
        self._local_passes = 0
        self._opened_at = self._backward_ended_at = 0.0
        self._opened: Pass | None = None
        self._result: PassResult | None = None

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Record passes of these parameters from now on."""
        self._watched = table, storage
        self.laid_out(storage.layout)

    def laid_out(self, layout: Layout) -> None:
        """Count a layout, and log it if the debug level is INFO or DETAIL."""
        self._layouts += 1
        if debug_level() != "OFF":
            logger.info("%s", _describe(layout, self._peers.rank, self._peers.position.pass_number))

    def opened(self, this_pass: Pass) -> None:
        """Start the clock."""
        self._opened_at = time.perf_counter()
        self._opened, self._done = this_pass, 0

    def before_launch(self, bucket: object) -> None:
        """Note which collectives are complete."""
        self._note_done()

    def _note_done(self) -> None:
        this_pass = self._opened
        assert this_pass is not None
        while self._done < this_pass.launched and (progress := this_pass.active[self._done]).work.done():
            progress.done_at = time.perf_counter()
            self._done += 1

    def backward_ended(self, raised: bool) -> None:
        """Note the time, and which collectives are complete."""
        this_pass = self._opened
        if this_pass is not None and this_pass.synchronised:
            self._note_done()
        elif not raised:
            self._local_passes += 1
        self._backward_ended_at = time.perf_counter()

    def use_reports(self, result: PassResult) -> None:
        """Keep the ranks' reports."""
        self._result = result

    def ended(self) -> None:
        """Keep the facts for the record, unless the pass was dropped. The record is made when somebody asks."""
        opened, result, self._result = self._opened, self._result, None
        local_passes, self._local_passes = self._local_passes, 0
        if opened is None or result is None:
            return
        (table, storage), sparse = self._watched, self._sparse
        began, backward_ended, ended = self._opened_at, self._backward_ended_at, time.perf_counter()
        layout = storage.layout
        times = [(each.bucket.index, each.ready_at, each.launched_at, each.done_at) for each in opened.active]
        layouts, rebuilt = self._layouts, self._layouts != self._layouts_before
        control, control_nbytes, sparse_nbytes = result.control, result.exchange.nbytes, sparse.nbytes
        trainable, number, pending, sparse_used = opened.trainable, opened.number, table.pending, sparse.used_somewhere

        def used_somewhere(index: int) -> bool:
            slot = table.slot_of(index)
            return index in sparse_used if slot is None else control is not None and control.used_somewhere(slot)

        def record() -> PassRecord:
            here = [index for index, flag in enumerate(trainable) if flag and table.key(index) not in pending]
            everywhere = [] if control is None else [index for index in here if not used_somewhere(index)]
            return PassRecord(
                number=number,
                rank=self._peers.rank,
                world_size=self._peers.world_size,
                rebuilt=rebuilt,
                layouts=layouts,
                local_passes=local_passes,
                buckets=tuple(_bucket_record(layout, index, began, backward_ended, *at) for index, *at in times),
                control_nbytes=control_nbytes,
                sparse_nbytes=sparse_nbytes,
                backward_seconds=backward_ended - began,
                exposed_seconds=ended - backward_ended,
                unused_here=tuple(table.names[index] for index in here),
                unused_everywhere=tuple(table.names[index] for index in everywhere),
            )

        self.last = record
        self._layouts_before = layouts
        if logger.isEnabledFor(logging.INFO) and debug_level() == "DETAIL":
            logger.info("%s", record())


def _bucket_record(
    layout: Layout, index: int, began: float, backward_ended: float, ready: float, launched: float, done: float
) -> BucketRecord:
    bucket = layout.buckets[index]
    buffer, nbytes, early = layout.buffers[bucket.buffer], layout.bucket_nbytes(bucket), launched < backward_ended
    times = launched - began, (ready or launched) - began, done - began
    return BucketRecord(index, _names(layout, bucket), buffer.dtype, buffer.device, nbytes, early, *times)


def _describe(layout: Layout, rank: int, pass_number: int) -> str:
    """Describe the layout from a pass on, in a line."""
    buckets = [
        f"{size_text(layout.bucket_nbytes(bucket))} {_range(_names(layout, bucket))}" for bucket in layout.buckets
    ]
    return (
        f"rank {rank}: gradients of {len(layout.slots)} parameters laid out for pass {pass_number}: "
        f"{size_text(layout.nbytes)} in {len(buckets)} buckets, in launch order: {'; '.join(buckets)}"
    )


def _names(layout: Layout, bucket: PlannedBucket) -> tuple[str, ...]:
    return tuple(layout.slots[slot].spec.name for slot in bucket.slots)


def _range(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
