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

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.comm.queue import Turns
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket_runs import NONE, BucketRun, BucketRuns
from lightning_bucketddp.grads.checks import GradientError, not_cleared
from lightning_bucketddp.grads.coalesced_runs import CoalescedRuns
from lightning_bucketddp.grads.engine import BackwardEnd, reachable_leaves
from lightning_bucketddp.grads.hooks import GradientHooks
from lightning_bucketddp.grads.sharded_runs import ShardedRuns
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.grads.sparse import SparseGrads
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import ALIGNMENT_BYTES, Layout
from lightning_bucketddp.peers.agreement import Entry, PeerFailureError, RankMismatchError
from lightning_bucketddp.peers.control import ControlExchange, Report, fingerprint
from lightning_bucketddp.peers.control_checks import ControlChecks
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.reducer.hook_registration import HookRegistration
from lightning_bucketddp.reducer.params import Params
from lightning_bucketddp.reducer.ready_order import OrderLearner
from lightning_bucketddp.reducer.record import PassNotes, PassRecord, log_layout, log_pass
from lightning_bucketddp.reducer.trainable import TrainableHistory

SETTLE_SECONDS = 10.0
"""How long a rank whose backward raised waits for the others to take note before it goes on raising.

A rank that comes later finds a rank that has given up, and raises in its next pass: an error, not a hang.
"""


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


def _bucket_multiple(options: Options, ranks: int) -> int:
    """Elements that the length of each bucket is a multiple of; shards of them begin where vector loads do."""
    per_line = ALIGNMENT_BYTES // 4
    return math.lcm(options.pad_buckets_to, ranks * per_line) if options.shard_optimizer else options.pad_buckets_to


class Reducer:
    """Keeps gradients in contiguous buffers and replaces them by their means over the ranks.

    Args:
        params: The parameters of the module; the same on every rank.
        collectives: The group.
        peers: The other ranks: where they are, and how this one gives up.
        options: What was asked for.
        comm_hook: What reduces the buckets instead of an all-reduce; agreed between the ranks.
        one_machine: Whether the ranks share one machine; agreed between them.

    Attributes:
        checks: What the ranks must have in common when they meet in a pass.
        uneven: Whether some ranks may run out of data before others.
        on_backward_end: Called when a backward has ended, before anything is waited for; told whether it raised.
        replaying: Whether this rank, which has run out of data, runs its last batch once more to stay in step. Such
            a pass must contribute nothing.
        divisor: What the sum over the ranks is divided by.
        hooks: What keeps the reducer informed: a hook on each parameter. They keep it alive, so whoever
            drops the reducer removes them.
        in_one_replica: Whether the last forward ran in one replica where others may run in several, each of which
            brings gradients of its own if layers are checkpointed re-entrantly: its pass does not show how many come.
        synchronise: False inside ``no_sync``.
        early_launches: How many buckets the last synchronised pass launched before backward had ended.
    """

    def __init__(
        self,
        params: Params,
        collectives: Collectives,
        peers: Peers,
        options: Options,
        comm_hook: CommHook | None = None,
        one_machine: bool = False,
    ) -> None:
        self._collectives = collectives
        self.peers = peers
        self._options = options
        self._find_unused = options.find_unused_parameters
        self.divisor = GradientDivisor(options.gradient_divide_by, collectives.rank, collectives.world_size)
        self._params, self._one_machine = params, one_machine
        self._registration = HookRegistration(peers, options)
        self.checks = ControlChecks(peers)
        # Each device has its autograd thread, and outputs may be on other devices than parameters.
        self._lock = threading.RLock()

        self.on_backward_end: Callable[[bool], None] = lambda raised: None
        self.synchronise = True
        self.uneven = self.in_one_replica = False
        self._out_of_data = self.replaying = self._contributed = False
        self.early_launches = 0
        self._state = PassState.IDLE
        self._root_synchronises = True
        self._end_queued = False
        self._by_hand = False  # a reduction without a backward is under way
        self._uncleared: str | None = None  # a parameter whose gradient is an earlier pass's
        self._turns = Turns(collectives.group)
        self._guarded = False  # inside backward_pass(), whose caller sees an exception itself

        self._control: ControlExchange | None = None
        self._changes_agreed = params.changes
        self._agreements = 0  # on changed parameters
        self._new_params: list[nn.Parameter] = []  # whose values no rank has sent yet
        self._make_tables(comm_hook)

        self._layouts = 1
        self._local_passes = 0  # since the last reduction
        self._notes: PassNotes | None = None
        self._last_notes: PassNotes | None = None  # of the last pass that published gradients
        log_layout(self.layout, collectives.rank, self.pass_number)

    def _make_tables(self, comm_hook: CommHook | None) -> None:
        """Make everything that follows from which parameters there are."""
        options, collectives = self._options, self._collectives
        overlap = options.overlap and options.use_contiguous_buffers
        self._slots = SlotTable(
            self._params.named,
            options.bucket_cap_bytes,
            self._params.sparse,
            _bucket_multiple(options, collectives.world_size),
            overlap,
            collectives.world_size,
            self._one_machine,
            by_param_dtype=options.shard_optimizer,
        )
        runs: Callable[..., BucketRuns] = BucketRuns if options.use_contiguous_buffers else CoalescedRuns
        if options.shard_optimizer:
            runs = partial(ShardedRuns, ShardGroups(collectives, options.shard_group_size), options.scatter_every_pass)
        self._runs = runs(self._slots, collectives, overlap, options.max_abs_grad, options.wire_dtype)
        self._runs.comm_hook = comm_hook
        self._sparse = SparseGrads(self._slots, collectives, options.max_abs_grad)
        self._index_of_param = {id(param): index for index, param in enumerate(self._slots.all_params)}
        self.hooks = GradientHooks(self._slots.all_params, self._slots, self._runs, self._on_gradient)
        self._trainable = TrainableHistory(self._slots, self.peers)
        self._replan_due = False
        self._without_slot: set[int] = set()  # parameters with a gradient since the last reduction and no slot yet
        self._learner = OrderLearner(self._slots, collectives, enabled=overlap)
        self._groups: list[list[Tensor]] = []
        self._groups_of: tuple[Layout, bool] | None = None

    # -- what others may ask -------------------------------------------------------------------------

    @property
    def reduces(self) -> bool:
        """Whether passes are reduced, where no root tells otherwise."""
        return self.synchronise or self._options.scatter_every_pass

    @property
    def state(self) -> PassState:
        """Where the reducer is."""
        return PassState.FAILED if self.peers.message and self._state is not PassState.CLOSED else self._state

    @property
    def pass_number(self) -> int:
        """How many synchronised passes have been completed."""
        return self.peers.position.pass_number

    @property
    def layout(self) -> Layout:
        """Where the gradients lie now."""
        return self._runs.layout

    def views(self) -> dict[str, Tensor]:
        """Each slot's view into its gradient buffer, by parameter name."""
        return {spec.name: view for spec, view in zip(self._slots.specs, self._runs.views, strict=False)}

    def arriving_together(self) -> list[list[Tensor]]:
        """Parameters whose gradients may as well come together in the next pass, grouped: those of each bucket.

        Each alone if the pass is to show when they come, or is to begin with another layout; or if a gradient that is
        there has been reduced before, as autograd does not tell whether such a one got anything new when others of its
        group did. The same list as long as nothing changes.
        """
        alone = self._learner.learning or self._replan_due or self._runs.holds_reduced()
        if self._groups_of != (self.layout, alone):
            slots, params = self._slots, self._slots.params
            buckets = [] if alone else [bucket.slots for bucket in self.layout.buckets]
            others = range(len(slots.all_params)) if alone else sorted(slots.indices_without_slot())
            self._groups = [[params[slot] for slot in bucket] for bucket in buckets]
            self._groups += [[slots.all_params[index]] for index in others]
            self._groups_of = self.layout, alone
        return self._groups

    def unbind_main_grads(self) -> None:
        """Takes ``main_grad`` away from the parameters, until the next training forward."""
        self._runs.unbind_main_grads()

    @property
    def slots(self) -> SlotTable:
        """The parameters and their slots."""
        return self._slots

    @property
    def runs(self) -> BucketRuns:
        """The buckets."""
        return self._runs

    def last_pass(self) -> PassRecord | None:
        """What happened in the last synchronised pass that published gradients, if there was one."""
        if self._last_notes is None:
            return None
        return self._last_notes.record(self._collectives.rank, self._collectives.world_size)

    def trains(self) -> set[int]:
        """The ids of the parameters whose gradients are reduced here."""
        sparse = [self._slots.all_params[index] for index in self._slots.sparse]
        return {id(param) for param in [*self._slots.params, *sparse]}

    def close(self) -> None:
        """Removes the hooks and gives gradients back as plain tensors. Sends nothing; safe in any state."""
        self.hooks.remove()
        if self._runs.under_way():
            self._collectives.leave_behind(self.peers.message or "it was closed in the middle of a pass")
        self._runs.release()
        self._turns.leave(self)
        self.peers.close()
        self._enter(PassState.CLOSED)

    def register_comm_hook(self, make_hook: Callable[[], CommHook]) -> None:
        """Lets a hook reduce the buckets from the next pass on. All ranks must call this at the same point.

        Args:
            make_hook: Gives the hook, or raises.

        Raises:
            RuntimeError: If there is a hook already, or a pass is under way.
            ValueError: If gradients travel in a wire dtype.
            RankMismatchError: If ranks register different hooks, or if this is not called on all of them.
        """
        self.require_usable()
        between_passes = self._state is PassState.IDLE
        self._runs.comm_hook = self._registration.agree(make_hook, self._runs.comm_hook, between_passes)

    # -- steps ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A training step begins, on every rank."""
        self.peers.here.begin_step()

    def end_step(self) -> None:
        """All backwards of the step have been run: ranks that are in another one need not wait."""
        if self._state is PassState.IDLE:
            self.peers.here.end_step()

    # -- opening -------------------------------------------------------------------------------------

    def require_usable(self) -> None:
        """Settles a broken pass.

        Raises:
            PeerFailureError: If the ranks cannot go on together.
            RuntimeError: If the reducer is closed.
        """
        if self._state is PassState.BROKEN:
            self._settle("left backward with an exception")
        if self._state is PassState.CLOSED:
            raise RuntimeError("expected an open BucketDDP, found one after close(); wrap the module again")
        self.peers.require_usable()

    def note_forward(self) -> None:
        """A training forward has begun. Inside ``no_sync`` its trainable set counts, whatever its backward reaches.

        A local pass opens with the first gradient, which a rank whose loss reaches no parameter does not see; the ranks
        would differ in what was trainable since the last reduction, should it change before the next.
        """
        self.peers.here.begin_forward()
        self._runs.require_main_grads()
        if not self.reduces and self._state is PassState.IDLE:
            self._trainable.note(self._slots.trainable_now())

    def _agree_on(self, trainable: TrainableSet) -> None:
        try:
            with self.peers.giving_up_on_errors():
                changed = self._trainable.agree(trainable)
        except (PeerFailureError, RankMismatchError):
            raise
        except RuntimeError as error:
            self.peers.give_up(str(error), cause=f"gave up: {error}")
            raise
        if not changed:
            return
        if not self._slots.knows(trainable):
            self._slots.add(trainable)
            self._replan_due = True
        self._learner.look_at(trainable)

    def on_root(self, synchronised: bool, _grad: Tensor | None = None) -> None:
        """Called when backward reaches a tensor that ``forward`` returned.

        Queues the end of the pass here, in the outermost backward, where it runs once and last. The pass itself
        is opened by the first gradient, or here with ``find_unused_parameters``.

        Args:
            synchronised: What the forward decided.
        """
        with self._lock:
            if self._end_queued or self._by_hand or self.hooks.removed:
                return
            self.require_usable()  # before gradients come that are not of the pass to be settled
            self._root_synchronises = synchronised
            self._queue_end()
            if self._state is not PassState.IDLE:
                return
            self._look_before_gradients()
            if synchronised and self._find_unused:
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
        synchronised = self.reduces
        self._require_idle()
        root = loss.register_hook(partial(self.on_root, synchronised)) if loss.requires_grad else None
        self._guarded = True
        if synchronised:
            self._turns.line_up(self)
        try:
            with self._settling("backward"):
                self._open(synchronised, reachable_leaves(loss) if self._find_unused and synchronised else None)
                yield
                self._end_pass()
        finally:
            self._guarded = False
            self._turns.leave(self)
            if root is not None:
                root.remove()

    def _queue_end(self) -> None:
        # Only the engine holds the callback, so that its end of life tells that the engine dropped it.
        BackwardEnd(self._on_engine_end, self._on_engine_dropped).queue()
        self._end_queued = True
        if self._root_synchronises:
            self._turns.line_up(self)

    def _require_idle(self) -> None:
        self.require_usable()
        if self._by_hand:
            raise RuntimeError(
                "expected no pass under way, found the reduction that start_grad_sync() started; call "
                "finish_grad_sync() first"
            )
        if self._state is not PassState.IDLE:
            raise RuntimeError("expected one pass at a time, found another one open; backward_pass() cannot be nested")

    def _look_before_gradients(self) -> None:
        """Take in changed parameters, and see what is in ``.grad`` before a backward adds to it, where that matters."""
        self._take_in_changed()
        if not self.divisor.rescales:
            self._runs.before_gradients()
            return
        if self._options.scatter_every_pass:
            self._runs.before_gradients()  # what earlier passes have left is set aside, and not divided again
        self._uncleared = self._runs.first_uncleared() or self._sparse.first_uncleared()
        holds_gradients = self._runs.holds_gradients() or self._sparse.holds_gradients() or bool(self._without_slot)
        if self._local_passes and not holds_gradients:
            self.divisor.drop_local_tokens()  # with the gradients
        self._runs.before_gradients()

    def _take_in_changed(self) -> None:
        """Lay buckets out anew if parameters were added, removed, replaced or re-typed. Sends nothing.

        Here, at the root of backward, parameters that `torch.func.functional_call` swapped in for forward are gone.

        Raises:
            WrapError: If a new parameter cannot be wrapped, or an optimizer holds shards or masters of old ones.
        """
        if not self._params.changed():
            return
        try:
            self._params.take_in()
        except RuntimeError as error:
            self.peers.publish_failure(f"raised {type(error).__name__}: {error}", for_good=False)
            raise
        self._make_tables_again()

    def _make_tables_again(self) -> None:
        """Lay buckets out for the parameters that there are now, and keep what accumulated since the last reduction."""
        old = self._slots
        known = {id(param) for param in old.all_params}
        pending = {id(old.params[slot]) for slot in self._runs.contributing}
        pending |= {id(old.all_params[index]) for index in self._without_slot | self._sparse.contributing}
        since = self._trainable.since_reduction
        comm_hook = self._runs.comm_hook
        if comm_hook is not None:
            comm_hook.forget_buckets()
        self.hooks.remove()
        self._runs.release()
        self._make_tables(comm_hook)
        for index, param in enumerate(self._slots.all_params):
            if id(param) not in known:
                self._new_params.append(param)
            if id(param) in pending or (id(param) not in known and param.grad is not None):
                slot = self._slots.slot_of(index)
                if index in self._slots.sparse:
                    self._sparse.contributing.add(index)
                elif slot is not None:
                    self._runs.contributing.add(slot)
                else:
                    self._without_slot.add(index)
        if since is not None:
            trained = {id(param) for param, flag in zip(old.all_params, since, strict=True) if flag}
            self._trainable.note(tuple([id(param) in trained for param in self._slots.all_params]))
        self._layouts += 1
        log_layout(self.layout, self._collectives.rank, self.pass_number)

    def _agree_on_params(self) -> None:
        """Have all ranks take in the same parameters.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs.
            PeerFailureError: If another rank is in the pass with the parameters it had.
        """
        new = {id(param) for param in self._new_params}
        lines = [Entry(f"taken-in parameter {name!r}", "") for name, param in self._params.named if id(param) in new]
        with self.peers.giving_up_on_errors():
            topic = f"the parameters of pass {self.pass_number} (change {self._agreements + 1})"
            self.peers.require_same(topic, [*self._params.entries(), *lines])
        self._agreements += 1
        self._changes_agreed = self._params.changes
        if self._trainable.agreed != self._slots.trainable_now():  # was laid out in a local pass, for other ones
            self._make_tables_again()

    def _open(self, synchronised: bool, reachable: set[int] | None = None, accumulating: bool = False) -> None:
        """Opens a pass.

        Args:
            synchronised: Whether its gradients are reduced.
            reachable: Ids of the parameters that will get a gradient, if that is known.
            accumulating: Whether a gradient has been accumulated already.
        """
        self._require_idle()
        if not accumulating:
            self._look_before_gradients()
        if synchronised and self._changes_agreed != self._params.changes:
            self._agree_on_params()
        trainable = self._slots.trainable_now()
        since = self._trainable.note(trainable)
        if synchronised:
            self._agree_on(since)
        if self._replan_due:
            self._relayout()
        learning = self._learner.learning
        self._runs.begin(trainable, None if learning else reachable, local=not synchronised, in_order=not learning)
        if not synchronised:
            self._require_divisible()
            self._enter(PassState.LOCAL)
            if not self.replaying:
                self._runs.settle_local()
                self._runs.marks_only = self._runs.may_only_mark()
            return
        self.checks.read_what_arrived()
        for index in self._without_slot:
            if (slot := self._slots.slot_of(index)) is not None:
                self._runs.contributing.add(slot)
        self._without_slot.clear()
        self._runs.activate(since)
        self._control = None
        self._enter(PassState.SYNCHRONISED)
        self._notes = PassNotes(
            self.pass_number, self._runs.layout, self._slots, since, self._layouts, self._last_notes, self._local_passes
        )
        try:  # only now, when what is raised concerns a pass that the others can be told of
            self._require_divisible()
            if not self._out_of_data:
                self.divisor.require_counted()
        except RuntimeError as error:
            self.peers.publish_failure(f"raised RuntimeError: {error}", for_good=False)
            raise
        self._runs.marks_only = self._runs.may_only_mark() and not self.replaying

    def _require_divisible(self) -> None:
        if self._uncleared is not None:
            raise RuntimeError(not_cleared(self._collectives.rank, self._uncleared))

    def _relayout(self) -> None:
        before = self._runs.layout
        self._runs.relayout()
        self._replan_due = False
        if self._runs.layout is not before:
            self._layouts += 1
            log_layout(self.layout, self._collectives.rank, self.pass_number)

    # -- gradients -----------------------------------------------------------------------------------

    def _on_gradient(self, index: int, param: Tensor) -> None:
        """Note that a gradient is ready, and launch its bucket if that makes it full.

        Args:
            index: The parameter's index in the module.
            param: The parameter.
        """
        with self._lock:
            if self._by_hand or self.replaying:
                self._require_own_batch(self._slots.names[index])
            if self._state is not PassState.SYNCHRONISED and self._state is not PassState.LOCAL:
                found = self._open_by_gradient(index, param)
                if found is None:
                    return
                index = found
            slot = self._slots.slot_of_index.get(index)
            if slot is None:  # sparse, or unfrozen in a local pass: it gets its slot when the ranks have agreed on it
                (self._sparse.contributing if index in self._slots.sparse else self._without_slot).add(index)
                return
            if self._state is PassState.LOCAL:
                if (bucket := self._runs.ready(slot)) is not None:
                    self._runs.hold(bucket.slots)
                return
            bucket = self._runs.ready(slot)
            if self._learner.learning:
                self._learner.arrived(slot)
            elif bucket is not None:
                self._on_full(bucket)

    def _on_full(self, bucket: BucketRun) -> None:
        """Launch a bucket whose gradients are all ready, or hold them in its memory until its turn comes."""
        if self._turns.is_first(self):
            with self._launching():
                self._runs.launch_complete()
        if not bucket.launched:
            self._runs.hold(bucket.slots)

    def _open_by_gradient(self, index: int, param: Tensor) -> int | None:
        """Open the pass in which a gradient has been accumulated already, as plain PyTorch does.

        Without a root (a backward that did not come by forward's outputs) the backward that runs right now also ends
        the pass, even if it is an inner one.

        Returns:
            The parameter's index in the module, which may have changed; None if it was replaced since forward.
        """
        if not self._end_queued:
            self._take_in_changed()
            if (found := self._index_of_param.get(id(param))) is None:
                return None
            index = found
            self._root_synchronises = self.reduces
            self._queue_end()
            self.divisor.require_root(self._slots.names[index])
        slot = self._slots.slot_of(index)
        if slot is not None:
            self._runs.require_untouched(slot)
        try:
            self._open(self._root_synchronises, accumulating=True)
        except RuntimeError:
            if slot is not None:
                self._runs.contributing.add(slot)  # to be dropped with the rest of the pass
            raise
        return index

    def _require_own_batch(self, name: str) -> None:
        if self._by_hand:
            self._require_idle()
        if self.replaying and not self._guarded:
            raise RuntimeError(
                f"rank {self._collectives.rank}: expected a backward inside backward_pass() (manual_backward() in "
                "a LightningModule) where ranks may run out of data, found a plain one, to which this rank, which "
                f"has, must not contribute the gradient of {name!r}"
            )

    @contextmanager
    def _launching(self) -> Iterator[None]:
        with self.peers.giving_up_on_errors():
            try:
                yield
            except GradientError as error:  # the others are to hear the reason, not only that backward raised
                self.peers.publish_failure(f"raised {type(error).__name__}: {error}", for_good=False)
                raise

    # -- a reduction without a backward --------------------------------------------------------------

    def start_reduction(self) -> None:
        """Opens a synchronised pass for the gradients that are there, and launches all buckets.

        Raises:
            RuntimeError: If the ranks cannot go on together.
        """
        self._require_idle()
        if self.uneven:
            raise RuntimeError(
                f"rank {self._collectives.rank}: expected a backward outside of no_sync() inside join(), found a "
                "reduction by hand, in which ranks that have run out of data would not take part; reduce in backward"
            )
        with self._settling("a reduction"):
            self._open(synchronised=True)
            self._by_hand = True
            self._runs.marks_only = False
            self._runs.contribute_present()
            self._sparse.contribute_present()
            with self._launching():
                self._runs.launch_rest(self.peers.poll)

    def finish_reduction(self) -> None:
        """Waits for what :meth:`start_reduction` launched, and publishes the gradients.

        Raises:
            RuntimeError: If nothing was started, or the ranks cannot go on together.
        """
        if not self._by_hand:
            raise RuntimeError("expected a reduction under way, found none; call start_grad_sync() first")
        with self._settling("a reduction"):
            self._finish()

    def counts(self) -> bool:
        """Whether what this rank does now is of consequence for the others' gradients."""
        return not self.replaying

    def shadow_pass(self) -> None:
        """A synchronised pass to which this rank, which has run out of data, contributes nothing."""
        for param in self._slots.all_params:
            param.grad = None
        self._runs.contributing.clear()
        self._sparse.contributing.clear()
        self._without_slot.clear()
        self.divisor.forget_tokens()
        self._require_idle()
        self._out_of_data = True
        try:
            with self._settling("a reduction"):
                self._open(synchronised=True)
                self._finish()
        finally:
            self._out_of_data = False

    def count_tokens(self, tokens: int | Tensor) -> None:
        """Adds to what gradients are divided by."""
        self.require_usable()  # a pass that is settled later would take these tokens with it
        self.divisor.count_tokens(0 if self.replaying else tokens)

    def zero_gradients(self) -> None:
        """Sets all gradients to zero, in place."""
        self.require_usable()
        if self._state is not PassState.IDLE:
            raise RuntimeError(
                "expected zero_grad_buffer() between passes, found one under way; call finish_grad_sync() first"
            )
        for index in self._without_slot:
            self._slots.all_params[index].grad = None
        self._without_slot.clear()
        self._runs.zero()
        self._sparse.zero()

    # -- ending --------------------------------------------------------------------------------------

    def _on_engine_end(self) -> None:
        self._end_queued = False
        try:
            self._end_pass()
        except BaseException:
            self._on_engine_dropped()
            raise
        finally:
            self._uncleared = None
            self._turns.leave(self)

    def _on_engine_dropped(self) -> None:
        """Backward raised. A guarding ``backward_pass`` settles it; otherwise the next use does."""
        self.on_backward_end(True)
        self._end_queued = False
        self._turns.leave(self)
        self._enter(self.state)
        if self._state is PassState.LOCAL:
            self._enter(PassState.IDLE)
        elif self._state is PassState.SYNCHRONISED and not self._guarded:
            self._enter(PassState.BROKEN)
            awaited = [self._slots.specs[slot].name for slot in self._runs.awaited()]
            where = f" before the gradient of {awaited[0]!r} (and {len(awaited) - 1} more)" if awaited else ""
            self.peers.publish_failure(f"left backward with an exception{where}", for_good=False)
            # Now, not when the pass is settled: by then `.grad` may hold the first gradient of another backward.
            self._runs.drop()
            self._sparse.drop()

    def _end_pass(self) -> None:
        if self._state in (PassState.LOCAL, PassState.SYNCHRONISED):
            self.on_backward_end(False)
        if self._state is PassState.LOCAL:
            self._runs.end_local()
            self._local_passes += 1
            self._contributed |= not self.replaying
            self.divisor.local_pass_ended()
            self._enter(PassState.IDLE)
        elif self._state is PassState.SYNCHRONISED:
            self._finish()
        else:
            self._runs.no_gradient_came()

    @torch.no_grad()
    def _finish(self) -> None:
        """Launches what is left, waits, and publishes the reduced gradients as views."""
        runs, notes = self._runs, self._notes
        assert notes is not None
        notes.backward_ended = time.perf_counter()
        self.early_launches = runs.launched
        with self._launching():
            runs.launch_rest(self.peers.poll)
            sparse = self._sparse.held(self._trainable.since_reduction)
        in_pass = partial(self.peers.waiting_for, phase=Phase.PASS)
        with in_pass(self._describe_awaited):
            runs.proceed(self.peers.poll)
        exchange = self._start_control(failed=False)
        with in_pass(self._describe_awaited):
            runs.wait(self.peers.poll)
        with in_pass("the control vector"):
            exchange.wait(self.peers.poll)
        factor = self.divisor.factor(exchange)
        if factor is not None:
            runs.rescale(factor)
        unused: list[int] = []
        for run in runs.active:
            unused.extend(runs.publish(run))
        if unused or sparse or self._learner.learning or exchange.arrived():
            control = self.checks.require_success(exchange.read())
            notes.used_somewhere = control.used_somewhere
            for slot in unused:
                runs.publish_unused(slot, control.used_somewhere(slot))
        else:
            self.checks.read_later(exchange)
        self._sparse.reduce(sparse, in_pass, self.peers.poll, factor)
        if self._learner.learning and not self._by_hand:  # which teaches nothing
            with in_pass("the order of readiness"):
                self._replan_due |= self._learner.learn(runs.device, self.peers.poll, not self.in_one_replica)
        notes.end(
            [(run.index, run.launched_at) for run in runs.active],
            early=self.early_launches,
            used=runs.contributing,
            sparse_used=self._sparse.contributing,
            sparse_used_somewhere=self._sparse.used_somewhere,
            sparse_nbytes=self._sparse.nbytes,
            control_nbytes=exchange.nbytes,
        )
        if self._new_params:
            self._send_new_params()
        self._end_reduction()
        self._last_notes = notes
        log_pass(notes, self._collectives.rank, self._collectives.world_size)

    def _send_new_params(self) -> None:
        """Give new parameters rank 0's values, as wrapping does: the next step starts from the same on all ranks."""
        if self._options.init_sync:
            with self.peers.waiting_for("the values of new parameters"):
                broadcast_tensors(self._new_params, self._collectives, self.peers.poll, hidden=True)
        self._new_params = []

    def _start_control(self, failed: bool) -> ControlExchange:
        report = Report(
            fingerprint(self.peers.number, self.pass_number, self._trainable.since_reduction, self.peers.here.updated),
            self.peers.position.step,
            self.peers.position.forward,
            self.divisor.tokens,
            self.divisor.tokens_on_device,
            failed,
            self._out_of_data or (self.replaying and not self._contributed),
        )
        self._control = ControlExchange(
            self._collectives, self._runs.device, report, len(self._slots), self._runs.contributing
        )
        return self._control

    def _end_reduction(self) -> None:
        self._runs.end()
        self._sparse.end()
        self.divisor.forget_tokens()
        self._trainable.reduced()
        self._local_passes = 0
        self._by_hand = self._contributed = False
        self._enter(PassState.IDLE)
        self.peers.here.end_pass()

    # -- when something is wrong ---------------------------------------------------------------------

    def _enter(self, state: PassState) -> None:
        self._state = state
        self._runs.settled = NONE
        self._runs.marks_only = False

    def _describe_awaited(self) -> str:
        run = self._runs.awaited_run
        assert run is not None
        names = [self._slots.specs[slot].name for slot in run.slots]
        return f"the gradients of {names[0]!r} to {names[-1]!r} ({len(names)} parameters)"

    @contextmanager
    def _settling(self, doing: str) -> Iterator[None]:
        """Ends the pass together with the others whatever is raised inside."""
        try:
            yield
        except BaseException as error:
            self._settle(f"raised {type(error).__name__} in {doing}: {error}")
            raise

    def _settle(self, cause: str) -> None:
        """Ends a pass in which backward raised on this rank, together with the others.

        This rank takes part in every collective of the pass, so that no other rank hangs, and says in the control
        vector that it failed. If all ranks did, training may go on; no rank keeps a gradient of the parameters that
        the pass concerned. Otherwise every rank raises.
        """
        self.on_backward_end(True)
        self._enter(self.state)
        if self._state is PassState.LOCAL:
            self._enter(PassState.IDLE)
        if self._state not in (PassState.SYNCHRONISED, PassState.BROKEN):
            return
        message = self.peers.cannot_complete(f"rank {self._collectives.rank} {cause}")
        self.peers.publish_failure(cause, for_good=False)
        if self._control is not None:  # the pass was through; nobody will ask in it any more
            self._give_up(message, cause)
            return
        if self._state is PassState.SYNCHRONISED:  # else that was done when it broke, and what came since is not its
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
            self._give_up(message, cause)
            return
        if control.failed_ranks == self._collectives.world_size:
            self._runs.forget_sent()
            self._learner.start_again()
            self._end_reduction()
        else:
            self._give_up(message, cause)

    def _give_up(self, message: str, cause: str) -> None:
        self.peers.give_up(message, cause)
        self._enter(self.state)
