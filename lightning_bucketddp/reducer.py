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
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.agreement import Agreement, PeerFailureError, RankMismatchError
from lightning_bucketddp.collectives import Collectives, Pending
from lightning_bucketddp.control import Control, ControlExchange, fingerprint
from lightning_bucketddp.engine import BackwardEnd, reachable_leaves
from lightning_bucketddp.grad_buffer import GradBuffers
from lightning_bucketddp.layout import Bucket, Layout
from lightning_bucketddp.ready_order import ReadyOrder
from lightning_bucketddp.slots import SlotKind, SlotTable, TrainableSet

SETTLE_SECONDS = 10.0
"""How long a rank whose backward raised waits for the others to take note before it goes on raising."""


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


class _BucketRun:
    """One bucket during passes: its memory, and which of its gradients are still awaited."""

    __slots__ = ("flat", "held_back", "launched", "pending", "slots", "streams", "waiting")

    def __init__(self, bucket: Bucket, flat: Tensor, held_back: bool) -> None:
        self.slots = bucket.slots
        self.flat = flat
        self.held_back = held_back  # holds a repeated gradient: only the finish may launch it
        self.waiting: set[int] = set()
        self.streams: set[torch.Stream] = set()
        self.launched = False
        self.pending: Pending | None = None


class Reducer:
    """Keeps gradients in contiguous buffers and replaces them by their means over the ranks.

    Args:
        named_params: All parameters of the module, each once, in registration order; the same on every rank.
        collectives: The group.
        agreement: The group's store.
        bucket_cap_bytes: Largest bucket in bytes; None for the default rule.
        find_unused_parameters: Look at the graph, where the loss is known, so as not to wait for gradients that
            this backward will not produce; and open the pass at the root rather than at the first gradient.

    Attributes:
        pass_number: How many synchronised passes have been completed.
        early_launches: How many buckets the last synchronised pass launched before backward had ended.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        collectives: Collectives,
        agreement: Agreement,
        bucket_cap_bytes: int | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self._collectives = collectives
        self._agreement = agreement
        self._find_unused = find_unused_parameters
        self._slots = SlotTable(named_params, bucket_cap_bytes)
        self._buffers = GradBuffers(self._slots.plan())
        self._make_runs()
        self._hooks: list[RemovableHandle] = []
        self._hook_slots(range(len(self._slots)))

        devices = {param.device for param in self._slots.all_params}
        # Each device has its autograd thread; with one device there is nobody to lock out.
        self._lock: AbstractContextManager[object] = threading.RLock() if len(devices) > 1 else nullcontext()
        self._on_accelerator = any(device.type != "cpu" for device in devices)

        self.pass_number = 0
        self.early_launches = 0
        self._state = PassState.IDLE
        self._failure = ""
        self._root_synchronises = True
        self._end_queued = False
        self._guarded = False  # inside backward_pass(), whose caller sees an exception itself

        self._agreed = self._slots.trainable_now()
        self._changes = 0  # of the trainable set
        self._asked_in_pass = -1
        self._since_reduction: TrainableSet | None = None  # union of the passes since the last reduction
        self._replan_due = False

        self._contributing: set[int] = set()  # slots with a gradient since their last reduction
        self._imported: set[int] = set()  # slots whose hooks came after some of this cycle's gradients
        self._active: list[_BucketRun] = []
        self._next = 0
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._control: ControlExchange | None = None
        self._unread: deque[ControlExchange] = deque()
        self._to_learn: ReadyOrder | None = ReadyOrder()
        self._reachable: set[int] | None = None
        self._graph_shows_all = True

    # -- what others may ask -------------------------------------------------------------------------

    @property
    def state(self) -> PassState:
        """Where the reducer is."""
        return self._state

    @property
    def layout(self) -> Layout:
        """Where the gradients lie now."""
        return self._buffers.layout

    def views(self) -> dict[str, Tensor]:
        """Each slot's view into its gradient buffer, by parameter name."""
        specs = self._slots.specs[: len(self._buffers.views)]
        return {spec.name: view for spec, view in zip(specs, self._buffers.views, strict=True)}

    def close(self) -> None:
        """Removes the hooks and gives gradients back as plain tensors. Sends nothing; safe in any state."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        views = self._buffers.views
        for param, view in zip(self._slots.params, views, strict=False):
            if param.grad is view:
                param.grad = view.clone()
        self._runs.clear()
        self._run_of.clear()
        self._expected.clear()
        self._active.clear()
        self._kept.clear()
        self._buffers.release()
        self._state = PassState.CLOSED

    # -- layout --------------------------------------------------------------------------------------

    def _hook_slots(self, slots: range) -> None:
        for slot in slots:
            param = self._slots.params[slot]
            trainable = param.requires_grad
            param.requires_grad_(True)  # torch refuses hooks on a parameter that is frozen at the moment
            self._hooks.append(param.register_post_accumulate_grad_hook(partial(self._on_gradient, slot)))
            param.requires_grad_(trainable)

    def _make_runs(self) -> None:
        kinds = self._slots.kinds
        self._runs = [
            _BucketRun(
                bucket,
                self._buffers.bucket_flat(bucket),
                held_back=any(kinds[slot] is SlotKind.REPEATED for slot in bucket.slots),
            )
            for bucket in self._buffers.layout.buckets
        ]
        self._run_of = {slot: run for run in self._runs for slot in run.slots}
        self._expected: dict[TrainableSet, list[tuple[_BucketRun, frozenset[int]]]] = {}

    def _relayout_if_due(self) -> None:
        if not self._replan_due:
            return
        self._replan_due = False
        layout = self._slots.plan()
        self._runs.clear()  # they hold the flat tensors, which relayout may want to give back first
        self._run_of.clear()
        self._active.clear()
        self._buffers.relayout(layout, self._slots.params)
        self._make_runs()

    # -- trainable sets ------------------------------------------------------------------------------

    def note_forward(self, synchronised: bool) -> None:
        """Called at each forward that records a graph.

        Settles a broken pass, and gives parameters that were unfrozen their slots and hooks before backward
        needs them.

        Args:
            synchronised: Whether the backward of this forward will be.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        self._require_usable()
        trainable = self._slots.trainable_now()
        if trainable == self._agreed or self._slots.has_all(trainable):
            return
        if synchronised:
            self._agree_on(self._united(trainable))
        else:
            self._since_reduction = self._united(trainable)

    def _united(self, trainable: TrainableSet) -> TrainableSet:
        before = self._since_reduction
        if before is None or before == trainable:
            return trainable
        return tuple([a or b for a, b in zip(before, trainable, strict=True)])

    def _agree_on(self, trainable: TrainableSet) -> None:
        """Makes sure that all ranks go from the set agreed last to ``trainable``.

        Every change is agreed, back to an earlier set as well: a rank that changes alone would launch other buckets
        than the rest, which ends a gloo process on the spot and hangs NCCL.
        """
        if trainable == self._agreed:
            return
        self._changes += 1
        self._asked_in_pass = self.pass_number
        try:
            self._agreement.require_same_trainable(
                self.pass_number, self._changes, trainable, self._slots.names, self.raise_if_a_peer_failed
            )
        except (RuntimeError, RankMismatchError) as error:
            self._fail(str(error))
            raise
        self._agreed = trainable
        if not self._slots.knows(trainable):
            added = self._slots.add(trainable)
            self._hook_slots(added)
            self._imported.update(added)
            self._replan_due = True

    # -- opening -------------------------------------------------------------------------------------

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
            if synchronised and self._find_unused and self._state in (PassState.IDLE, PassState.BROKEN):
                self._open(synchronised=True)

    @contextmanager
    def backward_pass(self, loss: Tensor, synchronised: bool) -> Iterator[None]:
        """A pass around a backward that the caller runs: opened here, and ended in any case.

        Args:
            loss: The tensor that backward will start from, or pass by.
            synchronised: Whether gradients are reduced.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        prune = self._find_unused and synchronised and self._graph_shows_all
        self._open(synchronised, reachable_leaves(loss) if prune else None)
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
        self._require_usable()
        trainable = self._slots.trainable_now()
        self._since_reduction = self._united(trainable)
        if synchronised:
            self._agree_on(self._since_reduction)
        self._relayout_if_due()
        params = self._slots.params
        learning = self._to_learn is not None
        for run, expected in self._expected_in(trainable):
            if reachable is None or learning:
                run.waiting = set(expected)
            else:
                run.waiting = {slot for slot in expected if id(params[slot]) in reachable}
            run.launched = False
        if not synchronised:
            self._state = PassState.LOCAL
            return
        self._read_controls_that_arrived()
        self._contributing.update(slot for slot in self._imported if params[slot].grad is not None)
        self._imported.clear()
        self._active = [run for run, slots in self._expected_in(self._since_reduction) if slots]
        self._next = 0
        self._control = None
        self._reachable = reachable
        self._state = PassState.SYNCHRONISED

    def _expected_in(self, trainable: TrainableSet) -> list[tuple[_BucketRun, frozenset[int]]]:
        """Per bucket, the slots whose parameters are in the set."""
        found = self._expected.get(trainable)
        if found is None:
            found = [
                (run, frozenset(slot for slot in run.slots if self._slots.is_in(slot, trainable))) for run in self._runs
            ]
            self._expected[trainable] = found
        return found

    # -- gradients -----------------------------------------------------------------------------------

    def _on_gradient(self, slot: int, param: Tensor) -> None:
        """Autograd has accumulated into ``param.grad``."""
        with self._lock:
            if self._state not in (PassState.SYNCHRONISED, PassState.LOCAL):
                # Plain PyTorch opens here. Without a root (a backward that did not come by forward's outputs)
                # the backward that runs right now also ends the pass, even if it is an inner one.
                synchronised = self._root_synchronises
                if not self._end_queued:
                    self._queue_end()
                self._open(synchronised)
            run = self._run_of[slot]
            if run.launched:
                raise RuntimeError(self._late_gradient(slot))
            self._contributing.add(slot)
            if self._on_accelerator:
                run.streams.add(torch.accelerator.current_stream(param.device))
            waiting = run.waiting
            if slot in waiting:
                waiting.discard(slot)
                if not waiting:
                    self._on_complete(run)
            if self._to_learn is not None and self._state is PassState.SYNCHRONISED:
                self._to_learn.arrived(slot)

    def _on_complete(self, run: _BucketRun) -> None:
        self._buffers.capture(run.slots, self._slots.params)
        if self._state is PassState.LOCAL or self._to_learn is not None:
            return
        while self._next < len(self._active):
            run = self._active[self._next]
            if run.waiting or run.held_back:
                return
            self._launch(run)

    def _launch(self, run: _BucketRun) -> None:
        """Starts a bucket's collective; until the finish its parameters have no ``.grad`` to accumulate into."""
        params, views, contributing = self._slots.params, self._buffers.views, self._contributing
        for stream in run.streams:
            torch.accelerator.current_stream(run.flat.device).wait_stream(stream)
        run.streams.clear()
        self._buffers.capture([slot for slot in run.slots if slot in contributing], params)
        absent: list[Tensor] = []
        for slot in run.slots:
            param, view = params[slot], views[slot]
            grad = param.grad
            if grad is None:
                contributing.discard(slot)
                absent.append(view)
            elif slot not in contributing:
                # Published before, or put there by the user: it takes part, and comes back if no rank used it.
                self._kept[slot] = (grad, grad.detach().clone() if grad is view else None)
                if grad is not view:
                    view.copy_(grad.detach())
            param.grad = None
        if absent:
            torch._foreach_zero_(absent)
        run.pending = self._collectives.all_reduce_mean(run.flat)
        run.launched = True
        self._next += 1

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
            awaited = [self._slots.specs[slot].name for run in self._active for slot in sorted(run.waiting)]
            where = f" before the gradient of {awaited[0]!r} (and {len(awaited) - 1} more)" if awaited else ""
            self._agreement.publish_failure(self.pass_number, f"left backward with an exception{where}")

    def _end_pass(self) -> None:
        if self._state is PassState.LOCAL:
            self._buffers.capture(list(self._contributing), self._slots.params)
            self._state = PassState.IDLE
        elif self._state is PassState.SYNCHRONISED:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Launches what is left, waits, and publishes the reduced gradients as views."""
        self.early_launches = self._next
        while self._next < len(self._active):
            self._launch(self._active[self._next])
        exchange = self._start_control(failed=False)

        params, views, contributing = self._slots.params, self._buffers.views, self._contributing
        unused: list[int] = []
        for run in self._active:
            assert run.pending is not None
            with self._waiting_for(run):
                run.pending.wait(self.raise_if_a_peer_failed)
            for slot in run.slots:
                if slot in contributing:
                    params[slot].grad = views[slot]
                else:
                    unused.append(slot)
        with self._waiting_for(None):
            exchange.wait(self.raise_if_a_peer_failed)
        if unused or self._to_learn is not None or not self._on_accelerator:
            control = exchange.read()
            self._require_success(control)
            for slot in unused:
                self._publish_unused(slot, control.used_somewhere(slot))
        else:
            self._unread.append(exchange)
        if self._to_learn is not None:
            self._learn(self._to_learn)
        self._end_reduction()

    def _start_control(self, failed: bool) -> ControlExchange:
        assert self._since_reduction is not None
        self._control = ControlExchange(
            self._collectives,
            self._runs[0].flat.device,
            slots=len(self._slots),
            used=self._contributing,
            fingerprint=fingerprint(self.pass_number, self._since_reduction),
            failed=failed,
        )
        return self._control

    def _publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """A parameter without a gradient here: another rank's share if there was one, else what it had before."""
        param, view = self._slots.params[slot], self._buffers.views[slot]
        kept = self._kept.get(slot)
        if used_elsewhere:
            param.grad = view
        elif kept is not None:
            grad, value = kept
            if value is not None:
                view.copy_(value)
            param.grad = grad

    def _learn(self, order: ReadyOrder) -> None:
        """The first pass teaches the order; the next pass is laid out by it."""
        if self._reachable is not None:
            seen = {id(self._slots.params[slot]) for slot in order.slots()}
            self._graph_shows_all = seen <= self._reachable
        with self._waiting_for(None):
            positions, repeated = order.share(
                len(self._slots), self._collectives, self._runs[0].flat.device, self.raise_if_a_peer_failed
            )
        self._slots.learn(positions, repeated)
        self._to_learn = None
        self._replan_due = True

    def _end_reduction(self) -> None:
        self._kept.clear()
        self._contributing.clear()
        self._since_reduction = None
        self._state = PassState.IDLE
        self.pass_number += 1

    # -- when something is wrong ---------------------------------------------------------------------

    def publish_failure(self, cause: str) -> None:
        """Tells ranks that wait, or will wait, for this rank in the present pass that it has failed.

        Args:
            cause: What happened, as the end of a sentence that begins with the rank.
        """
        if self._state not in (PassState.FAILED, PassState.CLOSED):
            self._agreement.publish_failure(self.pass_number, cause)

    def raise_if_a_peer_failed(self) -> None:
        """Called now and then while this rank waits for the others.

        Raises:
            PeerFailureError: If another rank failed in this pass.
            RankMismatchError: If another rank asks about a trainable set that this rank does not have.
        """
        cause = self._agreement.failure(self.pass_number)
        if cause is not None:
            raise PeerFailureError(self._peer_failed(cause))
        if self._asked_in_pass != self.pass_number:
            trainable = self._since_reduction or self._agreed
            self._agreement.answer_trainable(self.pass_number, self._changes + 1, trainable, self._slots.names)

    def _settle(self, cause: str) -> None:
        """Ends a pass in which backward raised on this rank, together with the others.

        This rank takes part in every collective of the pass, so that no other rank hangs, and says in the control
        vector that it failed. If all ranks did, the pass is dropped: no rank keeps a gradient of the parameters it
        concerned, and training may go on. Otherwise every rank raises.
        """
        if self._state is PassState.LOCAL:
            self._state = PassState.IDLE
        if self._state not in (PassState.SYNCHRONISED, PassState.BROKEN):
            return
        self._fail(self._peer_failed(f"rank {self._collectives.rank} {cause}"))
        deadline = time.monotonic() + SETTLE_SECONDS

        def raise_when_late() -> None:
            if time.monotonic() > deadline:
                raise PeerFailureError("the other ranks did not take note in time")

        try:
            self._agreement.publish_failure(self.pass_number, cause)
            if self._control is not None:
                return
            for run in self._active[self._next :]:
                run.pending = self._collectives.all_reduce_mean(run.flat)
            exchange = self._start_control(failed=True)
            for run in self._active:
                assert run.pending is not None
                run.pending.wait(raise_when_late)
            exchange.wait(raise_when_late)
            control = exchange.read()
        except Exception:  # the others are gone, or stay away: this rank raises its own error all the same
            return
        if control.failed_ranks == self._collectives.world_size:
            self._drop_pass()

    def _drop_pass(self) -> None:
        for run in self._active:
            for slot in run.slots:
                self._slots.params[slot].grad = None
        if self._to_learn is not None:
            self._to_learn = ReadyOrder()
        self._failure = ""
        self._end_reduction()

    def _require_usable(self) -> None:
        if self._state is PassState.BROKEN:
            self._settle("left backward with an exception")
        if self._state is PassState.FAILED:
            raise PeerFailureError(self._failure)
        if self._state is PassState.CLOSED:
            raise RuntimeError("expected an open BucketDDP, found one after close(); wrap the module again")

    def _require_success(self, control: Control) -> None:
        if control.failed_ranks:
            cause = self._agreement.failure(self.pass_number) or f"{control.failed_ranks} rank(s) raised in backward"
            self._fail(self._peer_failed(cause))
            raise PeerFailureError(self._failure)
        if not control.agreed:
            assert self._since_reduction is not None
            try:
                self._agreement.require_same_trainable(
                    self.pass_number, -1, self._since_reduction, self._slots.names, lambda: None
                )
            except (RuntimeError, RankMismatchError) as error:
                self._fail(str(error))
                raise
            self._fail(
                f"rank {self._collectives.rank}: ranks are in different passes; this one is in {self.pass_number}"
            )
            raise RankMismatchError(self._failure)

    def _read_controls_that_arrived(self) -> None:
        """Looks at earlier passes' control vectors on accelerators, without waiting for the device."""
        while self._unread and self._unread[0].arrived():
            self._require_success(self._unread.popleft().read())

    @contextmanager
    def _waiting_for(self, run: _BucketRun | None) -> Iterator[None]:
        """Around a wait: whatever it raises leaves the reducer failed, and says what was waited for."""
        try:
            yield
        except (PeerFailureError, RankMismatchError) as error:
            self._fail(str(error))
            raise
        except RuntimeError as error:
            what = "the control vector"
            if run is not None:
                names = [self._slots.specs[slot].name for slot in run.slots]
                what = f"the gradients of {names[0]!r} to {names[-1]!r} ({len(names)} parameters)"
            cause = "another rank ended or did not get here in time; its output tells why"
            with suppress(RuntimeError):  # the store goes with the rank that serves it
                cause = self._agreement.failure(self.pass_number) or cause
            self._fail(
                f"rank {self._collectives.rank}: reducing {what} failed in pass {self.pass_number}: {cause} ({error})"
            )
            raise PeerFailureError(self._failure) from error

    def _fail(self, message: str) -> None:
        self._failure = message
        self._state = PassState.FAILED

    def _peer_failed(self, cause: str) -> str:
        return (
            f"rank {self._collectives.rank}: pass {self.pass_number} cannot be completed: {cause}. "
            "Gradients of the ranks are no longer the same; restart from a checkpoint"
        )

    def _late_gradient(self, slot: int) -> str:
        return (
            f"rank {self._collectives.rank}: a gradient of parameter {self._slots.specs[slot].name!r} arrived after "
            f"its bucket was on its way in pass {self.pass_number}. It came less often in the first pass than now, "
            "as with re-entrant checkpointing of a varying number of calls; use checkpoint(..., use_reentrant=False)"
        )
