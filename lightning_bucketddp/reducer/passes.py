"""Passes begin and end here, however a backward comes: by a root, by its first gradient, in a context, or by a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.comm.queue import WrapperQueue
from lightning_bucketddp.grads.engine import BackwardEnd, reachable_leaves
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.control import ControlChecks
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.assembly import Setting
from lightning_bucketddp.reducer.changes import ParamChanges
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.reducer.joining import Joining
from lightning_bucketddp.reducer.params import Params
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.record import PassRecorder
from lightning_bucketddp.reducer.reducer import Reducer, not_own_batch
from lightning_bucketddp.reducer.state import Origin, Pass, PassState, Role
from lightning_bucketddp.reducer.upkeep import Upkeep


class Passes:
    """Opens and ends the passes of a module, and lays its buckets out anew when that is due.

    Args:
        params: The parameters of the module; the same on every rank.
        collectives: The group.
        peers: The other ranks.
        options: What was asked for.
        hook: What reduces the buckets instead of an all-reduce; agreed between the ranks.
        one_machine: Whether the ranks share one machine; agreed between them.
        others: Further participants.

    Attributes:
        upkeep: The reducer, and what keeps it in line with the module.
        joining: Whether ranks may run out of data, and whether this one has.
        synchronise: False inside ``no_sync``; :meth:`set_synchronise` changes it.
    """

    def __init__(
        self,
        params: Params,
        collectives: Collectives,
        peers: Peers,
        options: Options,
        hook: CommHook | None = None,
        one_machine: bool = False,
        others: Sequence[Participant] = (),
    ) -> None:
        checks = ControlChecks(peers)
        divisor = GradientDivisor(options.gradient_divide_by, collectives.rank, collectives.world_size)
        setting = Setting(
            collectives,
            options,
            one_machine,
            peers,
            ParamChanges(params, collectives, peers, options.init_sync),
            divisor,
            PassRecorder(collectives),
            checks,
            WrapperQueue(collectives.group),
            threading.RLock(),
            tuple(others),
        )
        self.upkeep = Upkeep(setting, hook, self._open_by_gradient)
        self.synchronise = True
        self.joining = Joining(divisor, peers)
        self._in_one_replica = False
        self._root_synchronises = True
        self._end_queued = False
        self._guarded = False  # inside backward_pass(), whose caller sees an exception itself

    # -- what others may ask -------------------------------------------------------------------------

    @property
    def peers(self) -> Peers:
        """The other ranks: where they are, and how this one gives up."""
        return self.upkeep.setting.peers

    @property
    def recorder(self) -> PassRecorder:
        """The record of the last pass."""
        return self.upkeep.setting.recorder

    @property
    def reducer(self) -> Reducer:
        """The reducer of the parameters that there are now."""
        return self.upkeep.reducer

    @property
    def reduces(self) -> bool:
        """Whether passes are reduced, where no root tells otherwise."""
        return self.synchronise or self.upkeep.setting.options.scatter_every_pass

    def set_synchronise(self, synchronise: bool) -> None:
        """Say whether gradients of the passes that follow are reduced."""
        self.synchronise = synchronise

    # -- steps ---------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """All backwards of the step have been run: ranks that are in another one need not wait."""
        if self.reducer.state is PassState.IDLE:
            self.peers.here.end_step()

    def note_replicas(self, count: int) -> None:
        """Say in how many replicas the last forward ran, where others may run in several.

        Each brings gradients of its own if layers are checkpointed re-entrantly: a pass of one does not show how many
        come.
        """
        self._in_one_replica = count == 1

    def note_forward(self) -> None:
        """A training forward begins. Inside ``no_sync`` its trainable set counts, whatever its backward reaches.

        A local pass opens with the first gradient, which a rank whose loss reaches no parameter does not see; the ranks
        would differ in what was trainable since the last reduction, should it change before the next.
        """
        reducer = self.reducer
        self.peers.here.begin_forward()
        reducer.storage.bind_main_grads(True)
        if not self.reduces and reducer.state is PassState.IDLE:
            self.upkeep.note_trainable()

    def count_tokens(self, tokens: int | Tensor) -> None:
        """Add to what gradients are divided by."""
        self.require_usable()  # a pass that is settled later would take these tokens with it
        self.upkeep.setting.divisor.count_tokens(tokens if self.joining.counts() else 0)

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in place."""
        self.require_usable()
        if self.reducer.state is not PassState.IDLE:
            raise RuntimeError(
                "expected zero_grad_buffer() between passes, found one under way; call finish_grad_sync() first"
            )
        self.upkeep.zero_gradients()

    def register_comm_hook(self, make_hook: Callable[[], CommHook]) -> None:
        """Let a hook reduce the buckets from the next pass on. All ranks must call this at the same point.

        Args:
            make_hook: Gives the hook, or raises; errors as for :meth:`Upkeep.register_comm_hook`.
        """
        self.require_usable()
        self.upkeep.register_comm_hook(make_hook, self.reducer.state is PassState.IDLE)

    # -- opening -------------------------------------------------------------------------------------

    def require_usable(self) -> None:
        """Settle a broken pass.

        Raises:
            PeerFailureError: If the ranks cannot go on together.
            RuntimeError: If the wrapper is closed.
        """
        if self.reducer.state is PassState.BROKEN:
            self.reducer.settle("left backward with an exception")
        self.peers.require_usable()
        if self.reducer.state is PassState.CLOSED:
            raise RuntimeError("expected an open BucketDDP, found one after close(); wrap the module again")

    def _require_idle(self) -> None:
        self.require_usable()
        if self.reducer.by_hand():
            raise RuntimeError(
                "expected no pass under way, found the reduction that start_grad_sync() started; call "
                "finish_grad_sync() first"
            )
        if self.reducer.state is not PassState.IDLE:
            raise RuntimeError("expected one pass at a time, found another one open; backward_pass() cannot be nested")

    def _open(
        self, origin: Origin, synchronised: bool, reachable: set[int] | None = None, role: Role | None = None
    ) -> None:
        """Open a pass.

        Args:
            origin: How it is opened.
            synchronised: Whether its gradients are reduced.
            reachable: Ids of the parameters that will get a gradient, if that is known.
            role: What this rank does in it; what it does at present if None.
        """
        self._require_idle()
        if origin is not Origin.GRADIENT:
            self.upkeep.look_before_gradients()
        it = Pass(
            self.peers.position.pass_number,
            synchronised,
            (),
            origin,
            self.joining.role if role is None else role,
            contributes=role is None and self.joining.contributes(),
            shown=not self._in_one_replica,
        )
        it = self.upkeep.prepare(it)
        if synchronised:
            self.upkeep.setting.checks.read_what_arrived()
        self.reducer.open(it, reachable)

    def _open_by_gradient(self, index: int, param: Tensor) -> tuple[Reducer, int] | None:
        """Open the pass in which a gradient has been accumulated already, as plain PyTorch does.

        Without a root (a backward that did not come by forward's outputs) the backward that runs right now also ends
        the pass, even if it is an inner one.
        """
        name = self.reducer.table.names[index]
        if not self.joining.counts() and not self._guarded:
            raise RuntimeError(not_own_batch(self.reducer.peers.rank, name))
        if not self._end_queued:
            self.upkeep.take_in_changed()
            found = self.upkeep.index_of(param)
            if found is None:
                return None
            index = found
            self._root_synchronises = self.reduces
            self._queue_end()
            self.upkeep.setting.divisor.require_root(name)
        reducer = self.reducer
        slot = reducer.table.slot_of(index)
        if slot is not None:
            reducer.storage.require_untouched(slot)
        try:
            self._open(Origin.GRADIENT, self._root_synchronises)
        except RuntimeError:
            if slot is not None:
                reducer.buckets.pending.add(slot)  # to be dropped with the rest of the pass
            raise
        return self.reducer, index

    def on_root(self, synchronised: bool, _grad: Tensor | None = None) -> None:
        """Called when backward reaches a tensor that ``forward`` returned.

        Queues the end of the pass here, in the outermost backward, where it runs once and last. The pass itself
        is opened by the first gradient, or here with ``find_unused_parameters``.

        Args:
            synchronised: What the forward decided.
        """
        with self.upkeep.setting.lock:
            if self._end_queued or self.reducer.by_hand() or self.upkeep.removed():
                return
            self.require_usable()  # before gradients come that are not of the pass to be settled
            self._root_synchronises = synchronised
            self._queue_end()
            if self.reducer.state is not PassState.IDLE:
                return
            self.upkeep.look_before_gradients()
            if synchronised and self.upkeep.setting.options.find_unused_parameters:
                self._open(Origin.ROOT, synchronised)

    @contextmanager
    def backward_pass(self, loss: Tensor) -> Iterator[None]:
        """A pass around a backward that the caller runs: opened here, and ended in any case.

        Args:
            loss: The tensor that backward will start from, or pass by.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        synchronised, setting = self.reduces, self.upkeep.setting
        self._require_idle()
        root = loss.register_hook(partial(self.on_root, synchronised)) if loss.requires_grad else None
        self._guarded = True
        if synchronised:
            setting.queue.line_up()
        try:
            with self._settling("backward"):
                find_unused = setting.options.find_unused_parameters and synchronised
                self._open(Origin.CONTEXT, synchronised, reachable_leaves(loss) if find_unused else None)
                yield
                self._end_pass()
        finally:
            self._guarded = False
            setting.queue.leave()
            if root is not None:
                root.remove()

    # -- ending --------------------------------------------------------------------------------------

    def _queue_end(self) -> None:
        # Only the engine holds the callback, so that its end of life tells that the engine dropped it.
        BackwardEnd(self._on_engine_end, self._on_engine_dropped).queue()
        self._end_queued = True
        if self._root_synchronises:
            self.upkeep.setting.queue.line_up()

    def _on_engine_end(self) -> None:
        self._end_queued = False
        try:
            self._end_pass()
        except BaseException:
            self._on_engine_dropped()
            raise
        finally:
            self.upkeep.setting.queue.leave()

    def _on_engine_dropped(self) -> None:
        """Backward raised. A guarding ``backward_pass`` settles it; otherwise the next use does."""
        self._end_queued = False
        self.upkeep.setting.queue.leave()
        self.reducer.broke(guarded=self._guarded)

    def _end_pass(self) -> None:
        state = self.reducer.state
        self.reducer.backward_ended()
        self.joining.pass_ended(state)

    @contextmanager
    def _settling(self, doing: str) -> Iterator[None]:
        """End the pass together with the others whatever is raised inside."""
        try:
            yield
        except BaseException as error:
            self.reducer.settle(f"raised {type(error).__name__} in {doing}: {error}")
            raise

    # -- passes without a backward -------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Open a synchronised pass for the gradients that are there, and launch all buckets.

        Raises:
            RuntimeError: If the ranks cannot go on together.
        """
        self._require_idle()
        if self.joining.uneven:
            raise RuntimeError(
                f"rank {self.reducer.peers.rank}: expected a backward outside of no_sync() inside join(), found a "
                "reduction by hand, in which ranks that have run out of data would not take part; reduce in backward"
            )
        with self._settling("a reduction"):
            self._open(Origin.CALL, synchronised=True)
            self.reducer.launch_rest()

    def finish_reduction(self) -> None:
        """Wait for what :meth:`start_reduction` launched, and publish the gradients.

        Raises:
            RuntimeError: If nothing was started, or the ranks cannot go on together.
        """
        if not self.reducer.by_hand():
            raise RuntimeError("expected a reduction under way, found none; call start_grad_sync() first")
        with self._settling("a reduction"):
            self._end_pass()

    def shadow_pass(self) -> None:
        """Take part in a synchronised pass to which this rank, which has run out of data, contributes nothing."""
        self.upkeep.forget_gradients()
        self.joining.forget()
        self._require_idle()
        with self._settling("a reduction"):
            self._open(Origin.CONTEXT, synchronised=True, role=Role.JOINED)
            self._end_pass()
