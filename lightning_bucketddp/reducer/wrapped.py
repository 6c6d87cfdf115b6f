"""A module whose gradients are averaged: what stays from pass to pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.slots import TrainableSet
from lightning_bucketddp.peers.agreement import Entry
from lightning_bucketddp.reducer.build import build_reducer
from lightning_bucketddp.reducer.context import WrapperContext
from lightning_bucketddp.reducer.gradient_hooks import GradientHooks
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.ready_order import Lesson
from lightning_bucketddp.reducer.state import PassState


class Wrapped:
    """Keeps the parameters, the trainable set and the layout, and makes the reducer anew when parameters change.

    Args:
        context: The parts that stay.
        hook: The communication hook, if there is one; agreed between the ranks.
        others: Further participants.
        open_pass: Called with the first parameter that gets a gradient while no pass is open.

    Attributes:
        context: The parts that stay.
        reducer: The reducer of the present parameters.
    """

    def __init__(
        self,
        context: WrapperContext,
        hook: CommHook | None,
        others: Sequence[Participant],
        open_pass: Callable[[Tensor], None],
    ) -> None:
        self.context, self._hook, self._open_pass = context, hook, open_pass
        self._participants = [*context.participants(), *others]
        self._cleared_before = -1  # the pass before which all gradients were set to zero
        self._build()

    def _build(self) -> None:
        self.reducer = build_reducer(self.context, self._hook, self._participants)
        self._gradient_hooks = GradientHooks(self.reducer, self._open_pass, self.context.streams)

    def trains(self) -> set[int]:
        """The ids of the parameters whose gradients are reduced here."""
        table = self.reducer.table
        return {id(param) for param in [*table.params, *(table.all_params[index] for index in table.sparse)]}

    def add(self, participant: Participant) -> None:
        """Let one more feature take part in passes, from the next one on. It must send nothing."""
        self._participants.append(participant)
        self.reducer.add_participant(participant)

    def close(self) -> None:
        """Remove the hooks, and make gradients plain tensors again. Sends nothing; safe in any state."""
        self._gradient_hooks.remove()
        self.reducer.close()
        self.context.queue.leave()

    def require_usable(self) -> None:
        """Require that passes can be opened.

        Raises:
            PeerFailureError, RankMismatchError: If the ranks cannot go on together.
            RuntimeError: If the wrapper is closed.
        """
        self.context.ranks.peers.require_usable()
        if self.reducer.state is PassState.CLOSED:
            raise RuntimeError("expected an open BucketDDP, found one after close(); wrap the module again")

    def require_idle(self) -> None:
        """Refuse what has its place between passes. Errors also as for :meth:`require_usable`."""
        self.require_usable()
        self.reducer.require_not_by_hand()
        if self.reducer.state is not PassState.IDLE:
            raise RuntimeError("expected one pass at a time, found another one open; backward_pass() cannot be nested")

    # -- parameters ----------------------------------------------------------------------------------

    def note_forward(self) -> None:
        """Add the hooks of unfrozen parameters: the first gradient may be of one of them."""
        self.reducer.storage.bind_main_grads(True)
        self._gradient_hooks.add_unfrozen()

    def note_trainable(self) -> None:
        """Count the present trainable set as that of a pass."""
        self.context.trainable.note(self.reducer.table.trainable_now())

    def take_in_changed(self) -> None:
        """Add the hooks of unfrozen parameters, and lay buckets out anew if parameters have changed. Sends nothing.

        Shards stay where they are, and parameters that came later are not trained.

        Raises:
            WrapError: If a new parameter cannot be wrapped, or an optimizer holds shards or masters of old ones.
        """
        self._gradient_hooks.add_unfrozen()
        if not self.context.changes.take_in(self.trains):
            return
        storage = self.reducer.storage
        if isinstance(storage, Sharded):
            self.reducer.table.rename(self.context.params.named)
            storage.rename()
        else:
            self._rebuild()

    def _rebuild(self) -> None:
        """Make the reducer of the present parameters. Gradients since the last reduction stay."""
        old, since = self.reducer, self.context.trainable.since_reduction
        accumulated = old.table.pending_indices()
        old.reduction.forget()
        old.storage.release()
        self._gradient_hooks.remove()
        self._build()
        table = self.reducer.table
        for index, param in enumerate(table.all_params):
            before = old.table.index_of.get(id(param))
            if before in accumulated or (before is None and param.grad is not None):  # takes part in the next reduction
                table.pending.add(table.key(index))
        if since is not None:
            trained = {id(param) for param, flag in zip(old.table.all_params, since, strict=True) if flag}
            self.context.trainable.note(tuple([id(param) in trained for param in table.all_params]))

    # -- before a pass -------------------------------------------------------------------------------

    def before_gradients(self) -> None:
        """Take in changed parameters, and see what is in ``.grad`` before a backward adds to it."""
        self.take_in_changed()
        storage, divisor = self.reducer.storage, self.context.divisor
        if divisor.rescales:
            if self.context.options.scatter_every_pass:
                storage.open()  # stashes the gradients of earlier passes, so that they are not divided again
            table = self.reducer.table
            accumulated = table.pending_indices()
            # A parameter that was frozen since may have a gradient that waits for its reduction.
            holding = [index for index, param in enumerate(table.all_params) if param.grad is not None]
            trained = [index for index in holding if table.all_params[index].requires_grad]
            zeroed = self._cleared_before == self.context.ranks.peers.position.pass_number
            uncleared = [] if zeroed else [index for index in trained if index not in accumulated]
            name = table.names[uncleared[0]] if uncleared else None
            divisor.note_uncleared_grads(name, cleared=bool(accumulated) and accumulated.isdisjoint(holding))
        storage.open()

    def agree(self, synchronised: bool) -> TrainableSet:
        """Have the ranks agree on parameters and trainable set, and rebuild buckets if that is due.

        Args:
            synchronised: Whether the pass that is to open is synchronised. A local one asks nobody.

        Returns:
            The set that was trainable since the last reduction.

        Raises:
            RankMismatchError: If the ranks disagree.
            PeerFailureError: If they cannot go on together.
        """
        changes = self.context.changes
        if synchronised and changes.due():
            changes.agree()
            keeps_place = self.context.groups is not None
            if not keeps_place and self.context.trainable.agreed != self.reducer.table.trainable_now():
                self._rebuild()  # a local pass laid it out for another set
        planner, trainable = self.reducer.planner, self.context.trainable
        since = trainable.note(self.reducer.table.trainable_now())
        if synchronised and trainable.agree(since):
            if not planner.knows(since):
                planner.add(since)
            self.context.learner.look_at(since)
        if planner.due:
            self.reducer.storage.open()
            self._lay_out()
        return since

    def keep_whole(self, params: Iterable[Tensor]) -> None:
        """Have shards cut between these parameters, and never inside of one.

        All ranks must call this alike, between passes.

        Raises:
            RuntimeError: If shards lie in these parameters already, and stay.
        """
        self.require_idle()
        index_of = self.reducer.table.index_of
        self.reducer.planner.keep_whole({index_of[id(param)] for param in params if id(param) in index_of})
        if self.reducer.planner.due:
            self._lay_out()

    def resume_order(self, lessons: list[Lesson]) -> None:
        """Lay buckets out in the order that an earlier run has learned. All ranks must call this alike."""
        self.context.learner.resume(lessons)
        if self.reducer.planner.due:
            self._lay_out()

    def memory(self) -> dict[str, Any]:
        """What later passes go by, of types that ``torch.load(weights_only=True)`` loads: on rank 0 that of all ranks.

        All ranks must call this.
        """
        ranks, skips, hook = self.context.ranks, self.context.skips, {} if self._hook is None else self._hook.memory()
        mine, errors = hook.pop("errors", {}), []
        for rank in range(ranks.world_size if mine else 0):  # one after the other: they are as large as gradients
            found = {index: error.clone() for index, error in mine.items()}
            ranks.broadcast([*found.values()], "the errors of PowerSGD", source=rank)
            errors.append({index: error.cpu() for index, error in found.items()} if ranks.rank == 0 else {})
        norms = None if skips is None else skips.history()
        return {"lessons": self.context.learner.lessons, "norms": norms, "hook": hook, "errors": errors}

    def recall(self, memory: dict[str, Any]) -> None:
        """Go by what an earlier run remembered. All ranks must call this alike, before optimizer state is loaded."""
        self.resume_order(memory["lessons"])
        ranks, errors = self.context.ranks, memory["errors"]
        if self.context.skips is not None and memory["norms"] is not None:
            self.context.skips.recall(memory["norms"])
        if self._hook is not None and len(errors) == ranks.world_size:
            self._hook.recall({**memory["hook"], "errors": errors[ranks.rank]}, self.context.device)

    def _lay_out(self) -> None:
        self.reducer.lay_out(self.reducer.planner.plan())
        self.reducer.planner.due = False

    # -- gradients -----------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop all gradients. This rank contributes nothing to the next reduction."""
        table = self.reducer.table
        for param in table.all_params:
            param.grad = None
        table.pending.clear()
        self.context.divisor.ended()

    def zero_gradients(self) -> None:
        """Set all gradients to zero in place; gradients that are sparse or have no slot, to None."""
        self.require_usable()
        if self.reducer.state is not PassState.IDLE:
            raise RuntimeError(
                "expected zero_grad_buffer() between passes, found one under way; call finish_grad_sync() first"
            )
        table = self.reducer.table
        for key in table.pending:
            if key < 0:
                table.all_params[~key].grad = None
        self.reducer.storage.zero()
        self.context.sparse.zero()
        table.pending.clear()
        self.context.divisor.note_uncleared_grads(None, cleared=True)
        self._cleared_before = self.context.ranks.peers.position.pass_number

    # -- communication hooks -------------------------------------------------------------------------

    def register_comm_hook(self, make_hook: Callable[[], CommHook]) -> None:
        """Let a hook reduce the buckets from the next pass on, if all ranks register the same one.

        Args:
            make_hook: Gives the hook, or raises.

        Raises:
            RuntimeError: If there is a hook already, or a pass is under way.
            ValueError: If gradients travel in a wire dtype.
            RankMismatchError: If ranks register different hooks, or if this is not called on all of them.
        """
        self.require_usable()
        peers = self.context.ranks.peers
        problem: Exception | None = None
        entries: list[Entry] = []
        try:
            hook = make_hook()
            self.context.options.require_hook_decides()
            if self._hook is not None:
                raise RuntimeError(
                    "register_comm_hook or register_builtin_comm_hook can only be called once. Expected no "  # torch's
                    f"communication hook, found {self._hook.name!r}"
                )
            if self.context.groups is not None:
                raise RuntimeError(
                    "expected register_comm_hook without shard_optimizer, found shard_optimizer=True: shards lie as "
                    "the buckets do and would be left behind. Give the hook when the module is wrapped: comm_hook=..."
                )
            if self.reducer.state is not PassState.IDLE:
                raise RuntimeError("expected register_comm_hook to be called between passes, found one under way")
            entries = [Entry(f"option {name}", repr(value)) for name, value in hook.options().items()]
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error  # the others must hear of it before it is raised
        peers.require_same(f"the communication hook from pass {peers.position.pass_number} on", entries, problem)
        self._hook = hook
        lessons, specs = self.context.learner.lessons, self.reducer.table.specs
        self._rebuild()
        if self.reducer.table.specs == specs:  # the order that was learned stays
            self.resume_order(lessons)
