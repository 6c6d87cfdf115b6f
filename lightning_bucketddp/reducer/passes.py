"""Opens and ends passes: at a root, by the first gradient, in a context, or by a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.grads.engine import BackwardEnd, accumulates
from lightning_bucketddp.reducer.context import WrapperContext
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.reducer import Reducer, not_own_batch
from lightning_bucketddp.reducer.state import Origin, Pass, PassState, Role
from lightning_bucketddp.reducer.wrapped import Wrapped


class Passes:
    """Opens and ends the passes of a module.

    Args:
        context: The parts that stay.
        hook: The communication hook, if there is one; agreed between the ranks.
        others: Further participants.
        in_training: Whether backwards are passes now. In a Trainer they are not in validation: there rank 0 alone may
            run one.

    Attributes:
        wrapped: The module's parameters, and their reducer.
        peers: The other ranks.
        joining: Whether ranks may run out of data, and whether this one has.
        synchronise: False inside ``no_sync``; :meth:`set_synchronise` changes it.
    """

    def __init__(
        self,
        context: WrapperContext,
        hook: CommHook | None,
        others: Sequence[Participant],
        in_training: Callable[[], bool],
    ) -> None:
        self.in_training = in_training
        self._context, self.peers, self.joining = context, context.ranks.peers, context.joining
        self.wrapped = Wrapped(context, hook, others, self.open_by_gradient)
        self.synchronise = True
        # Whether the backward that runs now synchronises, as its root decided; None while no end of one is queued.
        self._backward_synchronises: bool | None = None
        self._passes_before_no_sync = self._passes_before_finish = 0  # numbers of passes at the last calls

    @property
    def reducer(self) -> Reducer:
        """The reducer of the present parameters."""
        return self.wrapped.reducer

    @property
    def reduces(self) -> bool:
        """Whether passes are reduced, unless a root decides otherwise."""
        return self.synchronise or self._context.options.scatter_every_pass

    def set_synchronise(self, synchronise: bool) -> None:
        """Say whether gradients of the passes that follow are reduced."""
        self.synchronise = synchronise
        if not synchronise:
            self._passes_before_no_sync = self.peers.position.pass_number

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
        self.wrapped.note_forward()
        if not self.reduces and reducer.state is PassState.IDLE:
            self.wrapped.note_trainable()

    def count(self, number: int | Tensor, what: Literal["tokens", "samples"]) -> None:
        """Add to the number of tokens, or of samples, by which gradients are divided."""
        self._context.divisor.count(number if self.joining.counts() else 0, what)

    # -- opening -------------------------------------------------------------------------------------

    def _open(self, origin: Origin, synchronised: bool, role: Role | None = None) -> None:
        """Open a pass.

        Args:
            origin: Who opens it.
            synchronised: Whether its gradients are reduced.
            role: What this rank does in it; its present role if None.
        """
        self.wrapped.require_idle()
        if origin is not Origin.BACKWARD:  # else its root did it
            self.wrapped.before_gradients()
        trainable = self.wrapped.agree(synchronised)
        this_pass = Pass(
            self.peers.position.pass_number,
            synchronised,
            trainable,
            origin,
            self.joining.role if role is None else role,
            self.joining.contribution(role),
        )
        if synchronised:
            self._context.control.read_what_arrived()
        self.reducer.open(this_pass)

    def open_by_gradient(self, param: Tensor) -> None:
        """Open the pass in which the first gradient has been accumulated, and record it.

        Without a root (backward reached no output of forward) the running backward also ends the pass, even if it is
        an inner one.
        """
        if not self.in_training():
            return
        with self._context.lock:
            if self.reducer.this_pass is None:
                if not param.requires_grad:
                    return  # frozen since forward: autograd calls the hook, but accumulates nothing
                if self._backward_synchronises is None:
                    self._begin_without_root(param)
                if self._backward_synchronises is not None:
                    self._open_with(param, self._backward_synchronises)
            this_pass, reducer = self.reducer.this_pass, self.reducer
            if this_pass is not None and id(param) in reducer.table.index_of:  # else the module no longer has it
                this_pass.recorded.append(param)
                if len(this_pass.recorded) >= this_pass.notify_after:
                    reducer.gradients_recorded(param)

    def _begin_without_root(self, param: Tensor) -> None:
        """Queue the end of a backward that reached no output of forward, unless the module no longer has ``param``."""
        self.wrapped.take_in_changed()
        table = self.reducer.table
        if (index := table.index_of.get(id(param))) is not None:
            self._queue_end(self.reduces)
            self._context.divisor.require_root(table.names[index])

    def _open_with(self, param: Tensor, synchronised: bool) -> None:
        """Open a pass whose first gradient has been accumulated already."""
        table = self.reducer.table
        index = table.index_of[id(param)]
        if not self.joining.counts():
            raise RuntimeError(not_own_batch(self.peers.rank, table.names[index]))
        if (key := table.key(index)) >= 0:
            self.reducer.storage.require_untouched(key)
        try:
            self._open(Origin.BACKWARD, synchronised)
        except RuntimeError:
            table.pending.add(key)  # dropped with the rest of the pass
            raise

    def on_root(self, synchronised: bool, _grad: Tensor | None = None) -> None:
        """Queue the end of the pass, as backward has reached a tensor that ``forward`` returned.

        Here, in the outermost backward, it runs once and last. The first gradient opens the pass, or this method with
        ``find_unused_parameters``.

        Args:
            synchronised: What the forward decided.
        """
        with self._context.lock:
            begins = self._backward_synchronises is None and self.in_training()
            if not begins or not self.reducer.takes_part_in_backward():
                return
            self.wrapped.require_usable()
            self._queue_end(synchronised)
            if self.reducer.this_pass is None:
                self.wrapped.before_gradients()
                if synchronised and self._context.options.find_unused_parameters and accumulates():
                    self._open(Origin.BACKWARD, synchronised)

    @contextmanager
    def backward_pass(self, loss: Tensor) -> Iterator[None]:
        """Open a pass around a backward that the caller runs, and end it in any case.

        Args:
            loss: The tensor from which backward will start, or which it will reach.

        Raises:
            RuntimeError: If the ranks cannot go on together.
            RankMismatchError: If the ranks disagree on what is trainable.
        """
        synchronised, queue = self.reduces, self._context.queue
        if not self.in_training():
            yield
            return
        self.wrapped.require_idle()
        root = loss.register_hook(partial(self.on_root, synchronised)) if loss.requires_grad else None
        if synchronised:
            queue.line_up()
        try:
            with self._finishing("backward"):
                self._open(Origin.CONTEXT, synchronised)
                try:
                    yield
                except torch.OutOfMemoryError:
                    if not self._skips_after_oom(synchronised):
                        raise
                self._end_pass()
        finally:
            queue.leave()
            if root is not None:
                root.remove()

    def _skips_after_oom(self, synchronised: bool) -> bool:
        """Ask for a skip as backward ran out of memory, if that is wanted and the other ranks can still hear of it."""
        skips, this_pass = self._context.skips, self.reducer.this_pass
        if skips is None or not skips.on_oom:
            return False
        told = this_pass is None or this_pass.exchange is not None
        if synchronised and (told or self.reducer.state is not PassState.SYNCHRONISED):
            return False
        self.ask_to_skip("ran out of memory in backward")
        return True

    def ask_to_skip(self, why: str) -> None:
        """Have all ranks drop the gradients of the next reduction.

        Args:
            why: As the end of a sentence that begins with the rank.

        Raises:
            RuntimeError: If no option lets ranks skip steps.
        """
        if (skips := self._context.skips) is None:
            raise RuntimeError(
                f"rank {self.peers.rank}: expected the option skip_step_on or skip_norm_above where skip_step() is "
                "called, found neither; give one of them"
            )
        if (what := self._context.options.gradient_divide_by) in ("tokens", "samples"):
            self.count(0, what)  # a pass requires a call
        if self.joining.counts():  # else this rank's gradients do not count in any case
            skips.ask(why)

    # -- ending --------------------------------------------------------------------------------------

    def _queue_end(self, synchronised: bool) -> None:
        # Only the engine holds the callback. When the callback is deleted without a call, backward has raised.
        BackwardEnd(self._on_engine_end, self._on_engine_dropped).queue()
        self._backward_synchronises = synchronised
        if synchronised:
            self._context.queue.line_up()

    def _on_engine_end(self) -> None:
        self._backward_synchronises = None
        try:
            self._end_pass()
        except BaseException:
            self._on_engine_dropped()
            raise
        finally:
            self._context.queue.leave()

    def _on_engine_dropped(self) -> None:
        """Backward raised."""
        self._backward_synchronises = None
        self._context.queue.leave()
        self.reducer.backward_raised()

    def _end_pass(self) -> None:
        state = self.reducer.state
        self.reducer.backward_ended()
        self.joining.pass_ended(state)

    @contextmanager
    def _finishing(self, doing: str) -> Iterator[None]:
        """Have the pass fail if anything is raised inside."""
        try:
            yield
        except BaseException as error:
            self.reducer.fail(f"raised {type(error).__name__} in {doing}: {error}")
            raise

    # -- passes without a backward -------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Open a synchronised pass for the gradients that are there, and launch all buckets.

        Raises:
            RuntimeError: If the ranks cannot go on together.
        """
        self.wrapped.require_idle()
        if self.joining.uneven:
            raise RuntimeError(
                f"rank {self.reducer.peers.rank}: expected gradients to be reduced in backward inside join(), found "
                "start_grad_sync(), in which joined ranks take no part; run the last backward outside of no_sync()"
            )
        with self._finishing("a reduction"):
            self._open(Origin.CALL, synchronised=True)
            self.reducer.launch_rest()

    def finish_reduction(self) -> None:
        """Wait for what :meth:`start_reduction` launched, and publish the gradients.

        Start it where nothing was started, unless backward has reduced the gradients since the last call, with no
        ``no_sync`` in between. Ranks do not ask what gradients they have: one may have run no backward.

        Raises:
            RuntimeError: If the ranks cannot go on together.
        """
        by_hand = self.reducer.by_hand()
        if not by_hand and self._backward_has_reduced():
            self.wrapped.require_usable()
        else:
            if not by_hand:
                self.start_reduction()
            with self._finishing("a reduction"):
                self._end_pass()
        self._passes_before_finish = self.peers.position.pass_number

    def _backward_has_reduced(self) -> bool:
        """Whether a pass was synchronised since the last :meth:`finish_reduction`, and since the last ``no_sync``."""
        return self.peers.position.pass_number > max(self._passes_before_finish, self._passes_before_no_sync)

    def shadow_pass(self) -> None:
        """Take part in a synchronised pass as a joined rank, and contribute nothing."""
        self.wrapped.forget_gradients()
        self.joining.forget()
        self.wrapped.require_idle()
        with self._finishing("a reduction"):
            self._open(Origin.CONTEXT, synchronised=True, role=Role.JOINED)
            self._end_pass()
