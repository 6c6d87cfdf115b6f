"""The reducer: gradients in, their means over the ranks out.

A pass is one backward. Its states::

    IDLE ──open──▶ LOCAL ─────────end of backward──────────▶ IDLE
    IDLE ──open──▶ SYNCHRONISED ──end of backward: finish──▶ IDLE
                        │
                        ├─ backward raised here ─▶ BROKEN ──settle: all ranks broke──▶ IDLE
                        │                            └──────settle: others did not───▶ FAILED
                        └─ another rank failed, or ranks disagree ───────────────────▶ FAILED

A gradient's way, in frames of this package between autograd and ``torch.distributed``::

    autograd ─▶ GradientHooks.on_gradient   1   notes the gradient; enough of them?
                  Reducer.on_gradient       2   marks the slots; a bucket full, and its turn?
                    Reducer.launch          3   Storage.pack, then
                      Reduction.start       4   AllReduce | ReduceScatter | CastReduce | HookReduce
                        Collectives...      5   ─▶ torch.distributed
    end of backward ─▶ Reducer.finish       launch the rest, control vector, wait, settle, publish

On several machines without accelerators ``launch`` only takes the gradients: a thread packs, and starts the reduction.

Every rank issues the same collectives in the same order. These follow from the program alone (layout, options, pass
number, ``requires_grad`` at the root of the pass), never from which gradients came, nor from timing. A bucket is
launched early or in the finish, as its gradients happen to be ready, but always in bucket order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from lightning_bucketddp.comm.queue import WrapperQueue
from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.checks import GradientError
from lightning_bucketddp.grads.hooks import has_other_hooks
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.peers.agreement import PeerFailureError
from lightning_bucketddp.peers.control import ControlExchange, Report
from lightning_bucketddp.peers.peers import GivingUp, Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant, Settled
from lightning_bucketddp.reducer.pass_control import PassControl
from lightning_bucketddp.reducer.reductions import Reduction
from lightning_bucketddp.reducer.state import TRANSITIONS, Origin, Pass, PassState, Role

SETTLE_SECONDS = 10.0
"""How long a rank whose backward raised waits for the others before it raises.

A rank that comes later finds that this one has given up, and raises too.
"""


class Reducer:
    """Averages the gradients of one set of parameters while backward runs.

    A pass: ``on_gradient`` marks slots as ready and launches full buckets in order. When backward ends, ``finish``
    launches the rest, exchanges the control vector, waits, and publishes the averaged gradients.

    Args:
        table: The parameters and their slots.
        buckets: The buckets.
        storage: The memory of gradients.
        reduction: Reduces a bucket.
        participants: The features that take part in passes; the same on every rank, in the order of their collectives.
        peers: The other ranks.
        control: Sends and reads the control vector.
        queue: Which of several wrappers on one group may launch.
        lock: Guards hooks, which autograd calls from several threads.
        open_by_gradient: Opens a pass in which a gradient has been accumulated already. Returns the reducer that
            opened it, another one than this if parameters have changed; None for a parameter that the module no longer
            has.
    """

    def __init__(
        self,
        table: SlotTable,
        buckets: Buckets,
        storage: Storage,
        reduction: Reduction,
        participants: Sequence[Participant],
        peers: Peers,
        control: PassControl,
        queue: WrapperQueue,
        lock: threading.RLock,
        open_by_gradient: Callable[[Tensor], Reducer | None],
    ) -> None:
        self.table = table
        self.buckets = buckets
        self.storage = storage
        self.reduction = reduction
        self.participants = participants
        self.peers, self._control = peers, control
        self.queue, self.lock = queue, lock
        self._state = PassState.IDLE
        self._pass: Pass | None = None
        self._open_by_gradient = open_by_gradient

    @property
    def state(self) -> PassState:
        """Where the reducer is."""
        if self.peers.message and self._state is not PassState.CLOSED:
            return PassState.FAILED
        return self._state

    # -- opening -------------------------------------------------------------------------------------

    def by_hand(self) -> bool:
        """Whether a reduction without a backward is under way."""
        return self.state is PassState.SYNCHRONISED and self._pass is not None and self._pass.origin is Origin.CALL

    def require_not_by_hand(self) -> None:
        """Refuse what cannot be done during a reduction without a backward."""
        if self.by_hand():
            raise RuntimeError(
                "expected no pass under way, found the reduction that start_grad_sync() started; call "
                "finish_grad_sync() first"
            )

    def open(self, it: Pass, reachable: set[int] | None) -> None:
        """Open a pass that the ranks agree on.

        Args:
            it: The pass.
            reachable: Ids of the parameters that will get a gradient, if that is known.

        Raises:
            RuntimeError: If a participant refuses it.
        """
        buckets = self.buckets
        self.storage.open()
        follow = any(participant.follows_gradients for participant in self.participants)
        buckets.begin(self.table.trainable_now(), None if follow else reachable, in_order=not follow)
        self._pass, self._control.exchange = it, None
        if it.synchronised:
            buckets.pending.update(self.table.take_waiting())
            buckets.activate(it.trainable)
        self._enter(PassState.SYNCHRONISED if it.synchronised else PassState.LOCAL)
        try:  # only now: the others hear of an error in a pass that is open
            for participant in self.participants:
                participant.opened(it)
        except RuntimeError as error:
            if it.synchronised:
                self.peers.publish_failure(f"raised RuntimeError: {error}", for_good=False)
            raise
        if it.origin is Origin.CALL:  # every gradient takes part
            buckets.pending.update(slot for slot, param in enumerate(self.table.params) if param.grad is not None)
        elif it.role is Role.ACTIVE:
            buckets.begin_noting(it.synchronised, self.storage.one_stream())

    # -- called by autograd --------------------------------------------------------------------------

    def on_gradient(self, param: Tensor, noted: bool = False, large: bool = False) -> None:
        """Mark gradients as ready, and launch full buckets.

        Args:
            param: The parameter.
            noted: Whether its gradient and others have been noted; if so, they are marked.
            large: Whether it may be packed before its bucket is launched.

        Raises:
            RuntimeError: If the bucket of a gradient has been launched.
        """
        with self.lock:
            watched = has_other_hooks(param)  # they run after this one, and must find the gradient
            if not noted and not param.requires_grad:
                return  # frozen since forward: autograd calls the hook, but accumulates nothing
            if self.state is not PassState.SYNCHRONISED and self.state is not PassState.LOCAL:
                reducer = self._open_by_gradient(param)
                if reducer is not self:
                    if reducer is not None:
                        reducer.on_gradient(param)
                    return
            full = self._mark_noted() if noted else self._mark(param)
            if large and not watched and self.buckets.enough and self.state is PassState.SYNCHRONISED:
                self._pack_early(param)
            if full and not watched and self.state is PassState.SYNCHRONISED and self.queue.is_first():
                with _Launching(self.peers):
                    while (bucket := self._next_full()) is not None:
                        self.launch(bucket)
                        self.reduction.advance()
            for bucket in full:
                waits_for_end = bucket.with_tail is not None and bucket is self.buckets.next()
                if not bucket.launched and not waits_for_end:
                    self.storage.hold(bucket.slots)

    def _pack_early(self, param: Tensor) -> None:
        slot = self.table.slot_of(self.table.index_of[id(param)])
        if slot is not None and self.reduction.packs_early:
            self.storage.pack_early(slot, self.reduction.scale(self.buckets.of_slot[slot]))

    def _mark_noted(self) -> list[Bucket]:
        """Mark the gradients that hooks have noted; return the buckets that are full now."""
        full, others = self.buckets.mark_noted()
        for bucket in full:
            bucket.ready_at = time.perf_counter()
        for param in others:
            self._mark(param)
        return full

    def _mark(self, param: Tensor) -> Sequence[Bucket]:
        """Mark a gradient as ready; return its bucket if that is full now."""
        self.require_not_by_hand()
        it, index = self._pass, self.table.index_of[id(param)]
        if it is not None and it.role is Role.JOINED and it.origin is not Origin.CONTEXT:
            raise RuntimeError(not_own_batch(self.peers.rank, self.table.names[index]))
        slot = self.table.slot_of_index.get(index)
        if slot is None:  # sparse, or unfrozen in a local pass and not agreed yet
            self.table.ready_apart(index)
            for participant in self.participants:
                participant.ready_apart(index)
            return ()
        bucket = self.buckets.of_slot[slot]
        if bucket.launched:
            raise RuntimeError(_too_late(self.peers.rank, self.table.specs[slot].name))
        self.storage.require_untouched(slot)
        self.buckets.pending.add(slot)
        bucket.missing.discard(slot)
        if not bucket.missing:
            bucket.ready_at = time.perf_counter()
        self.storage.gradient_ready(slot)
        if self.buckets.in_order:
            self.buckets.look_from(bucket.index)
            return () if bucket.missing else (bucket,)
        for participant in self.participants:
            participant.ready(slot)
        return ()

    def _next_full(self) -> Bucket | None:
        """The bucket to launch next, if it is full and may be launched during backward."""
        bucket = self.buckets.next()
        if bucket is None or bucket.missing or bucket.held_back or not self.reduction.free():
            return None
        return bucket

    def launch(self, bucket: Bucket, failed: bool = False) -> None:
        """Pack a bucket and start its collective. In a pass that failed here its content does not matter."""
        reduction, sent = self.reduction, None
        pack: Callable[[], object] = _nothing
        carries_control = reduction.carries_control and bucket.with_tail is not None
        apart = reduction.launcher is not None and not carries_control
        if failed:
            self.storage.require_memory()
        else:
            for participant in self.participants:
                participant.before_launch(bucket)
            with bucket.label("pack"):
                sent = reduction.wire_memory(bucket)
                pack = self.storage.packing(bucket, reduction.scale(bucket), sent)
                if self._pass is not None and self._pass.sends_zeros:  # means of earlier passes, which others have too
                    pack = (bucket.flat if sent is None else sent).zero_
                if not apart:
                    pack()
        if carries_control:
            self._control.put_in(bucket, self._report(failed), self.buckets.pending)
        with bucket.label(reduction.name):
            bucket.work = reduction.start_apart(bucket, pack, sent) if apart else reduction.start(bucket, sent)
        bucket.launched = True
        bucket.launched_at, bucket.done_at = time.perf_counter(), 0.0
        self.buckets.launched += 1

    # -- ending --------------------------------------------------------------------------------------

    def launch_rest(self) -> None:
        """Launch all remaining buckets. Parameters without a gradient contribute zeros."""
        with _Launching(self.peers):
            while (bucket := self.buckets.next()) is not None:
                self.reduction.make_free(self.peers.poll)
                self.launch(bucket)

    def backward_ended(self) -> None:
        """End the pass, after the last gradient and before ``backward()`` returns."""
        self._mark_noted()
        if self.state in (PassState.LOCAL, PassState.SYNCHRONISED):
            self._tell_ended(raised=False)
        if self.state is PassState.SYNCHRONISED:
            self.finish()
            return
        self.storage.end(synchronised=False)
        if self.state is PassState.LOCAL:  # else no gradient came, as with torch.autograd.grad
            self._enter(PassState.IDLE)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch the remaining buckets, wait, and publish the reduced gradients."""
        buckets, peers = self.buckets, self.peers
        self.launch_rest()
        report = None
        if self._control.exchange is None:
            with _Launching(peers):
                report = self._report()
        with peers.waiting_for(self._describe_awaited, Phase.PASS):
            exchange = self._wait_for_all(report, peers.poll)
        assert self._pass is not None
        unused = buckets.unused(self._pass.trainable)
        control = self._control.read(exchange, bool(unused) or any(it.reads_control for it in self.participants))
        settled = Settled(buckets, exchange, control, peers.poll)
        for participant in self.participants:
            participant.settle(settled)
        for bucket in buckets.active:
            self.storage.publish(bucket)
        for slot in unused:
            used_elsewhere = control is not None and control.used_somewhere(slot)
            if not used_elsewhere:
                self.reduction.forget(slot)
            self.storage.publish_unused(slot, used_elsewhere)
        self._end()

    def _wait_for_all(self, report: Report | None, poll: Callable[[], None]) -> ControlExchange:
        """Send the report, unless it travels in a bucket, and wait for all collectives."""
        self.reduction.proceed(poll)
        exchange = self._control.exchange
        if exchange is None:
            assert report is not None
            exchange = self._control.send(report, self.buckets.pending)
        for bucket in self.buckets.awaiting():
            with bucket.label("wait"):
                bucket.work.wait(poll)
            bucket.done_at = bucket.done_at or time.perf_counter()
        exchange.wait(poll)
        return exchange

    def _end(self) -> None:
        self.storage.end(synchronised=True)
        for participant in self.participants:
            participant.ended()
        self.buckets.pending = set()  # not cleared: the record of the pass keeps the old one
        self._enter(PassState.IDLE)
        self.peers.here.end_pass()

    # -- when something is wrong ---------------------------------------------------------------------

    def broke(self, guarded: bool) -> None:
        """Drop the pass, as backward raised. The next use of the wrapper settles it.

        Gradients go now: when the pass is settled ``.grad`` may hold the first gradient of another backward.

        Args:
            guarded: Whether the caller sees the exception and settles the pass.
        """
        with suppress(RuntimeError):  # a gradient that came too late changes nothing now
            self._mark_noted()
        self._tell_ended(raised=True)
        if self.state is PassState.FAILED:
            self._enter(PassState.FAILED)
        elif self.state in (PassState.IDLE, PassState.LOCAL):
            self.storage.abandon()
            self._enter(PassState.IDLE)
        elif self.state is PassState.SYNCHRONISED and not guarded:
            self._enter(PassState.BROKEN)
            awaited = [self.table.specs[slot].name for slot in self.buckets.missing()]
            where = f" before the gradient of {awaited[0]!r} (and {len(awaited) - 1} more)" if awaited else ""
            self.peers.publish_failure(f"left backward with an exception{where}", for_good=False)
            self._drop()

    def settle(self, cause: str) -> None:
        """End a pass in which backward raised on this rank, together with the others.

        This rank takes part in every collective of the pass, so that no other rank hangs, and reports that it failed.
        If all ranks failed, they drop the gradients of the pass and training may go on. Otherwise every rank raises.

        Args:
            cause: What happened here, as the end of a sentence that begins with the rank.
        """
        self.broke(guarded=True)
        if self.state not in (PassState.SYNCHRONISED, PassState.BROKEN):
            return
        self.peers.publish_failure(cause, for_good=False)
        if self._control.exchange is not None:  # the others have this rank's report: too late for another
            self._give_up(cause)
            return
        if self.state is PassState.SYNCHRONISED:  # else broke() has dropped it
            self._drop()
        deadline = time.monotonic() + SETTLE_SECONDS

        def raise_when_late() -> None:
            if time.monotonic() > deadline:
                raise PeerFailureError("the other ranks did not take note in time")

        try:
            while (bucket := self.buckets.next()) is not None:
                self.reduction.make_free(raise_when_late)
                self.launch(bucket, failed=True)
            exchange = self._wait_for_all(self._report(failed=True), raise_when_late)
            all_failed = exchange.read().failed_ranks == self.peers.world_size
        except Exception:  # the others are gone, or stay away: this rank raises its own error all the same
            all_failed = False
        if all_failed:
            self.reduction.forget()
            self._end()
        else:
            self._give_up(cause)

    def _give_up(self, cause: str) -> None:
        self.peers.give_up(self.peers.cannot_complete(f"rank {self.peers.rank} {cause}"), cause)
        self._enter(PassState.FAILED)

    def _tell_ended(self, raised: bool) -> None:
        for participant in self.participants:
            participant.backward_ended(raised)

    def _drop(self) -> None:
        self.storage.drop()
        for participant in self.participants:
            participant.dropped()
        self.buckets.pending.clear()

    def close(self) -> None:
        """Make gradients plain tensors again. Sends nothing; safe in any state."""
        self.storage.release()
        self._enter(PassState.CLOSED)

    # -- details -------------------------------------------------------------------------------------

    def _enter(self, state: PassState) -> None:
        assert state in TRANSITIONS[self._state], f"{self._state.name} -> {state.name}"
        self._state = state
        self.buckets.enough = 0

    def _report(self, failed: bool = False) -> Report:
        assert self._pass is not None
        report = self._control.report(self._pass.trainable, failed, not self._pass.contributes)
        if not failed:
            for participant in self.participants:
                participant.report(report)
        return report

    def _describe_awaited(self) -> str:
        bucket = self.buckets.awaited
        if bucket is None:
            return "the control vector"
        names = [self.table.specs[slot].name for slot in bucket.slots]
        return f"the gradients of {names[0]!r} to {names[-1]!r} (bucket {bucket.index}, {len(names)} parameter(s))"


class _Launching(GivingUp):
    """Tells the others why a bucket was not launched, and gives up if the ranks are no longer in step."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, GradientError):  # else they hear only that backward raised
            self._peers.publish_failure(f"raised {type(error).__name__}: {error}", for_good=False)
        super().__exit__(kind, error, traceback)


def _nothing() -> None:
    return


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
