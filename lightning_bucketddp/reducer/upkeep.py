"""Keeps a reducer in line with the module: its parameters, which of them are trainable, and the layout that is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.grads.storage import first_uncleared
from lightning_bucketddp.peers.agreement import Entry
from lightning_bucketddp.reducer.assembly import Setting, assemble, reduction_of
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.state import Pass


class Upkeep:
    """Owns the reducer, and replaces it when parameters were added, removed, replaced or re-typed.

    Args:
        setting: What stays.
        hook: The communication hook, if there is one.
        open_by_gradient: As for :class:`Reducer`.
    """

    def __init__(
        self,
        setting: Setting,
        hook: CommHook | None,
        open_by_gradient: Callable[[int, Tensor], tuple[Reducer, int] | None],
    ) -> None:
        self.setting = setting
        self._hook = hook
        self._hook_attempts = 0
        self._cleared_before = -1  # the pass before which all gradients were set to zero
        self._open_by_gradient = open_by_gradient
        self._assemble()

    @property
    def reducer(self) -> Reducer:
        """The reducer of the parameters that there are."""
        return self._parts.reducer

    def index_of(self, param: Tensor) -> int | None:
        """The index of a parameter in the module; None if it is not, or no longer, one of its own."""
        return self._parts.index_of.get(id(param))

    def removed(self) -> bool:
        """Whether the hooks on the parameters were removed, for good."""
        return self._parts.hooks.removed

    def trains(self) -> set[int]:
        """The ids of the parameters whose gradients are reduced here."""
        table = self.reducer.table
        return {id(param) for param in [*table.params, *(table.all_params[index] for index in table.sparse)]}

    def close(self) -> None:
        """Remove the hooks and give gradients back as plain tensors. Sends nothing; safe in any state."""
        self._parts.hooks.remove()
        if self.reducer.buckets.under_way():
            peers = self.setting.peers
            self.setting.collectives.leave_behind(peers.message or "it was closed in the middle of a pass")
        self.reducer.close()
        self.setting.queue.leave()

    # -- parameters ----------------------------------------------------------------------------------

    def _assemble(self) -> None:
        setting = self.setting
        self._parts = assemble(setting, self._hook, self._open_by_gradient)
        setting.recorder.new_layout(self.reducer.storage.layout, setting.peers.position.pass_number)

    def note_trainable(self) -> None:
        """Count the parameters that are trainable now as trained in a pass."""
        self._parts.trainable.note(self.reducer.table.trainable_now())

    def take_in_changed(self) -> None:
        """Lay buckets out anew if parameters have changed. Sends nothing.

        Raises:
            WrapError: If a new parameter cannot be wrapped, or an optimizer holds shards or masters of old ones.
        """
        if self.setting.changes.take_in():
            self._assemble_again()

    def _assemble_again(self) -> None:
        """Make the reducer of the present parameters; what accumulated since the last reduction stays."""
        old_parts = self._parts
        old, sparse = old_parts.reducer, old_parts.sparse
        known = self._parts.index_of.keys()
        waiting = {id(old.table.all_params[index]) for index in old.table.waiting | sparse.contributing}
        waiting |= {id(old.table.params[slot]) for slot in old.buckets.pending}
        old.reduction.forget()
        self._parts.hooks.remove()
        old.storage.release()
        self._assemble()
        table = self.reducer.table
        for index, param in enumerate(table.all_params):
            new = id(param) not in known
            if new:
                self.setting.changes.add(param)
            if id(param) in waiting or (new and param.grad is not None):
                self._carry_over(index)
        since = old_parts.trainable.since_reduction
        if since is not None:
            trained = {id(param) for param, flag in zip(old.table.all_params, since, strict=True) if flag}
            self._parts.trainable.note(tuple([id(param) in trained for param in table.all_params]))

    def _carry_over(self, index: int) -> None:
        """Let a gradient that is there take part in the next reduction."""
        slot = self.reducer.table.slot_of(index)
        if slot is not None:
            self.reducer.buckets.pending.add(slot)
        else:
            self.reducer.table.ready_apart(index)
            self._parts.sparse.ready_apart(index)

    # -- before a pass -------------------------------------------------------------------------------

    def look_before_gradients(self) -> None:
        """Take in changed parameters, and see what is in ``.grad`` before a backward adds to it."""
        self.take_in_changed()
        reducer, divisor = self.reducer, self.setting.divisor
        if divisor.rescales:
            if self.setting.options.scatter_every_pass:
                reducer.storage.open()  # what earlier passes have left is set apart, and not divided again
            sparse, table, pending = self._parts.sparse, reducer.table, reducer.buckets.pending
            uncleared = None
            if self._cleared_before != self.setting.peers.position.pass_number:  # else the device need not be asked
                uncleared = first_uncleared(reducer.storage, table, reducer.buckets) or sparse.first_uncleared()
            holds = any(table.params[slot].grad is not None for slot in pending) or bool(table.waiting)
            divisor.look(uncleared, holds or sparse.holds_gradients())
        reducer.storage.open()

    def prepare(self, it: Pass) -> Pass:
        """Have the ranks agree on what a pass concerns, and lay buckets out anew if that is due.

        Args:
            it: The pass, with the parameters that are trainable at its root.

        Returns:
            The pass, with those that were trainable since the last reduction.

        Raises:
            RankMismatchError: If the ranks disagree.
            PeerFailureError: If they cannot go on together.
        """
        changes = self.setting.changes
        if it.synchronised and changes.due():
            changes.agree()
            if self._parts.trainable.agreed != self.reducer.table.trainable_now():
                self._assemble_again()  # was laid out in a local pass, for other ones
        planner, trainable = self._parts.planner, self._parts.trainable
        since = trainable.note(self.reducer.table.trainable_now())
        if it.synchronised and trainable.agree(since):
            if not planner.knows(since):
                planner.add(since)
            self._parts.learner.look_at(since)
        # Shards move with collectives, and a rank whose loss reaches no parameter opens no local pass.
        if planner.due and (it.synchronised or not self.setting.options.shard_optimizer):
            self._lay_out()
        return replace(it, trainable=since)

    def _lay_out(self) -> None:
        reducer, planner = self.reducer, self._parts.planner
        before = reducer.storage.layout
        reducer.storage.open()
        if not reducer.storage.lay_out(planner.plan()):
            return
        planner.due = False
        if reducer.storage.layout != before:
            reducer.reduction.forget()
            self.setting.recorder.new_layout(reducer.storage.layout, self.setting.peers.position.pass_number)

    def forget_gradients(self) -> None:
        """Drop all gradients: this rank contributes nothing to the next reduction."""
        reducer = self.reducer
        for param in reducer.table.all_params:
            param.grad = None
        reducer.buckets.pending.clear()
        reducer.table.waiting.clear()
        self._parts.sparse.contributing.clear()
        self.setting.divisor.ended()

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in place; sparse ones, and those without a slot, to None."""
        reducer = self.reducer
        for index in reducer.table.waiting:
            reducer.table.all_params[index].grad = None
        reducer.table.waiting.clear()
        reducer.storage.zero()
        reducer.buckets.pending.clear()
        self._parts.sparse.zero()
        self._cleared_before = self.setting.peers.position.pass_number

    # -- communication hooks -------------------------------------------------------------------------

    def register_comm_hook(self, make_hook: Callable[[], CommHook], between_passes: bool) -> None:
        """Let a hook reduce the buckets from the next pass on, if all ranks register the same one.

        Args:
            make_hook: Gives the hook, or raises.
            between_passes: Whether no pass is under way.

        Raises:
            RuntimeError: If there is a hook already, or a pass is under way.
            ValueError: If gradients travel in a wire dtype.
            RankMismatchError: If ranks register different hooks, or if this is not called on all of them.
        """
        peers = self.setting.peers
        times = f", attempt {self._hook_attempts + 1}" if self._hook_attempts else ""
        topic = f"the communication hook from pass {peers.position.pass_number} on{times}"
        self._hook_attempts += 1
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
            if not between_passes:
                raise RuntimeError("expected register_comm_hook to be called between passes, found one under way")
            entries = [Entry(f"option {name}", repr(value)) for name, value in hook.options().items()]
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error  # the others must hear of it before it is raised
        peers.require_same(topic, entries, problem)
        self._hook = hook
        reducer = self.reducer
        reducer.reduce_by(reduction_of(self.setting, reducer.table, reducer.buckets, reducer.storage, hook))
