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

from lightning_bucketddp.agreement import Agreement, PeerFailureError, RankMismatchError
from lightning_bucketddp.bucket_runs import BucketRun, BucketRuns
from lightning_bucketddp.collectives import Collectives
from lightning_bucketddp.control import Control, ControlExchange, fingerprint
from lightning_bucketddp.engine import BackwardEnd, hook_gradient, reachable_leaves
from lightning_bucketddp.layout import Layout
from lightning_bucketddp.ready_order import ReadyOrder
from lightning_bucketddp.slots import SlotTable, TrainableSet
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
        bucket_cap_bytes: Largest bucket in bytes; None for the default rule.
        find_unused_parameters: Look at the graph, where the loss is known, so as not to wait for gradients that
            this backward will not produce; and open the pass at the root rather than at the first gradient.

    Attributes:
        synchronise: Whether passes are synchronised, where no root tells otherwise.
        steps: How many steps this rank has begun, if the caller tells. Ranks are expected to be in the same step when
            they are in the same pass.
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
        bucket_cap_bytes: int | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self._collectives = collectives
        self._agreement = agreement
        self._find_unused = find_unused_parameters
        self._slots = SlotTable(named_params, bucket_cap_bytes)
        self._runs = BucketRuns(self._slots, collectives)
        hooks = [hook_gradient(p, partial(self._on_gradient, index)) for index, p in enumerate(self._slots.all_params)]
        self.hooks = [hook for hook in hooks if hook is not None]

        devices = {param.device for param in self._slots.all_params}
        # Each device has its autograd thread; with one device there is nobody to lock out.
        self._lock: AbstractContextManager[object] = threading.RLock() if len(devices) > 1 else nullcontext()

        self.synchronise = True
        self.steps = 0
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
        self._to_learn: ReadyOrder | None = ReadyOrder()
        self._learned_sets: set[TrainableSet] = set()

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
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if self._runs.under_way():
            self._collectives.leave_behind(self._failure or "it was closed in the middle of a pass")
        self._runs.release()
        self._state = PassState.CLOSED

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
        """A forward has begun. Inside ``no_sync`` its trainable set counts, whatever its backward reaches on this rank.

        A local pass opens with the first gradient, which a rank whose loss reaches no parameter does not see; the ranks
        would differ in what was trainable since the last reduction, should it change before the next.
        """
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
            if self._slots.unseen(trainable):
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
            self._runs.relayout()
            self._replan_due = False
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
                self._open(self._root_synchronises)
            slot = self._slots.slot_of(index)
            if slot is None:  # unfrozen in a local pass: it gets its slot when the ranks have agreed on it
                self._without_slot.add(index)
                return
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
            # Now, not when the pass is settled: by then `.grad` may hold the first gradient of another backward.
            self._runs.drop()

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
            with self.waiting_for(run):
                run.pending.wait(self._while_waiting)
            unused.extend(runs.publish(run))
        with self.waiting_for("the control vector"):
            exchange.wait(self._while_waiting)
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
            steps=self.steps,
            failed=failed,
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
        self._trainable.reduced()
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
        deadline = time.monotonic() + SETTLE_SECONDS

        def raise_when_late() -> None:
            if time.monotonic() > deadline:
                raise PeerFailureError("the other ranks did not take note in time")

        try:
            self._runs.launch_rest_as_they_are()
            exchange = self._start_control(failed=True)
            self._runs.wait(raise_when_late)
            exchange.wait(raise_when_late)
            control = exchange.read()
        except Exception:  # the others are gone, or stay away: this rank raises its own error all the same
            self._fail(message, cause)
            return
        if control.failed_ranks == self._collectives.world_size:
            if self._to_learn is not None:
                self._to_learn = ReadyOrder()
            self._end_reduction()
        else:
            self._fail(message, cause)

    def _require_success(self, control: Control) -> None:
        if control.failed_ranks:
            cause = self._agreement.failure(self.pass_number) or f"{control.failed_ranks} rank(s) raised in backward"
            self._fail(self._peer_failed(cause))
            raise PeerFailureError(self._failure)
        if not control.agreed:
            self._fail(f"rank {self._collectives.rank}: ranks took pass {self.pass_number} for different things")
            raise RankMismatchError(self._failure)
        if not control.in_step:
            self._fail(
                f"rank {self._collectives.rank}: ranks met in pass {self.pass_number} from different steps; this rank "
                f"is in step {self.steps}. Some rank skipped a backward that the others ran, or ran one more: look for "
                "a backward in a branch that depends on the rank or on its data"
            )
            raise RankMismatchError(self._failure)

    def _read_controls_that_arrived(self) -> None:
        """Looks at earlier passes' control vectors on accelerators, without waiting for the device."""
        while self._unread and self._unread[0].arrived():
            self._require_success(self._unread.popleft().read())

    @contextmanager
    def waiting_for(self, what: str | BucketRun) -> Iterator[None]:
        """Around a wait: whatever it raises leaves the reducer failed, and says what was waited for."""
        try:
            yield
        except (PeerFailureError, RankMismatchError) as error:
            self._fail(str(error))
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
