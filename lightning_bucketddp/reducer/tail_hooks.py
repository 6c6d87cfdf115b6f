"""Which parameters tell of their gradients as they come: all, or only those that come last in their buckets."""

from __future__ import annotations

from lightning_bucketddp.grads.bucket_runs import BucketRuns
from lightning_bucketddp.grads.hooks import GradientHooks
from lightning_bucketddp.grads.slots import SlotTable

MAX_EARLY_TAILS = 16
"""How often other gradients of a bucket may come after the one that should have been the last, until it is looked which
comes last now."""

MAX_RETURNS_TO_ALL_HOOKS = 4
"""How often the waiting for buckets' last gradients alone may have to end, until it is given up."""


class TailHooks:
    """Has only the parameters whose gradients come last in their buckets tell of them, where it is known which do.

    A matter of this rank's alone: it changes when a bucket is launched, and nothing else. The others' gradients are
    kept in a list, which costs a fraction of what telling does.

    Args:
        hooks: The parameters' hooks.
        runs: The buckets.
        slots: The parameters and their slots.
        wanted: Whether buckets can be launched by their last gradients at all.
    """

    def __init__(self, hooks: GradientHooks, runs: BucketRuns, slots: SlotTable, wanted: bool) -> None:
        self._hooks = hooks
        self._runs = runs
        self._slots = slots
        self._wanted = wanted
        self._returns = 0

    def note_every_gradient(self) -> None:
        """From now on each parameter tells of its gradient."""
        if not self._hooks.everywhere:
            self._returns += 1
            self._runs.note_every_gradient()
            self._hooks.hook_all()

    def look_only_at_tails(self) -> None:
        """From now on only those whose gradients came last in the pass that has ended do, if that will do."""
        if not self._wanted:
            return
        if self._returns > MAX_RETURNS_TO_ALL_HOOKS:
            self._wanted = False
        elif self._runs.early_tails > MAX_EARLY_TAILS:
            self.note_every_gradient()  # to see in the next pass which come last now
        elif len(self._runs.streams_seen) <= 1:
            noted = self._runs.wait_for_tails()
            if noted is not None:
                self._hooks.hook_only(self._slots.indices_without_slot() | {self._slots.index_of(s) for s in noted})
