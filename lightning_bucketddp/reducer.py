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
from lightning_bucketddp.bucket_runs import BucketRun, BucketRuns
from lightning_bucketddp.collectives import Collectives
from lightning_bucketddp.control import Control, ControlExchange, fingerprint
from lightning_bucketddp.engine import BackwardEnd, reachable_leaves
from lightning_bucketddp.layout import Layout
from lightning_bucketddp.ready_order import ReadyOrder
from lightning_bucketddp.slots import SlotTable, TrainableSet
from lightning_bucketddp.trainable import TrainableHistory

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
        synchronise: Whether passes are synchronised, where no root tells otherwise.
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
        self._runs = BucketRuns(self._slots, collectives)
        self._hooks: list[RemovableHandle] = []
        self._hook_slots(range(len(self._slots)))

        devices = {param.device for param in self._slots.all_params}
        # Each device has its autograd thread; with one device there is nobody to lock out.
        self._lock: AbstractContextManager[object] = threading.RLock() if len(devices) > 1 else nullcontext()

        self.synchronise = True
        self.pass_number = 0
        self.early_launches = 0
        self._state = PassState.IDLE
        self._failure = ""
        self._root_synchronises = True
        self._end_queued = False
        self._guarded = False  # inside backward_pass(), whose caller sees an exception itself

        self._trainable = TrainableHistory(self._slots, agreement)
        self._replan_due = False
        self._imported: set[int] = set()  # slots whose hooks came after some of this cycle's gradients
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
        return self._runs.layout

    def views(self) -> dict[str, Tensor]:
        """Each slot's view into its gradient buffer, by parameter name."""
        return {spec.name: view for spec, view in zip(self._slots.specs, self._runs.views, strict=False)}

    def close(self) -> None:
        """Removes the hooks and gives gradients back as plain tensors. Sends nothing; safe in any state."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._runs.release()
        self._state = PassState.CLOSED

    def _hook_slots(self, slots: range) -> None:
        for slot in slots:
            param = self._slots.params[slot]
            trainable = param.requires_grad
            param.requires_grad_(True)  # torch refuses hooks on a parameter that is frozen at the moment
            self._hooks.append(param.register_post_accumulate_grad_hook(partial(self._on_gradient, slot)))
            param.requires_grad_(trainable)

    # -- trainable sets ------------------------------------------------------------------------------

    def note_forward(self) -> None:
        """Called at each forward that records a graph.

        Settles a broken pass, and gives parameters that were unfrozen their slots and hooks before backward
        needs them.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        self._require_usable()
        trainable = self._slots.trainable_now()
        if trainable == self._trainable.agreed or self._slots.has_all(trainable):
            return
        since = self._trainable.note(trainable)
        if self.synchronise:
            self._agree_on(since)

    def _agree_on(self, trainable: TrainableSet) -> None:
        try:
            changed = self._trainable.agree(trainable, self.pass_number, self.raise_if_a_peer_failed)
        except (RuntimeError, RankMismatchError) as error:
            self._fail(str(error))
            raise
        if changed and not self._slots.knows(trainable):
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
    def backward_pass(self, loss: Tensor) -> Iterator[None]:
        """A pass around a backward that the caller runs: opened here, and ended in any case.

        Args:
            loss: The tensor that backward will start from, or pass by.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        synchronised = self.synchronise
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
        since = self._trainable.note(trainable)
        if synchronised:
            self._agree_on(since)
        if self._replan_due:
            self._replan_due = False
            self._runs.relayout()
        self._runs.begin(trainable, reachable if self._to_learn is None else None)
        if not synchronised:
            self._state = PassState.LOCAL
            return
        self._read_controls_that_arrived()
        self._runs.contributing.update(slot for slot in self._imported if self._slots.params[slot].grad is not None)
        self._imported.clear()
        self._runs.activate(since)
        self._control = None
        self._reachable = reachable
        self._state = PassState.SYNCHRONISED

    # -- gradients -----------------------------------------------------------------------------------

    def _on_gradient(self, slot: int, param: Tensor) -> None:
        """Autograd has accumulated into ``param.grad``."""
        with self._lock:
            if self._state not in (PassState.SYNCHRONISED, PassState.LOCAL):
                # Plain PyTorch opens here. Without a root (a backward that did not come by forward's outputs)
                # the backward that runs right now also ends the pass, even if it is an inner one.
                if not self._end_queued:
                    self._root_synchronises = self.synchronise
                    self._queue_end()
                self._open(self._root_synchronises)
            complete = self._runs.arrived(slot)
            if self._state is PassState.SYNCHRONISED:
                if self._to_learn is not None:
                    self._to_learn.arrived(slot)
                elif complete:
                    self._runs.launch_complete()

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

    def _end_pass(self) -> None:
        if self._state is PassState.LOCAL:
            self._runs.capture_rest()
            self._state = PassState.IDLE
        elif self._state is PassState.SYNCHRONISED:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Launches what is left, waits, and publishes the reduced gradients as views."""
        runs = self._runs
        self.early_launches = runs.launched
        runs.launch_rest()
        exchange = self._start_control(failed=False)
        unused: list[int] = []
        for run in runs.active:
            assert run.pending is not None
            with self._waiting_for(run):
                run.pending.wait(self.raise_if_a_peer_failed)
            unused.extend(runs.publish(run))
        with self._waiting_for(None):
            exchange.wait(self.raise_if_a_peer_failed)
        if unused or self._to_learn is not None or exchange.arrived():
            control = exchange.read()
            self._require_success(control)
            for slot in unused:
                runs.publish_unused(slot, control.used_somewhere(slot))
        else:
            self._unread.append(exchange)
        if self._to_learn is not None:
            self._learn(self._to_learn)
        self._end_reduction()

    def _start_control(self, failed: bool) -> ControlExchange:
        self._control = ControlExchange(
            self._collectives,
            self._runs.device,
            slots=len(self._slots),
            used=self._runs.contributing,
            fingerprint=fingerprint(self.pass_number, self._trainable.since_reduction),
            failed=failed,
        )
        return self._control

    def _learn(self, order: ReadyOrder) -> None:
        """The first pass teaches the order; the next pass is laid out by it."""
        if self._reachable is not None:
            seen = {id(self._slots.params[slot]) for slot in order.slots()}
            self._graph_shows_all = seen <= self._reachable
        with self._waiting_for(None):
            positions, repeated = order.share(
                len(self._slots), self._collectives, self._runs.device, self.raise_if_a_peer_failed
            )
        self._slots.learn(positions, repeated)
        self._to_learn = None
        self._replan_due = True

    def _end_reduction(self) -> None:
        self._runs.end()
        self._trainable.reduced()
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
        self._trainable.answer(self.pass_number)

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
            self._runs.launch_rest_as_they_are()
            exchange = self._start_control(failed=True)
            self._runs.wait(raise_when_late)
            exchange.wait(raise_when_late)
            control = exchange.read()
        except Exception:  # the others are gone, or stay away: this rank raises its own error all the same
            return
        if control.failed_ranks == self._collectives.world_size:
            self._drop_pass()

    def _drop_pass(self) -> None:
        self._runs.drop()
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
            self._fail(
                f"rank {self._collectives.rank}: ranks are in different passes; this one is in {self.pass_number}"
            )
            raise RankMismatchError(self._failure)

    def _read_controls_that_arrived(self) -> None:
        """Looks at earlier passes' control vectors on accelerators, without waiting for the device."""
        while self._unread and self._unread[0].arrived():
            self._require_success(self._unread.popleft().read())

    @contextmanager
    def _waiting_for(self, run: BucketRun | None) -> Iterator[None]:
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
