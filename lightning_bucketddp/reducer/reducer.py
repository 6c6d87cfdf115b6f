"""The reducer: gradients in, their means over the ranks out.

A pass is one backward. Its states::

    IDLE ──open──▶ LOCAL ─────────end of backward──────────▶ IDLE
    IDLE ──open──▶ SYNCHRONISED ──end of backward: finish──▶ IDLE

An exception that leaves a synchronised backward on several ranks is for good. The pass stays open, and every use raises
(:meth:`Peers.require_usable`).

A gradient's way, in frames of this package between autograd and ``torch.distributed``::

    autograd ─▶ GradientHooks.on_gradient      1   records it; may that complete a bucket?
                  Reducer.gradients_recorded   2   marks the slots; while the next bucket is full:
                    Reducer.launch             3   Storage.take, then
                      Lane.run                 4   the reduction's stages: pack, collective, arithmetic, collective ...
                        Collectives.reduce     5   ─▶ torch.distributed
    end of backward ─▶ Reducer.finish          launch the rest, control vector, wait, participants, publish

A lane says where stages run: on the stream that made the gradients and on a side stream, or in a thread.

Every rank issues the same collectives in the same order. These follow from the program alone (layout, options, pass
number, ``requires_grad`` at the root of the pass), never from which gradients came, nor from timing. A bucket is
launched early or in the finish, as its gradients happen to be ready, but always in bucket order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from lightning_bucketddp.comm.lane import Lane
from lightning_bucketddp.comm.wire import Pack
from lightning_bucketddp.grads.bucket import Bucket, BucketProgress, Buckets
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage, Taken
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.control import ControlExchange, Report
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.context import WrapperContext
from lightning_bucketddp.reducer.participant import Participant, Participants, PassResult
from lightning_bucketddp.reducer.reductions import Reduction
from lightning_bucketddp.reducer.state import TRANSITIONS, Contribution, Origin, Pass, PassState, Role


class Reducer:
    """Averages the gradients of one set of parameters while backward runs.

    Args:
        table: The parameters and their slots.
        planner: Plans layouts.
        buckets: The buckets.
        storage: The memory of gradients.
        reduction: Reduces a bucket.
        lanes: Run reductions, by the device of the gradients.
        participants: The features that take part in passes; the same on every rank, in the order of their collectives.
        context: The parts of the wrapper that stay when parameters change.

    Attributes:
        state: Where the reducer is.
        this_pass: The pass that is open; None if there is none.
    """

    def __init__(
        self,
        table: SlotTable,
        planner: LayoutPlanner,
        buckets: Buckets,
        storage: Storage,
        reduction: Reduction,
        lanes: Mapping[torch.device, Lane],
        participants: Sequence[Participant],
        context: WrapperContext,
    ) -> None:
        self.table, self.planner, self.buckets, self.storage = table, planner, buckets, storage
        self.reduction, self.lanes = reduction, lanes
        self.participants = Participants(participants)
        self._context, self.peers = context, context.ranks.peers
        self.state = PassState.IDLE
        self.this_pass: Pass | None = None

    # -- opening -------------------------------------------------------------------------------------

    def by_hand(self) -> bool:
        """Whether a reduction without a backward is under way."""
        this_pass = self.this_pass
        return self.state is PassState.SYNCHRONISED and this_pass is not None and this_pass.origin is Origin.CALL

    def takes_part_in_backward(self) -> bool:
        """Whether a backward that begins now is, or is part of, a pass."""
        return self.state is not PassState.CLOSED and not self.by_hand()

    def require_not_by_hand(self) -> None:
        """Refuse what cannot be done during a reduction without a backward."""
        if self.by_hand():
            raise RuntimeError(
                "expected no pass under way, found the reduction that start_grad_sync() started; call "
                "finish_grad_sync() first"
            )

    def open(self, this_pass: Pass) -> None:
        """Open a pass that the ranks agree on.

        Args:
            this_pass: The pass.

        Raises:
            RuntimeError: If a participant refuses it.
        """
        self.storage.open()
        followers = self.participants.that_have("follows_gradients")
        this_pass.followed = any(participant.follows_gradients for participant in followers)
        this_pass.use(self.buckets, self.table.trainable_now())
        self.this_pass = this_pass
        self._enter(PassState.SYNCHRONISED if this_pass.synchronised else PassState.LOCAL)
        with self._failing():
            for participant in self.participants.that_have("opened"):
                participant.opened(this_pass)
        if this_pass.origin is Origin.CALL:  # every gradient takes part
            params = enumerate(self.table.params)
            self.table.pending.update(slot for slot, param in params if param.grad is not None)
        elif this_pass.role is Role.ACTIVE:
            this_pass.update_notify_after(0)

    def lay_out(self, layout: Layout) -> None:
        """Move to another layout; gradients move along. Sends nothing. All ranks must call this at the same point."""
        before = self.storage.layout
        self.storage.lay_out(layout)
        if layout != before:
            self.reduction.forget()
            for participant in self.participants.that_have("laid_out"):
                participant.laid_out(layout)

    # -- called by autograd --------------------------------------------------------------------------

    def gradients_recorded(self, param: Tensor) -> None:
        """Mark recorded gradients as ready, and launch full buckets.

        Args:
            param: The parameter whose hook runs now.

        Raises:
            RuntimeError: If the bucket of a gradient has been launched.
        """
        with self._context.lock:
            this_pass = self.this_pass
            if this_pass is None:
                return  # another thread has ended it
            self.peers.require_usable()
            full = self._mark_recorded(this_pass)
            if full and self._may_launch(param):
                with self._failing():
                    while (progress := this_pass.next_full()) is not None and self.reduction.ready_for_next():
                        self.launch(this_pass, progress)
            for progress in full:
                if not this_pass.launch_packs(progress):
                    self.storage.pack_and_bind(progress.bucket.slots)

    def _may_launch(self, param: Tensor) -> bool:
        """Whether full buckets may be launched in the hook of ``param``: now, and before other wrappers' buckets."""
        # Other hooks run after this one, and must find the gradient.
        return not _has_other_hooks(param) and self._context.queue.is_first()

    def _mark_recorded(self, this_pass: Pass) -> list[BucketProgress]:
        """Mark recorded gradients, all at once where they complete a bucket in order; return the full buckets."""
        recorded = this_pass.recorded[:]
        del this_pass.recorded[: len(recorded)]  # other threads may have added to it
        if this_pass.batched and recorded:
            completed = this_pass.completed_by(recorded, self.table, self.buckets.of_slot)
            if completed is not None:
                self.table.pending |= completed.missing
                completed.missing.clear()
                completed.ready_at = time.perf_counter()
                this_pass.update_notify_after(completed.bucket.index)
                return [completed]
        full: list[BucketProgress] = []
        index = 0
        for param in recorded:
            progress = self._mark(this_pass, param)
            if progress is not None:
                index = progress.bucket.index
                if not progress.missing:
                    full.append(progress)
        this_pass.update_notify_after(index)
        return full

    def _mark(self, this_pass: Pass, param: Tensor) -> BucketProgress | None:
        """Mark a gradient as ready; return its bucket if gradients may complete buckets in this pass."""
        if not param.requires_grad:
            return None  # frozen since forward: autograd calls the hook, but accumulates nothing
        self.require_not_by_hand()
        index = self.table.index_of[id(param)]
        if this_pass.role is Role.JOINED and this_pass.origin is not Origin.CONTEXT:
            raise RuntimeError(not_own_batch(self.peers.rank, self.table.names[index]))
        key = self.table.key(index)
        if key < 0:  # sparse, or unfrozen in a local pass and not agreed on yet
            self.table.pending.add(key)
            return None
        progress = this_pass.buckets[self.buckets.of_slot[key]]
        if progress.launched:
            raise RuntimeError(_too_late(self.peers.rank, self.table.specs[key].name))
        self.storage.require_untouched(key)
        self.table.pending.add(key)
        progress.missing.discard(key)
        if not progress.missing:
            progress.ready_at = time.perf_counter()
        if this_pass.batched:
            return progress
        self.storage.gradient_ready(key)
        for participant in self.participants.that_have("ready"):
            participant.ready(key)
        return None

    def launch(self, this_pass: Pass, progress: BucketProgress) -> None:
        """Start the reduction of a bucket."""
        bucket = progress.bucket
        with_control = bucket.flat_with_control if this_pass.carries_control(progress) else None
        for participant in self.participants.that_have("before_launch"):
            participant.before_launch(bucket)
        own = partial(_pack, self.storage, bucket, self.storage.take(bucket), this_pass.weight)
        # Means of earlier passes, which others have too, must not count again.
        pack: Pack = partial(_pack_zeros, bucket) if this_pass.contributes_zeros else own
        if with_control is not None:
            report = self._report(this_pass)
            slots, used = len(self.table), self.table.pending_slots()
            this_pass.exchange = self._context.control.put_behind(bucket.flat, with_control, report, slots, used)
        with bucket.label(self.reduction.name):
            stages = self.reduction.stages(bucket, pack, progress is this_pass.active[-1])
            progress.work = self.lanes[bucket.flat.device].run(stages, common=with_control is not None)
        self.reduction.launched(progress.work)
        progress.launched, progress.launched_at = True, time.perf_counter()
        this_pass.launched += 1

    # -- ending --------------------------------------------------------------------------------------

    def launch_rest(self) -> None:
        """Launch all remaining buckets. Parameters without a gradient contribute zeros."""
        this_pass = self.this_pass
        assert this_pass is not None
        with self._failing():
            if this_pass.followed:
                this_pass.followed = False
                for participant in self.participants.that_have("decide_layout"):
                    if participant.follows_gradients and (layout := participant.decide_layout()) is not None:
                        self.lay_out(layout)
                        this_pass.use(self.buckets, self.table.trainable_now())
            while (progress := this_pass.next_to_launch()) is not None:
                self._wait_until_ready()
                self.launch(this_pass, progress)

    def _wait_until_ready(self) -> None:
        if not self.reduction.ready_for_next():
            with self.peers.waiting_for("the communication hook", Phase.PASS):
                self.reduction.wait_until_ready()

    def backward_ended(self) -> None:
        """End the pass, after the last gradient and before ``backward()`` returns."""
        this_pass = self.this_pass
        if this_pass is not None:
            self._mark_recorded(this_pass)
            for participant in self.participants.that_have("backward_ended"):
                participant.backward_ended(raised=False)
        if self.state is PassState.SYNCHRONISED:
            self.finish()
            return
        self.storage.end(synchronised=False)
        if self.state is PassState.LOCAL:  # else no gradient came, as with torch.autograd.grad
            self._enter(PassState.IDLE)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch the remaining buckets, wait, and publish the reduced gradients."""
        this_pass, peers = self.this_pass, self.peers
        assert this_pass is not None
        self.launch_rest()
        report = None
        if this_pass.exchange is None:
            with self._failing():
                report = self._report(this_pass)
        with peers.waiting_for(partial(_describe_awaited, this_pass, self.table), Phase.PASS):
            exchange = self._wait_for_all(this_pass, report)
        unused = self.buckets.unused(this_pass.trainable)
        readers = self.participants.that_have("reads_control")
        needed = bool(unused) or any(participant.reads_control for participant in readers)
        if needed and not exchange.arrived():  # on an accelerator the host waits here
            with peers.waiting_for("what the other ranks report on the pass", Phase.PASS):
                exchange.read()
        control = self._context.control.read(exchange, needed)
        result = PassResult(this_pass, exchange, control)
        for participant in self.participants.that_have("use_reports"):
            participant.use_reports(result)
        exchange.forget_on_device()
        if this_pass.dropped:
            self._drop_everywhere()
            return
        for progress in this_pass.active:
            self.storage.publish(progress.bucket)
        for slot in unused:
            used_elsewhere = control is not None and control.used_somewhere(slot)
            if not used_elsewhere:
                self.reduction.forget(slot)
            self.storage.publish_unused(slot, used_elsewhere)
        self._end()

    def _drop_everywhere(self) -> None:
        """End a pass that all ranks drop: no parameter has a gradient afterwards, not even of earlier passes."""
        self.reduction.forget()  # PowerSGD's memory may hold NaN
        self._end()
        for param in self.table.all_params:
            param.grad = None

    def _wait_for_all(self, this_pass: Pass, report: Report | None) -> ControlExchange:
        """Send the report, unless it travels in a bucket, and wait for all reductions."""
        if this_pass.exchange is None:
            assert report is not None
            self.reduction.wait_until_ready()
            this_pass.exchange = self._context.control.send(report, len(self.table), self.table.pending_slots())
        for progress in this_pass.awaiting():
            with progress.bucket.label("wait"):
                progress.work.wait()
            progress.done_at = progress.done_at or time.perf_counter()
        this_pass.exchange.wait()
        return this_pass.exchange

    def _end(self) -> None:
        self.storage.end(synchronised=True)
        for participant in self.participants.that_have("ended"):
            participant.ended()
        self.table.pending = set()  # not cleared: the record of the pass keeps the old one
        self._enter(PassState.IDLE)
        self.peers.here.end_pass()

    # -- when something is wrong ---------------------------------------------------------------------

    def backward_raised(self) -> None:
        """End the pass as backward raised. A local one keeps its gradients; a synchronised one fails.

        Unless it is one of ``backward_pass``, which sees why: its caller may still catch that.
        """
        if self.this_pass is not None and self.state is PassState.LOCAL:
            with suppress(RuntimeError):  # a gradient that came too late changes nothing now
                self._mark_recorded(self.this_pass)
        for participant in self.participants.that_have("backward_ended"):
            participant.backward_ended(raised=True)
        if self.state in (PassState.IDLE, PassState.LOCAL):
            self.storage.abandon()
            self._enter(PassState.IDLE)
        elif self.this_pass is not None and self.this_pass.origin is not Origin.CONTEXT:
            self.fail(f"left backward with an exception{self._awaited_names()}")

    def fail(self, cause: str) -> None:
        """End a synchronised pass that an exception leaves, for good. Without other ranks it is dropped.

        Args:
            cause: What happened here, as the end of a sentence that begins with the rank.
        """
        this_pass = self.this_pass
        if this_pass is None or self.state is not PassState.SYNCHRONISED:
            return
        if self.peers.world_size == 1:
            for progress in this_pass.active[: this_pass.launched]:
                with suppress(RuntimeError):  # what backward has raised matters
                    progress.work.wait()  # a hook may still use what is dropped
            self._drop_everywhere()
            return
        this_pass.recorded.clear()
        this_pass.notify_after = 1  # the next gradient raises
        self.peers.fail(cause)

    def _awaited_names(self) -> str:
        """Which gradients are still to come in the open pass, in words; empty if none are."""
        missing = [] if self.this_pass is None else self.this_pass.missing()
        names = [self.table.specs[slot].name for slot in missing]
        return f" before the gradient of {names[0]!r} (and {len(names) - 1} more)" if names else ""

    def add_participant(self, participant: Participant) -> None:
        """Let one more feature take part in passes, from the next one on."""
        self.participants = Participants([*self.participants, participant])

    def close(self) -> None:
        """Make gradients plain tensors again. Sends nothing; safe in any state."""
        if self.this_pass is not None and self.this_pass.under_way():
            failure = self.peers.failure
            reason = "it was closed in the middle of a pass" if failure is None else failure.text
            self._context.ranks.collectives.leave_behind(reason)
        self.storage.release()
        self._enter(PassState.CLOSED)

    # -- details -------------------------------------------------------------------------------------

    def _enter(self, state: PassState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state
        if state not in (PassState.LOCAL, PassState.SYNCHRONISED):
            self.this_pass = None

    def _failing(self) -> AbstractContextManager[None]:
        """A context in a pass. An error in it leaves backward, and is for good if the pass is synchronised."""
        return self.peers.failing() if self.state is PassState.SYNCHRONISED else nullcontext()

    def _report(self, this_pass: Pass) -> Report:
        report = self._context.control.report(this_pass.trainable, this_pass.contribution is not Contribution.OWN)
        for participant in self.participants.that_have("report"):
            participant.report(report)
        return report


def _pack(
    storage: Storage,
    bucket: Bucket,
    taken: Taken,
    weight: int | None,
    scale: float | None = None,
    memory: Tensor | None = None,
) -> None:
    with bucket.label("pack"):
        if weight is not None and taken.grads:
            torch._foreach_mul_([grad.detach() for grad in taken.grads], weight)
        storage.pack(bucket, taken, scale, memory)
    taken.grads.clear()  # the stages, which hold this until the last one is over, keep no gradient in memory


def _pack_zeros(bucket: Bucket, scale: float | None = None, memory: Tensor | None = None) -> None:
    (bucket.flat if memory is None else memory).zero_()


def _has_other_hooks(param: Tensor) -> bool:
    """Whether somebody has added a post-accumulate-grad hook to a parameter that has a reducer's."""
    # Private, but there is no public way to ask. Should it go, such hooks may find no gradient.
    return len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) > 1


def _describe_awaited(this_pass: Pass, table: SlotTable) -> str:
    bucket = this_pass.awaited
    if bucket is None:
        return "the control vector"
    names = [table.specs[slot].name for slot in bucket.slots]
    return f"the gradients of {names[0]!r} to {names[-1]!r} (bucket {bucket.index}, {len(names)} parameter(s))"


def not_own_batch(rank: int, name: str) -> str:
    """The error for a plain backward of a joined rank."""
    return (
        f"rank {rank}: expected a backward inside backward_pass() (manual_backward() in a LightningModule) where ranks "
        f"may run out of data, found a plain one with a gradient of {name!r}; this rank has run out of data and must "
        "not contribute"
    )


def _too_late(rank: int, name: str) -> str:
    return (
        f"rank {rank}: a gradient of parameter {name!r} came after its bucket had been launched. In the first pass the "
        "parameter got fewer gradients, as with re-entrant checkpointing of a varying number of calls; use "
        "checkpoint(..., use_reentrant=False)"
    )
