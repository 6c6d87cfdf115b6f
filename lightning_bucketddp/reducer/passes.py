"""Opens and ends passes: at a root, by the first gradient, in a context, or by a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.grads.engine import BackwardEnd, accumulates, reachable_leaves
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.assembly import Setting
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
        options: The user's options.
        hook: The communication hook, if there is one; agreed between the ranks.
        one_machine: Whether the ranks share one machine; agreed between them.
        others: Further participants.

    Attributes:
        peers: The other ranks.
        setting: The parts that stay when parameters change.
        upkeep: Owns the reducer, and keeps it in line with the module.
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
        self.peers = peers
        self.setting = Setting(params, collectives, peers, options, one_machine, others)
        self.upkeep = Upkeep(self.setting, hook, self._open_by_gradient)
        self.synchronise = True
        self.joining = self.setting.joining
        self._root_synchronises = True
        self._left_to_finish = 0  # the number of passes when gradients were last left to finish_reduction(), or by it
        self._end_queued = False
        self._guarded = False  # inside backward_pass(), whose caller sees an exception itself

    @property
    def recorder(self) -> PassRecorder:
        """Records passes."""
        return self.setting.recorder

    @property
    def reducer(self) -> Reducer:
        """The reducer of the present parameters."""
        return self.upkeep.reducer

    @property
    def reduces(self) -> bool:
        """Whether passes are reduced, unless a root decides otherwise."""
        return self.synchronise or self.setting.options.scatter_every_pass

    def set_synchronise(self, synchronise: bool) -> None:
        """Say whether gradients of the passes that follow are reduced."""
        self.synchronise = synchronise
        if not synchronise:
            self._left_to_finish = self.peers.position.pass_number

    # -- steps ---------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Say that all backwards of the step have been run, so that no rank waits for another one."""
        if self.reducer.state is PassState.IDLE:
            self.peers.here.end_step()

    def note_forward(self) -> None:
        """Say that a training forward begins. Inside ``no_sync``, count its trainable set.

        The first gradient opens a local pass, and a rank whose loss reaches no parameter has none. Ranks must not
        differ in their trainable sets for that.
        """
        reducer = self.reducer
        self.peers.here.begin_forward()
        reducer.storage.bind_main_grads(True)
        if not self.reduces and reducer.state is PassState.IDLE:
            self.upkeep.note_trainable()
        if self.synchronise and reducer.state is PassState.IDLE and not self.joining.uneven:
            self.upkeep.move_shards()

    def count_tokens(self, tokens: int | Tensor) -> None:
        """Add to the number of tokens by which gradients are divided."""
        self.require_usable()  # settling a broken pass later would drop these tokens
        self.setting.divisor.count_tokens(tokens if self.joining.counts() else 0)

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
        self.upkeep.register_comm_hook(make_hook)

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
        self.reducer.require_not_by_hand()
        if self.reducer.state is not PassState.IDLE:
            raise RuntimeError("expected one pass at a time, found another one open; backward_pass() cannot be nested")

    def _open(
        self, origin: Origin, synchronised: bool, reachable: set[int] | None = None, role: Role | None = None
    ) -> None:
        """Open a pass.

        Args:
            origin: Who opens it.
            synchronised: Whether its gradients are reduced.
            reachable: Ids of the parameters that will get a gradient, if that is known.
            role: What this rank does in it; its present role if None.
        """
        self._require_idle()
        if origin is not Origin.GRADIENT:
            self.upkeep.look_before_gradients()
        contributes = role is None and self.joining.contributes()
        it = Pass(
            self.peers.position.pass_number,
            synchronised,
            (),
            origin,
            self.joining.role if role is None else role,
            contributes,
            sends_zeros=self.joining.divides_by_active and not contributes,
        )
        it = self.upkeep.prepare(it)
        if synchronised:
            self.setting.checks.read_what_arrived()
        self.reducer.open(it, reachable)

    def _open_by_gradient(self, param: Tensor) -> Reducer | None:
        """Open the pass in which a gradient has been accumulated already.

        Without a root (backward reached no output of forward) the running backward also ends the pass, even if it is
        an inner one.
        """
        table = self.reducer.table
        name = table.names[table.index_of[id(param)]]
        if not self.joining.counts() and not self._guarded:
            raise RuntimeError(not_own_batch(self.reducer.peers.rank, name))
        if not self._end_queued:
            self.upkeep.take_in_changed()
            if id(param) not in self.reducer.table.index_of:
                return None
            self._root_synchronises = self.reduces
            self._queue_end()
            self.setting.divisor.require_root(name)
        reducer = self.reducer
        slot = reducer.table.slot_of(reducer.table.index_of[id(param)])
        if slot is not None:
            reducer.storage.require_untouched(slot)
        try:
            self._open(Origin.GRADIENT, self._root_synchronises)
        except RuntimeError:
            if slot is not None:
                reducer.buckets.pending.add(slot)  # dropped with the rest of the pass
            raise
        return self.reducer

    def on_root(self, synchronised: bool, _grad: Tensor | None = None) -> None:
        """Queue the end of the pass, as backward has reached a tensor that ``forward`` returned.

        Here, in the outermost backward, it runs once and last. The first gradient opens the pass, or this method with
        ``find_unused_parameters``.

        Args:
            synchronised: What the forward decided.
        """
        with self.setting.lock:
            if self._end_queued or self.reducer.by_hand() or self.upkeep.removed():
                return
            self.require_usable()  # settles a broken pass before gradients of this one come
            self._root_synchronises = synchronised
            self._queue_end()
            if self.reducer.state is not PassState.IDLE:
                return
            self.upkeep.look_before_gradients()
            if synchronised and self.setting.options.find_unused_parameters and accumulates():
                self._open(Origin.ROOT, synchronised)

    @contextmanager
    def backward_pass(self, loss: Tensor) -> Iterator[None]:
        """Open a pass around a backward that the caller runs, and end it in any case.

        Args:
            loss: The tensor from which backward will start, or which it will reach.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        synchronised, queue = self.reduces, self.setting.queue
        self._require_idle()
        root = loss.register_hook(partial(self.on_root, synchronised)) if loss.requires_grad else None
        self._guarded = True
        if synchronised:
            queue.line_up()
        try:
            with self._settling("backward"):
                find_unused = self.setting.options.find_unused_parameters and synchronised
                self._open(Origin.CONTEXT, synchronised, reachable_leaves(loss) if find_unused else None)
                yield
                self._end_pass()
        finally:
            self._guarded = False
            queue.leave()
            if root is not None:
                root.remove()

    # -- ending --------------------------------------------------------------------------------------

    def _queue_end(self) -> None:
        # Only the engine holds the callback. When the callback is deleted without a call, backward has raised.
        BackwardEnd(self._on_engine_end, self._on_engine_dropped).queue()
        self._end_queued = True
        if self._root_synchronises:
            self.setting.queue.line_up()

    def _on_engine_end(self) -> None:
        self._end_queued = False
        try:
            self._end_pass()
        except BaseException:
            self._on_engine_dropped()
            raise
        finally:
            self.setting.queue.leave()

    def _on_engine_dropped(self) -> None:
        """Drop the pass, as backward raised. ``backward_pass`` settles it, or else the next use."""
        self._end_queued = False
        self.setting.queue.leave()
        self.reducer.broke(guarded=self._guarded)

    def _end_pass(self) -> None:
        state = self.reducer.state
        self.reducer.backward_ended()
        self.joining.pass_ended(state)

    @contextmanager
    def _settling(self, doing: str) -> Iterator[None]:
        """End the pass together with the other ranks if anything is raised inside."""
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
                f"rank {self.reducer.peers.rank}: expected gradients to be reduced in backward inside join(), found "
                "start_grad_sync(), in which joined ranks take no part; run the last backward outside of no_sync()"
            )
        with self._settling("a reduction"):
            self._open(Origin.CALL, synchronised=True)
            self.reducer.launch_rest()

    def finish_reduction(self) -> None:
        """Wait for what :meth:`start_reduction` launched, and publish the gradients.

        Start it where nothing was started, unless backward has reduced the gradients since the last call, with no
        ``no_sync`` in between. Ranks do not ask what gradients they have: one may have run no backward.

        Raises:
            RuntimeError: If the ranks cannot go on together.
        """
        if not self.reducer.by_hand():
            if self.peers.position.pass_number > self._left_to_finish:
                self._left_to_finish = self.peers.position.pass_number
                self.require_usable()
                return
            self.start_reduction()
        with self._settling("a reduction"):
            self._end_pass()
        self._left_to_finish = self.peers.position.pass_number

    def shadow_pass(self) -> None:
        """Take part in a synchronised pass as a joined rank, and contribute nothing."""
        self.upkeep.forget_gradients()
        self.joining.forget()
        self._require_idle()
        with self._settling("a reduction"):
            self._open(Origin.CONTEXT, synchronised=True, role=Role.JOINED)
            self._end_pass()
