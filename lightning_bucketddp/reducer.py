"""The pass: autograd hooks in, reduced gradients out.

A pass is one backward. Its states::

    IDLE ──open──▶ LOCAL ─────────end of backward──────────▶ IDLE
    IDLE ──open──▶ SYNCHRONISED ──end of backward: finish──▶ IDLE
                        │
                        ├─ backward raised here ─▶ BROKEN ──settle: all ranks broke──▶ IDLE
                        │                            └──────settle: others did not───▶ FAILED
                        └─ another rank failed, or ranks disagree ───────────────────▶ FAILED

Whatever decides which collectives a rank issues, and in which order, comes from the program alone (layout,
options, pass number, ``requires_grad`` at the root of the pass): never from what arrived, never from timing.
A bucket is launched early or in the finish as its gradients happen to be ready, but always in bucket order.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn

from lightning_bucketddp.agreement import Agreement, Entry, PeerFailureError, RankMismatchError
from lightning_bucketddp.bucket_runs import BucketRun, BucketRuns
from lightning_bucketddp.coalesced_runs import CoalescedRuns
from lightning_bucketddp.collectives import Collectives
from lightning_bucketddp.comm_hooks import CommHook, CommHookError, require_hook_decides
from lightning_bucketddp.control import Control, ControlExchange, Report, fingerprint
from lightning_bucketddp.diagnostics import PassNotes, PassRecord, log_layout, log_pass
from lightning_bucketddp.engine import BackwardEnd, hook_gradient, reachable_leaves
from lightning_bucketddp.gradient_checks import GradientError
from lightning_bucketddp.layout import Layout
from lightning_bucketddp.options import Options
from lightning_bucketddp.ready_order import ReadyOrder
from lightning_bucketddp.slots import SlotTable, TrainableSet
from lightning_bucketddp.sparse_grads import SparseGrads
from lightning_bucketddp.trainable import TrainableHistory

SETTLE_SECONDS = 10.0
"""How long a rank whose backward raised waits for the others to take note before it goes on raising.

A rank that comes later finds a rank that has given up, and raises in its next pass: an error, not a hang.
"""


MAX_LEARNED_SETS = 64
"""Trainable sets whose first pass teaches the order of what was never seen before."""


class PassState(Enum):
    """Where the reducer is; the module's drawing shows the transitions."""

    IDLE = auto()
    """No backward under way."""
    LOCAL = auto()
    """A backward inside ``no_sync`` has begun: gradients accumulate, nothing travels."""
    SYNCHRONISED = auto()
    """A backward whose gradients are reduced has begun."""
    BROKEN = auto()
    """Backward raised in a synchronised pass, and the others have not been told in a collective yet."""
    FAILED = auto()
    """The ranks cannot go on together; every use raises."""
    CLOSED = auto()
    """Hooks are gone; nothing is reduced any more."""


def is_reducers_own(hook: object) -> bool:
    """Whether a post-accumulate-grad hook is a reducer's."""
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), Reducer)


class Reducer:
    """Keeps gradients in contiguous buffers and replaces them by their means over the ranks.

    Args:
        named_params: All parameters of the module, each once, in registration order; the same on every rank.
        collectives: The group.
        agreement: The group's store.
        options: What was asked for.
        sparse_names: The parameters whose gradients are sparse; the same on every rank.
        comm_hook: What reduces the buckets instead of an all-reduce; agreed between the ranks.

    Attributes:
        synchronise: Whether passes are synchronised, where no root tells otherwise.
        steps: How many steps this rank has begun, if the caller tells. Ranks are expected to be in the same step when
            they are in the same pass.
        forwards: How many training forwards this rank has run. Ranks that meet in a pass after different numbers of
            them are told so, once.
        uneven: Whether some ranks may run out of data before others.
        divide_by_active: Whether the ranks that have run out of data are left out of the mean.
        pass_number: How many synchronised passes have been completed.
        hooks: What keeps the reducer informed: a hook on each parameter. They keep it alive, so whoever
            drops the reducer removes them.
        early_launches: How many buckets the last synchronised pass launched before backward had ended.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        collectives: Collectives,
        agreement: Agreement,
        options: Options,
        sparse_names: Collection[str] = (),
        comm_hook: CommHook | None = None,
    ) -> None:
        self._collectives = collectives
        self._agreement = agreement
        self._options = options
        self._find_unused = options.find_unused_parameters
        self._divide_by = options.gradient_divide_by
        overlap = options.overlap and options.use_contiguous_buffers
        self._slots = SlotTable(named_params, options.bucket_cap_bytes, sparse_names, options.pad_buckets_to, overlap)
        runs = BucketRuns if options.use_contiguous_buffers else CoalescedRuns
        self._runs = runs(self._slots, collectives, overlap, options.max_abs_grad, options.wire_dtype)
        self._runs.comm_hook = comm_hook
        self._hook_agreements = 0
        self._sparse = SparseGrads(self._slots, collectives, options.max_abs_grad)
        hooks = [hook_gradient(p, partial(self._on_gradient, index)) for index, p in enumerate(self._slots.all_params)]
        self.hooks = [hook for hook in hooks if hook is not None]

        devices = {param.device for param in self._slots.all_params}
        # Each device has its autograd thread; with one device there is nobody to lock out.
        self._lock: AbstractContextManager[object] = threading.RLock() if len(devices) > 1 else nullcontext()

        self.synchronise = True
        self.steps = 0
        self.forwards = 0
        self.uneven = False
        self.divide_by_active = False
        self._out_of_data = False
        self._warned_of_forwards = False
        self._tokens = 0
        self._tokens_on_device: Tensor | None = None
        self._tokens_counted = False
        self._passes_begun = self._passes_begun_before_step = 0
        self.pass_number = 0
        self.early_launches = 0
        self._state = PassState.IDLE
        self._failure = ""
        self._root_synchronises = True
        self._end_queued = False
        self._guarded = False  # inside backward_pass(), whose caller sees an exception itself

        self._trainable = TrainableHistory(self._slots, agreement)
        self._replan_due = False
        self._without_slot: set[int] = set()  # parameters with a gradient since the last reduction and no slot yet
        self._control: ControlExchange | None = None
        self._unread: deque[ControlExchange] = deque()
        self._to_learn: ReadyOrder | None = ReadyOrder() if overlap else None
        self._learns = overlap
        self._learned_sets: set[TrainableSet] = set()

        self._layouts = 1
        self._local_passes = 0  # since the last reduction
        self._notes: PassNotes | None = None
        self._last_notes: PassNotes | None = None  # of the last pass that published gradients
        log_layout(self.layout, collectives.rank, self.pass_number)

    # -- what others may ask -------------------------------------------------------------------------

    @property
    def state(self) -> PassState:
        """Where the reducer is."""
        return self._state

    @property
    def layout(self) -> Layout:
        """Where the gradients lie now."""
        return self._runs.layout

    def views(self) -> dict[str, Tensor]:
        """Each slot's view into its gradient buffer, by parameter name."""
        return {spec.name: view for spec, view in zip(self._slots.specs, self._runs.views, strict=False)}

    def last_pass(self) -> PassRecord | None:
        """What happened in the last synchronised pass that published gradients, if there was one."""
        if self._last_notes is None:
            return None
        return self._last_notes.record(self._collectives.rank, self._collectives.world_size)

    def close(self) -> None:
        """Removes the hooks and gives gradients back as plain tensors. Sends nothing; safe in any state."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if self._runs.under_way():
            self._collectives.leave_behind(self._failure or "it was closed in the middle of a pass")
        self._runs.release()
        self._state = PassState.CLOSED

    def register_comm_hook(self, hook: CommHook) -> None:
        """Lets a hook reduce the buckets from the next pass on. All ranks must call this at the same point.

        Raises:
            RuntimeError: If there is a hook already, or a pass is under way.
            ValueError: If gradients travel in a wire dtype.
            RankMismatchError: If ranks register different hooks, or if this is not called on all of them.
        """
        self.require_usable()
        require_hook_decides(self._options)
        if self._runs.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook can only be called once: expected no communication hook, found "
                f"{self._runs.comm_hook.name!r}"
            )
        if self._state is not PassState.IDLE:
            raise RuntimeError("expected register_comm_hook to be called between passes, found one under way")
        topic = self._hook_topic()
        self._hook_agreements += 1
        entries = [Entry(f"option {name}", repr(value)) for name, value in hook.options().items()]
        self._agreement.require_same(topic, entries, on_idle=self.raise_if_a_peer_failed)
        self._runs.comm_hook = hook

    def _hook_topic(self) -> str:
        times = f", attempt {self._hook_agreements + 1}" if self._hook_agreements else ""
        return f"the communication hook from pass {self.pass_number} on{times}"

    # -- steps ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A training step begins, on every rank."""
        self.steps += 1
        self._passes_begun_before_step = self._passes_begun

    def end_step(self) -> None:
        """All backwards of the step have been run: if there was none, ranks that are in one need not wait."""
        if self._passes_begun == self._passes_begun_before_step and self._state is PassState.IDLE:
            self._agreement.publish_skip(self.steps)

    # -- opening -------------------------------------------------------------------------------------

    def require_usable(self) -> None:
        """Settles a broken pass.

        Raises:
            PeerFailureError: If the ranks cannot go on together.
            RuntimeError: If the reducer is closed.
        """
        if self._state is PassState.BROKEN:
            self._settle("left backward with an exception")
        if self._state is PassState.FAILED:
            raise PeerFailureError(self._failure)
        if self._state is PassState.CLOSED:
            raise RuntimeError("expected an open BucketDDP, found one after close(); wrap the module again")

    def note_forward(self) -> None:
        """A training forward has begun. Inside ``no_sync`` its trainable set counts, whatever its backward reaches.

        A local pass opens with the first gradient, which a rank whose loss reaches no parameter does not see; the ranks
        would differ in what was trainable since the last reduction, should it change before the next.
        """
        self.forwards += 1
        if not self.synchronise and self._state is PassState.IDLE:
            self._trainable.note(self._slots.trainable_now())

    def _agree_on(self, trainable: TrainableSet) -> None:
        try:
            changed = self._trainable.agree(trainable, self.pass_number, self.raise_if_a_peer_failed)
        except (PeerFailureError, RankMismatchError) as error:  # which the other ranks find too
            self._fail(str(error))
            raise
        except RuntimeError as error:
            self._fail(str(error), cause=f"gave up: {error}")
            raise
        if not changed:
            return
        if not self._slots.knows(trainable):
            self._slots.add(trainable)
            self._replan_due = True
        if trainable not in self._learned_sets and len(self._learned_sets) < MAX_LEARNED_SETS:
            self._learned_sets.add(trainable)
            if self._learns and self._slots.unseen(trainable):
                self._to_learn = ReadyOrder()

    def on_root(self, synchronised: bool, _grad: Tensor | None = None) -> None:
        """Called when backward reaches a tensor that ``forward`` returned.

        Queues the end of the pass here, in the outermost backward, where it runs once and last. The pass itself
        is opened by the first gradient, or here with ``find_unused_parameters``.

        Args:
            synchronised: What the forward decided.
        """
        with self._lock:
            if self._end_queued or self._state is PassState.CLOSED:
                return
            self._root_synchronises = synchronised
            self._queue_end()
            # Before the first gradient, where others must not wait for one that will not come, or where what was
            # there before must be told from what accumulates now.
            early = (synchronised and self._find_unused) or self._divide_by != "world_size"
            if early and self._state in (PassState.IDLE, PassState.BROKEN):
                self._open(synchronised)

    @contextmanager
    def backward_pass(self, loss: Tensor) -> Iterator[None]:
        """A pass around a backward that the caller runs: opened here, and ended in any case.

        Args:
            loss: The tensor that backward will start from, or pass by.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        synchronised = self.synchronise
        self._open(synchronised, reachable_leaves(loss) if self._find_unused and synchronised else None)
        root = loss.register_hook(partial(self.on_root, synchronised)) if loss.requires_grad else None
        self._guarded = True
        try:
            yield
            self._end_pass()
        except BaseException as error:
            self._settle(f"raised {type(error).__name__} in backward: {error}")
            raise
        finally:
            self._guarded = False
            if root is not None:
                root.remove()

    def _queue_end(self) -> None:
        # Only the engine holds the callback, so that its end of life tells that the engine dropped it.
        BackwardEnd(self._on_engine_end, self._on_engine_dropped).queue()
        self._end_queued = True

    def _open(self, synchronised: bool, reachable: set[int] | None = None) -> None:
        self.require_usable()
        if self._state is not PassState.IDLE:
            raise RuntimeError("expected one pass at a time, found another one open; backward_pass() cannot be nested")
        trainable = self._slots.trainable_now()
        since = self._trainable.note(trainable)
        if synchronised:
            self._agree_on(since)
        if self._replan_due:
            self._relayout()
        if self._divide_by != "world_size":
            self._runs.require_clear()
            self._sparse.require_clear()
        if synchronised and self._divide_by == "tokens" and not self._tokens_counted and not self._out_of_data:
            raise RuntimeError(
                f"rank {self._collectives.rank}: expected count_tokens() before each synchronised backward with "
                'gradient_divide_by="tokens", found no call since the last one; call it with 0 for a batch without any'
            )
        self._passes_begun += 1
        self._runs.begin(trainable, reachable if self._to_learn is None else None)
        if not synchronised:
            self._state = PassState.LOCAL
            return
        self._read_controls_that_arrived()
        for index in self._without_slot:
            if (slot := self._slots.slot_of(index)) is not None:
                self._runs.contributing.add(slot)
        self._without_slot.clear()
        self._runs.activate(since)
        self._control = None
        self._state = PassState.SYNCHRONISED
        self._notes = PassNotes(
            self.pass_number, self._runs.layout, self._slots, since, self._layouts, self._last_notes, self._local_passes
        )

    def _relayout(self) -> None:
        before = self._runs.layout
        self._runs.relayout()
        self._replan_due = False
        if self._runs.layout is not before:
            self._layouts += 1
            log_layout(self.layout, self._collectives.rank, self.pass_number)

    # -- gradients -----------------------------------------------------------------------------------

    def _on_gradient(self, index: int, param: Tensor) -> None:
        """Autograd has accumulated into ``param.grad``; ``param`` is the parameter at ``index`` in the module."""
        if not param.requires_grad:  # frozen since forward: autograd calls the hook and accumulates nothing
            return
        with self._lock:
            if self._state not in (PassState.SYNCHRONISED, PassState.LOCAL):
                # Plain PyTorch opens here. Without a root (a backward that did not come by forward's outputs)
                # the backward that runs right now also ends the pass, even if it is an inner one.
                if not self._end_queued:
                    self._root_synchronises = self.synchronise
                    self._queue_end()
                    if self._divide_by != "world_size":
                        raise RuntimeError(
                            f"rank {self._collectives.rank}: expected a backward by way of what forward returned, or "
                            f"inside backward_pass(), where gradients are divided by {self._divide_by!r}; found one by "
                            f"neither, in which parameter {self._slots.names[index]!r} got a gradient"
                        )
                self._open(self._root_synchronises)
            if index in self._slots.sparse:
                self._sparse.contributing.add(index)
                return
            slot = self._slots.slot_of(index)
            if slot is None:  # unfrozen in a local pass: it gets its slot when the ranks have agreed on it
                self._without_slot.add(index)
                return
            complete = self._runs.arrived(slot)
            if self._state is PassState.SYNCHRONISED:
                if self._to_learn is not None:
                    self._to_learn.arrived(slot)
                elif complete:
                    with self._launching():
                        self._runs.launch_complete()

    @contextmanager
    def _launching(self) -> Iterator[None]:
        with self._giving_up_on_errors():
            try:
                yield
            except GradientError as error:  # the others are to hear the reason, not only that backward raised
                self._agreement.publish_failure(self.pass_number, f"raised {type(error).__name__}: {error}")
                raise

    # -- a reduction without a backward --------------------------------------------------------------

    def start_reduction(self) -> None:
        """Opens a synchronised pass for the gradients that are there, and launches all buckets.

        Raises:
            RuntimeError: If the ranks cannot go on together.
        """
        self._runs.contribute_present()
        self._sparse.contribute_present()
        self._open(synchronised=True)
        try:
            with self._launching():
                self._runs.launch_rest(self._while_waiting)
        except BaseException as error:
            self._settle(f"raised {type(error).__name__}: {error}")
            raise

    def finish_reduction(self) -> None:
        """Waits for what :meth:`start_reduction` launched, and publishes the gradients.

        Raises:
            RuntimeError: If nothing was started, or the ranks cannot go on together.
        """
        if self._state is not PassState.SYNCHRONISED:
            raise RuntimeError("expected a reduction under way, found none; call start_grad_sync() first")
        self._finish()

    def shadow_pass(self) -> None:
        """A synchronised pass to which this rank, which has run out of data, contributes nothing."""
        for param in self._slots.all_params:
            param.grad = None
        self._runs.contributing.clear()
        self._sparse.contributing.clear()
        self._out_of_data = True
        try:
            self._open(synchronised=True)
            with self._launching():
                self._runs.launch_rest(self._while_waiting)
            self._finish()
        finally:
            self._out_of_data = False

    def zero_gradients(self) -> None:
        """Sets all gradients to zero, in place."""
        self.require_usable()
        self._runs.zero()
        self._sparse.zero()

    # -- tokens --------------------------------------------------------------------------------------

    def count_tokens(self, tokens: int | Tensor) -> None:
        """Adds to the number of tokens that this rank's gradients are summed over."""
        if self._divide_by != "tokens":
            raise RuntimeError(
                'expected gradient_divide_by="tokens" where tokens are counted, found '
                f"gradient_divide_by={self._divide_by!r}"
            )
        if not isinstance(tokens, Tensor) and tokens < 0:
            raise ValueError(f"expected a number of tokens, found {tokens}")
        self._tokens_counted = True
        if not isinstance(tokens, Tensor):
            self._tokens += tokens
        elif self._tokens_on_device is None:
            self._tokens_on_device = tokens.detach().to(torch.int64, copy=True).reshape(())
        else:
            self._tokens_on_device += tokens.detach().reshape(())

    def _forget_tokens(self) -> None:
        self._tokens = 0
        self._tokens_on_device = None
        self._tokens_counted = False

    # -- ending --------------------------------------------------------------------------------------

    def _on_engine_end(self) -> None:
        self._end_queued = False
        try:
            self._end_pass()
        except BaseException:
            self._on_engine_dropped()
            raise

    def _on_engine_dropped(self) -> None:
        """Backward raised. A guarding ``backward_pass`` settles it; otherwise the next use does."""
        self._end_queued = False
        if self._state is PassState.LOCAL:
            self._state = PassState.IDLE
        elif self._state is PassState.SYNCHRONISED and not self._guarded:
            self._state = PassState.BROKEN
            awaited = [self._slots.specs[slot].name for slot in self._runs.awaited()]
            where = f" before the gradient of {awaited[0]!r} (and {len(awaited) - 1} more)" if awaited else ""
            self._agreement.publish_failure(self.pass_number, f"left backward with an exception{where}")
            # Now, not when the pass is settled: by then `.grad` may hold the first gradient of another backward.
            self._runs.drop()
            self._sparse.drop()

    def _end_pass(self) -> None:
        if self._state is PassState.LOCAL:
            self._runs.capture_rest()
            self._local_passes += 1
            self._state = PassState.IDLE
        elif self._state is PassState.SYNCHRONISED:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Launches what is left, waits, and publishes the reduced gradients as views."""
        runs, notes = self._runs, self._notes
        assert notes is not None
        notes.backward_ended = time.perf_counter()
        self.early_launches = runs.launched
        with self._launching():
            runs.launch_rest(self._while_waiting)
            sparse = self._sparse.held(self._trainable.since_reduction)
        for run in runs.active:
            assert run.pending is not None
            with self.waiting_for(run):
                run.pending.proceed(self._while_waiting)
        exchange = self._start_control(failed=False)
        for run in runs.active:
            assert run.pending is not None
            with self.waiting_for(run):
                run.pending.wait(self._while_waiting)
        with self.waiting_for("the control vector"):
            exchange.wait(self._while_waiting)
        factor = self._factor(exchange)
        if factor is not None:
            runs.rescale(factor)
        unused: list[int] = []
        for run in runs.active:
            unused.extend(runs.publish(run))
        if unused or sparse or self._to_learn is not None or exchange.arrived():
            control = self._require_success(exchange.read())
            notes.used_somewhere = control.used_somewhere
            for slot in unused:
                runs.publish_unused(slot, control.used_somewhere(slot))
        else:
            self._unread.append(exchange)
        self._sparse.reduce(sparse, self.waiting_for, self._while_waiting, factor)
        if self._to_learn is not None:
            self._learn(self._to_learn)
        notes.end(
            [(run.index, run.launched_at) for run in runs.active],
            early=self.early_launches,
            used=runs.contributing,
            sparse_used=self._sparse.contributing,
            sparse_used_somewhere=self._sparse.used_somewhere,
            sparse_nbytes=self._sparse.nbytes,
            control_nbytes=exchange.nbytes,
        )
        self._end_reduction()
        self._last_notes = notes
        log_pass(notes, self._collectives.rank, self._collectives.world_size)

    def _factor(self, exchange: ControlExchange) -> float | Tensor | None:
        """What the mean over all ranks is to be multiplied by; None for nothing."""
        world_size = self._collectives.world_size
        if self._divide_by != "world_size":
            return world_size / (exchange.tokens() if self._divide_by == "tokens" else self._divide_by)
        if self.uneven and self.divide_by_active:
            without_data = exchange.read().ranks_out_of_data
            return world_size / (world_size - without_data) if without_data else None
        return None

    def _start_control(self, failed: bool) -> ControlExchange:
        report = Report(
            fingerprint(self.pass_number, self._trainable.since_reduction),
            self.steps,
            self.forwards,
            self._tokens,
            self._tokens_on_device,
            failed,
            self._out_of_data,
        )
        self._control = ControlExchange(
            self._collectives, self._runs.device, report, len(self._slots), self._runs.contributing
        )
        return self._control

    def _learn(self, order: ReadyOrder) -> None:
        """Takes in the order that this pass showed, on all ranks alike; the next pass is laid out by it."""
        with self.waiting_for("the order of readiness"):
            positions, repeated = order.share(
                len(self._slots), self._collectives, self._runs.device, self.raise_if_a_peer_failed
            )
        if any(position is not None for position in positions):
            self._slots.learn(positions, repeated)
            self._to_learn = None
            self._replan_due = True

    def _end_reduction(self) -> None:
        self._runs.end()
        self._sparse.end()
        self._forget_tokens()
        self._trainable.reduced()
        self._local_passes = 0
        self._state = PassState.IDLE
        self.pass_number += 1

    # -- when something is wrong ---------------------------------------------------------------------

    def publish_failure(self, cause: str) -> None:
        """Tells ranks that wait, or will wait, for this rank that it has failed for good.

        Args:
            cause: What happened, as the end of a sentence that begins with the rank.
        """
        self._agreement.publish_failure(None, cause)

    def raise_if_a_peer_failed(self) -> None:
        """Called now and then while this rank waits for the others.

        Raises:
            PeerFailureError: If another rank failed in this pass, or for good.
        """
        cause = self._agreement.failure(self.pass_number)
        if cause is not None:
            raise PeerFailureError(self._peer_failed(cause))

    def _while_waiting(self) -> None:
        """Called now and then while this rank waits for the pass that it is in.

        Only here may it answer for this pass: before it has opened the pass itself, a question is no disagreement.
        """
        self.raise_if_a_peer_failed()
        self._trainable.answer(self.pass_number)
        self._agreement.answer_none(self._hook_topic(), f"is in pass {self.pass_number}")
        skipper = self._agreement.skipped_by(self.steps)
        if skipper is not None:
            raise RankMismatchError(
                f"rank {self._collectives.rank}: rank {skipper} ran no backward in step {self.steps}, in which this "
                f"rank is in pass {self.pass_number}: look for a backward in a branch that depends on the rank or on "
                "its data"
            )

    def _settle(self, cause: str) -> None:
        """Ends a pass in which backward raised on this rank, together with the others.

        This rank takes part in every collective of the pass, so that no other rank hangs, and says in the control
        vector that it failed. If all ranks did, training may go on; no rank keeps a gradient of the parameters that
        the pass concerned. Otherwise every rank raises.
        """
        if self._state is PassState.LOCAL:
            self._state = PassState.IDLE
        if self._state not in (PassState.SYNCHRONISED, PassState.BROKEN):
            return
        message = self._peer_failed(f"rank {self._collectives.rank} {cause}")
        self._agreement.publish_failure(self.pass_number, cause)
        if self._control is not None:  # the pass was through; nobody will ask in it any more
            self._fail(message, cause)
            return
        self._runs.drop()
        self._sparse.drop()
        deadline = time.monotonic() + SETTLE_SECONDS

        def raise_when_late() -> None:
            if time.monotonic() > deadline:
                raise PeerFailureError("the other ranks did not take note in time")

        try:
            self._runs.launch_rest_as_they_are(raise_when_late)
            self._runs.proceed(raise_when_late)
            exchange = self._start_control(failed=True)
            self._runs.wait(raise_when_late)
            exchange.wait(raise_when_late)
            control = exchange.read()
        except Exception:  # the others are gone, or stay away: this rank raises its own error all the same
            self._fail(message, cause)
            return
        if control.failed_ranks == self._collectives.world_size:
            self._runs.forget_sent()
            if self._to_learn is not None:
                self._to_learn = ReadyOrder()
            self._end_reduction()
        else:
            self._fail(message, cause)

    def _require_success(self, control: Control) -> Control:
        if control.failed_ranks:
            cause = self._agreement.failure(self.pass_number) or f"{control.failed_ranks} rank(s) raised in backward"
            self._fail(self._peer_failed(cause))
            raise PeerFailureError(self._failure)
        if not control.agreed:
            self._fail(f"rank {self._collectives.rank}: ranks took pass {self.pass_number} for different things")
            raise RankMismatchError(self._failure)
        if control.ranks_out_of_data:  # a shadow knows nothing of steps and forwards
            return control
        if not control.same_forwards and not self.steps and not self._warned_of_forwards:
            self._warned_of_forwards = True
            warnings.warn(
                f"rank {self._collectives.rank}: ranks met in pass {self.pass_number} after different numbers of "
                f"training forwards, {self.forwards} on this rank. If some rank skipped a backward, gradients of "
                "different batches are being averaged; a forward that only some ranks run belongs under "
                "torch.no_grad()",
                stacklevel=2,
            )
        if not control.in_step:
            self._fail(
                f"rank {self._collectives.rank}: ranks met in pass {self.pass_number} from different steps; this rank "
                f"is in step {self.steps}. Some rank skipped a backward that the others ran, or ran one more: look for "
                "a backward in a branch that depends on the rank or on its data"
            )
            raise RankMismatchError(self._failure)
        return control

    def _read_controls_that_arrived(self) -> None:
        """Looks at earlier passes' control vectors on accelerators, without waiting for the device."""
        while self._unread and self._unread[0].arrived():
            self._require_success(self._unread.popleft().read())

    @contextmanager
    def waiting_for(self, what: str | BucketRun) -> Iterator[None]:
        """Around a wait: whatever it raises leaves the reducer failed, and says what was waited for."""
        try:
            with self._giving_up_on_errors():
                yield
        except (PeerFailureError, RankMismatchError, CommHookError):
            raise
        except RuntimeError as error:
            if isinstance(what, BucketRun):
                names = [self._slots.specs[slot].name for slot in what.slots]
                what = f"the gradients of {names[0]!r} to {names[-1]!r} ({len(names)} parameters)"
            cause = "another rank ended or did not get here in time; its output tells why"
            with suppress(RuntimeError):  # the store goes with the rank that serves it
                cause = self._agreement.failure(self.pass_number) or cause
            self._fail(
                f"rank {self._collectives.rank}: reducing {what} failed in pass {self.pass_number}: {cause} ({error})",
                cause=f"could not reduce {what}: {error}",
            )
            raise PeerFailureError(self._failure) from error

    @contextmanager
    def _giving_up_on_errors(self) -> Iterator[None]:
        """Leaves the reducer failed by errors after which the ranks are no longer in step."""
        try:
            yield
        except (PeerFailureError, RankMismatchError) as error:
            self._fail(str(error))
            raise
        except CommHookError as error:  # what the hook has started, and what not, is not known
            self._fail(
                f"rank {self._collectives.rank}: {error}", cause=f"cannot go on in pass {self.pass_number}: {error}"
            )
            raise

    def _fail(self, message: str, cause: str | None = None) -> None:
        """Gives up for good.

        Args:
            message: What every later use raises.
            cause: What happened, for other ranks that would otherwise wait for this one in a later pass.
        """
        self._failure = message
        self._state = PassState.FAILED
        if cause is not None:
            self._agreement.publish_failure(None, cause)

    def _peer_failed(self, cause: str) -> str:
        return (
            f"rank {self._collectives.rank}: pass {self.pass_number} cannot be completed: {cause}. "
            "Gradients of the ranks are no longer the same; restart from a checkpoint"
        )
