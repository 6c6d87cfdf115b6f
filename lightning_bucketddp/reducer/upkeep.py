"""Keeps the reducer in line with the module: its parameters, its trainable set, the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.peers.agreement import Entry
from lightning_bucketddp.reducer.assembly import Assembly, Setting, reduction_of
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.state import Pass, PassState


class Upkeep:
    """Owns the reducer. Replaces it when parameters were added, removed, replaced or re-typed.

    Args:
        setting: The parts that stay.
        hook: The communication hook, if there is one.
        open_by_gradient: As for :class:`Reducer`.

    Attributes:
        reducer: The reducer of the present parameters.
        parts: The reducer and what belongs to it.
    """

    reducer: Reducer

    def __init__(
        self,
        setting: Setting,
        hook: CommHook | None,
        open_by_gradient: Callable[[Tensor], Reducer | None],
    ) -> None:
        self.setting = setting
        self._hook = hook
        self._cleared_before = -1  # the pass before which all gradients were set to zero
        self._open_by_gradient = open_by_gradient
        self._assemble()

    def removed(self) -> bool:
        """Whether the hooks on the parameters were removed, for good."""
        return self.parts.hooks.removed

    def trains(self) -> set[int]:
        """The ids of the parameters whose gradients are reduced here."""
        table = self.reducer.table
        return {id(param) for param in [*table.params, *(table.all_params[index] for index in table.sparse)]}

    def add(self, participant: Participant) -> None:
        """Let one more feature take part in passes, from the next one on. It must send nothing."""
        self.setting.others = [*self.setting.others, participant]
        self.reducer.participants = [*self.reducer.participants, participant]

    def close(self) -> None:
        """Remove the hooks and make gradients plain tensors again. Sends nothing; safe in any state."""
        self.parts.hooks.remove()
        if self.reducer.buckets.under_way():
            peers = self.setting.peers
            self.setting.collectives.leave_behind(peers.message or "it was closed in the middle of a pass")
        self.reducer.close()
        self.setting.queue.leave()

    # -- parameters ----------------------------------------------------------------------------------

    def _assemble(self) -> None:
        setting = self.setting
        self.parts = Assembly(setting, self._hook, self._open_by_gradient)
        self.reducer = self.parts.reducer
        setting.recorder.new_layout(self.reducer.storage.layout, setting.peers.position.pass_number)

    def note_trainable(self) -> None:
        """Count the present trainable set as that of a pass."""
        self.parts.trainable.note(self.reducer.table.trainable_now())

    def take_in_changed(self) -> None:
        """Lay buckets out anew if parameters have changed. Sends nothing.

        Shards stay where they are, and parameters that came later are not trained.

        Raises:
            WrapError: If a new parameter cannot be wrapped, or an optimizer holds shards or masters of old ones.
        """
        if not self.setting.changes.take_in(self.trains):
            return
        if isinstance(self.reducer.storage, Sharded):
            self.reducer.table.rename(self.setting.changes.params.named)
            self.reducer.storage.rename()
        else:
            self._assemble_again()

    def _assemble_again(self) -> None:
        """Make the reducer of the present parameters. Gradients since the last reduction stay."""
        parts, accumulated = self.parts, self._accumulated()
        old, since = parts.reducer, parts.trainable.since_reduction
        old.reduction.forget()
        parts.hooks.remove()
        old.storage.release()
        self._assemble()
        table = self.reducer.table
        for index, param in enumerate(table.all_params):
            before = old.table.index_of.get(id(param))
            if before in accumulated or (before is None and param.grad is not None):  # takes part in the next reduction
                slot = table.slot_of(index)
                if slot is not None:
                    self.reducer.buckets.pending.add(slot)
                else:
                    table.ready_apart(index)
                    self.parts.sparse.ready_apart(index)
        if since is not None:
            trained = {id(param) for param, flag in zip(old.table.all_params, since, strict=True) if flag}
            self.parts.trainable.note(tuple([id(param) in trained for param in table.all_params]))

    def _accumulated(self) -> set[int]:
        """The indices of the parameters with a gradient since their last reduction."""
        table, pending = self.reducer.table, self.reducer.buckets.pending
        slots = {index for index, slot in table.slot_of_index.items() if slot in pending}
        return slots | table.waiting | self.parts.sparse.contributing

    # -- before a pass -------------------------------------------------------------------------------

    def look_before_gradients(self) -> None:
        """Take in changed parameters, and see what is in ``.grad`` before a backward adds to it."""
        self.take_in_changed()
        storage = self.reducer.storage
        if self.setting.divisor.rescales:
            if self.setting.options.scatter_every_pass:
                storage.open()  # sets the gradients of earlier passes apart, so that they are not divided again
            table, accumulated = self.reducer.table, self._accumulated()
            holding = [index for index, it in enumerate(table.all_params) if it.requires_grad and it.grad is not None]
            zeroed = self._cleared_before == self.setting.peers.position.pass_number
            uncleared = [] if zeroed else [index for index in holding if index not in accumulated]
            name = table.names[uncleared[0]] if uncleared else None
            self.setting.divisor.look(name, cleared=bool(accumulated) and accumulated.isdisjoint(holding))
        storage.open()

    def prepare(self, it: Pass) -> Pass:
        """Have the ranks agree on parameters and trainable set, and rebuild buckets if that is due.

        Returns:
            The pass, with the set that was trainable since the last reduction.

        Raises:
            RankMismatchError: If the ranks disagree.
            PeerFailureError: If they cannot go on together.
        """
        changes = self.setting.changes
        if it.synchronised and changes.due():
            changes.agree()
            keeps_place = isinstance(self.reducer.storage, Sharded)
            if not keeps_place and self.parts.trainable.agreed != self.reducer.table.trainable_now():
                self._assemble_again()  # a local pass laid it out for another set
        planner, trainable = self.parts.planner, self.parts.trainable
        since = trainable.note(self.reducer.table.trainable_now())
        if it.synchronised and trainable.agree(since):
            if not planner.knows(since):
                planner.add(since)
            self.parts.learner.look_at(since)
        # Shards move with collectives, and a rank whose loss reaches no parameter opens no local pass.
        if planner.due and (it.synchronised or not self.setting.options.shard_optimizer):
            self.reducer.storage.open()
            self._lay_out()
        return replace(it, trainable=since)

    def move_shards(self) -> None:
        """Rebuild buckets of sharded parameters, if that is due, before a graph holds the parameters' old memory.

        Not in a forward with other parameters: they may be those of `torch.func.functional_call`.
        """
        due = self.setting.options.shard_optimizer and self.parts.planner.due
        if due and not self.setting.changes.params.changed():
            self._lay_out()

    def _lay_out(self) -> None:
        reducer, planner = self.reducer, self.parts.planner
        before = reducer.storage.layout
        reducer.storage.lay_out(planner.plan())
        planner.due = False
        if reducer.storage.layout != before:
            reducer.reduction.forget()
            self.setting.recorder.new_layout(reducer.storage.layout, self.setting.peers.position.pass_number)

    def forget_gradients(self) -> None:
        """Drop all gradients. This rank contributes nothing to the next reduction."""
        reducer = self.reducer
        for param in reducer.table.all_params:
            param.grad = None
        reducer.buckets.pending.clear()
        reducer.table.waiting.clear()
        self.parts.sparse.contributing.clear()
        self.setting.divisor.ended()

    def zero_gradients(self) -> None:
        """Set all gradients to zero in place; gradients that are sparse or have no slot, to None."""
        reducer = self.reducer
        for index in reducer.table.waiting:
            reducer.table.all_params[index].grad = None
        reducer.table.waiting.clear()
        reducer.storage.zero()
        reducer.buckets.pending.clear()
        self.parts.sparse.zero()
        self.setting.divisor.look(None, cleared=True)
        self._cleared_before = self.setting.peers.position.pass_number

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
        peers, reducer = self.setting.peers, self.reducer
        problem: Exception | None = None
        entries: list[Entry] = []
        try:
            hook = make_hook()
            self.setting.options.require_hook_decides()
            if self._hook is not None:
                raise RuntimeError(
                    "register_comm_hook can only be called once: expected no communication hook, found "
                    f"{self._hook.name!r}"
                )
            if reducer.state is not PassState.IDLE:
                raise RuntimeError("expected register_comm_hook to be called between passes, found one under way")
            entries = [Entry(f"option {name}", repr(value)) for name, value in hook.options().items()]
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error  # the others must hear of it before it is raised
        peers.require_same(f"the communication hook from pass {peers.position.pass_number} on", entries, problem)
        self._hook = hook
        reducer.reduction = reduction_of(self.setting, reducer.table, reducer.buckets, reducer.storage, hook)
