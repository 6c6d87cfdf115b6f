"""Buckets that are reduce-scattered: after a pass each rank holds its shard of the reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.comm.shard_groups import PendingInTwoGroups, ShardGroups
from lightning_bucketddp.grads.bucket_runs import BucketRun, BucketRuns
from lightning_bucketddp.grads.sharded_grad import ShardedGrad
from lightning_bucketddp.grads.slots import TrainableSet
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.layout.shards import parts_of


class LayoutObserver(Protocol):
    """Hears of new layouts, and carries what has to move between ranks then."""

    def before_layout(self, layout: Layout) -> None:
        """Buckets are about to be laid out anew."""

    def on_layout(self, layout: Layout) -> None:
        """Buckets have been laid out anew."""

    def gather(self, flat: Tensor) -> None:
        """Replace all shards of a tensor by those of the ranks that have them, and wait for it."""

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's list of numbers, by rank."""


class _NobodyObserves:
    """Carries what moves, and tells nobody.

    Args:
        groups: Among whom shards are divided.
    """

    def __init__(self, groups: ShardGroups) -> None:
        self._groups = groups

    def before_layout(self, layout: Layout) -> None:
        """Nothing."""

    def on_layout(self, layout: Layout) -> None:
        """Nothing."""

    def gather(self, flat: Tensor) -> None:
        """Gather the shards."""
        self._groups.inside.all_gather_shards(flat).wait()

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Exchange numbers with the ranks among which shards are divided."""
        return self._groups.inside.exchange_objects(numbers)


class ShardedRuns(BucketRuns):
    """All buckets of the present layout, of which this rank gets its shard.

    A published ``.grad`` is a :class:`ShardedGrad`. What was published and not cleared is set aside when the next pass
    begins, and added to what that pass reduces.

    Args:
        groups: Among whom shards are divided.
        keep_shards: Whether what is published is the shard alone, whole buckets having memory during passes only.
        args: As for :class:`BucketRuns`.
        options: As for :class:`BucketRuns`.

    Attributes:
        groups: Among whom shards are divided.
        parts: This rank's part of each slot.
    """

    def __init__(self, groups: ShardGroups, keep_shards: bool, *args: object, **options: object) -> None:
        self._observer: LayoutObserver = _NobodyObserves(groups)
        self.groups = groups
        self._keep_shards = keep_shards
        self._away = False
        self._set_aside: dict[int, Tensor] = {}  # by bucket, its shard as it was published
        self._looked = False  # whether `before_gradients` was called in this pass
        self._local_versions: dict[int, int] = {}  # by slot, of views to which a local pass has added since
        self._settled = 0  # how many of the active buckets have been summed
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def observe(self, observer: LayoutObserver) -> None:
        """Tell somebody of new layouts from now on."""
        self._observer = observer

    def _make_runs(self) -> None:
        super()._make_runs()
        self.parts = parts_of(self.layout, self.groups.shards, self.groups.index)
        self._shards: list[Tensor] = []
        if self._keep_shards:
            self._shards = [torch.zeros_like(self._shard(run)) for run in self._runs]
        self._sharded = [self._make_sharded(slot) for slot in range(len(self.layout.slots))]

    def _make_sharded(self, slot: int) -> ShardedGrad:
        view, spec = self._buffers.views[slot], self._slots.specs[slot]
        if self._keep_shards:  # whatever would add to it in spite of all raises, its elements being one
            view = view.new_zeros(()).expand(spec.shape)
        return ShardedGrad.of(view, self.part(slot), spec.name, self._sum, has_no_rest=self._keep_shards)

    def _forget_runs(self) -> None:
        super()._forget_runs()
        self._sharded.clear()
        self._shards.clear()

    def _sum(self, tensor: Tensor) -> None:
        self._collectives.all_reduce_sum(tensor).wait()

    def part(self, slot: int) -> Tensor:
        """This rank's part of a slot's published gradient, 1-D."""
        part = self.parts[slot]
        if self._keep_shards:
            return self._within(self._shards[part.bucket], slot)
        return self._part_in_bucket(slot)

    def _part_in_bucket(self, slot: int) -> Tensor:
        part = self.parts[slot]
        return self._runs[part.bucket].flat[part.at : part.at + part.stop - part.start]

    def _within(self, shard: Tensor, slot: int) -> Tensor:
        """A slot's part of a tensor that is this rank's shard of its bucket."""
        part = self.parts[slot]
        offset = part.at - self.groups.index * shard.numel()
        return shard[offset : offset + part.stop - part.start]

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot."""
        self._require_memory()
        return super().views

    def _require_memory(self) -> None:
        """Gives whole buckets their memory again."""
        if self._away:
            self._buffers.take_out()
            self._away = False

    def _put_away(self) -> None:
        """Takes whole buckets their memory, unless gradients are in it."""
        params, views = self._slots.params, self._buffers.views
        if self._keep_shards and not any(params[slot].grad is view for slot, view in enumerate(views)):
            self._buffers.put_away()
            self._away = True

    def is_sharded(self, slot: int) -> bool:
        """Whether a slot's gradient is its published one, of which this rank holds its part."""
        return self._slots.params[slot].grad is self._sharded[slot]

    def _shard(self, run: BucketRun) -> Tensor:
        return self.groups.shard(run.flat)

    # -- gradients of earlier passes -----------------------------------------------------------------

    def before_gradients(self) -> None:
        """Sets published gradients aside, so that autograd adds to zeros, on every rank, what is to be reduced."""
        self._require_memory()
        self._looked = True
        params = self._slots.params
        for index in self._set_aside:
            for slot in self._runs[index].slots:
                if self._was_cleared(slot):
                    self._aside_part(slot).zero_()
        for run in self._runs:
            live = [slot for slot in run.slots if params[slot].grad is self._sharded[slot]]
            if not live:
                continue
            if run.index not in self._set_aside:
                self._set_aside[run.index] = self._new_aside(run, live)
            for slot in live:
                self._aside_part(slot).copy_(self.part(slot))
            torch._foreach_zero_([self._buffers.views[slot] for slot in live])
            for slot in live:
                params[slot].grad = self._buffers.views[slot]

    def _was_cleared(self, slot: int) -> bool:
        """Whether a gradient was cleared after a local pass that has added to what had been set aside."""
        grad = self._slots.params[slot].grad
        if grad is None or not self._buffers.holds(slot, grad):
            return not self.is_sharded(slot)  # a gradient of its own is new: autograd would have added to the view
        version = self._local_versions.get(slot, grad._version)
        return grad._version != version and not grad.any()

    def _new_aside(self, run: BucketRun, live: Sequence[int]) -> Tensor:
        if not self._keep_shards:
            return torch.zeros_like(self._shard(run))
        for slot in run.slots:
            if slot not in live:
                self.part(slot).zero_()
        return self._shards[run.index]  # stays where it is; what a pass reduces is in other memory

    def _aside_part(self, slot: int) -> Tensor:
        return self._within(self._set_aside[self.parts[slot].bucket], slot)

    def no_gradient_came(self) -> None:
        """Publishes again what :meth:`before_gradients` has set aside."""
        self._looked = False
        self._give_back()

    def _give_back(self) -> None:
        """Publishes again what was set aside and to which nothing has been added."""
        for index in list(self._set_aside):
            for slot in self._runs[index].slots:
                grad = self._slots.params[slot].grad
                if slot not in self.contributing and grad is not None and self._buffers.holds(slot, grad):
                    aside = self._aside_part(slot)
                    self.part(slot).copy_(aside)
                    if aside.data_ptr() != self.part(slot).data_ptr():
                        aside.zero_()
                    self._slots.params[slot].grad = self._sharded[slot]
            if not any(slot in self.contributing for slot in self._runs[index].slots):
                del self._set_aside[index]

    def _published_grad(self, slot: int) -> Tensor | None:
        return self.part(slot) if self.is_sharded(slot) else super()._published_grad(slot)

    def zero(self) -> None:
        """Sets all gradients to zero, in the buffers."""
        self._require_memory()
        self._set_aside.clear()
        super().zero()

    def require_untouched(self, slot: int) -> None:
        """Requires that no gradient was added to a published one that had not been set aside.

        Raises:
            RuntimeError: If so; parts of other ranks' shards have no meaning, and cannot be added to.
        """
        if self.is_sharded(slot):
            raise RuntimeError(
                f"rank {self._collectives.rank}: a gradient of parameter {self._slots.specs[slot].name!r} was added to "
                "its sharded one of an earlier pass, in a backward that did not come by an output of forward; clear "
                "gradients before it, or call backward inside backward_pass()"
            )

    def begin(
        self, trainable: TrainableSet, reachable: set[int] | None, local: bool = False, in_order: bool = True
    ) -> None:
        """As for buckets that are not sharded."""
        self._require_memory()
        if not self._looked:  # backward came by no output of forward; all gradients but the first are yet to come
            self.before_gradients()
        super().begin(trainable, reachable, local, in_order)

    def ready(self, slot: int) -> BucketRun | None:
        """As for buckets that are not sharded."""
        self.require_untouched(slot)
        return super().ready(slot)

    # -- a pass --------------------------------------------------------------------------------------

    def _divisor(self, run: BucketRun) -> int | None:
        """None: only the shard has to be divided, when it has been summed."""
        return None

    def _start(self, run: BucketRun) -> Pending:
        if self.comm_hook is not None:
            return super()._start(run)  # gives all of the bucket; the shard is a part of it
        return self.groups.reduce_scatter_mean(run.flat, self.wire_dtype)

    def launch_complete(self) -> None:
        """Launches buckets as for those that are not sharded, and what comes behind those that have arrived."""
        super().launch_complete()
        if self._on_accelerator:
            return  # the compute stream would have to wait; the end of the pass is the same place on every rank
        for run in self.active[: self.launched]:
            if isinstance(run.pending, PendingInTwoGroups):
                if not run.pending.may_start_other():
                    return
                run.pending.start_other()

    def proceed(self, on_idle: Callable[[], None]) -> None:
        """As for buckets that are not sharded."""
        for run in self.active:
            if isinstance(run.pending, PendingInTwoGroups):
                self.awaited_run = run
                run.pending.start_other(on_idle)
        super().proceed(on_idle)

    def activate(self, trainable: TrainableSet) -> None:
        """Chooses the buckets that this synchronised pass reduces: those with a parameter in the set."""
        super().activate(trainable)
        self._settled = 0

    def _launch(self, run: BucketRun) -> None:
        """Starts a bucket's collective, and sums those that have arrived, which gives their memory back."""
        super()._launch(run)
        if self.comm_hook is not None:
            return
        for earlier in self.active[self._settled : self.launched]:
            if earlier.pending is None or not earlier.pending.settle():
                return
            self._settled += 1

    def _keep(self, slot: int, grad: Tensor) -> None:
        self._kept[slot] = (grad, None)  # a view holds zeros: its gradient has been set aside

    def end_local(self) -> None:
        """Ends a local pass."""
        super().end_local()
        self._looked = False
        self._give_back()
        views = self._buffers.views
        self._local_versions = {s: views[s]._version for index in self._set_aside for s in self._runs[index].slots}

    def end(self) -> None:
        """Ends a synchronised pass."""
        super().end()
        self._looked = False
        self._give_back()
        self._put_away()

    def _bind_main_grads(self) -> None:
        """Nothing: most of what a parameter would have as its ``main_grad`` has no meaning after a pass."""
        self._main_grads_bound = True

    def publish(self, run: BucketRun) -> list[int]:
        """Adds what had been set aside, and binds the reduced gradients of a bucket to its parameters.

        Returns:
            The slots not used on this rank.
        """
        unused: list[int] = []
        if run.index in self._set_aside:
            for slot in run.slots:
                if slot in self.contributing or slot in self._kept:  # else it was cleared in between
                    self._part_in_bucket(slot).add_(self._aside_part(slot))
            del self._set_aside[run.index]
        for slot in run.slots:
            if slot in self.contributing:
                self._publish_part(slot)
            else:
                unused.append(slot)
        return unused

    def _publish_part(self, slot: int) -> None:
        if self._keep_shards:
            self.part(slot).copy_(self._part_in_bucket(slot))
        self._buffers.bind(slot, self._slots.params[slot], self._sharded[slot])  # gives a lost grad_dtype back

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """A parameter without a gradient here: the mean if another rank had one, else what was there before."""
        super().publish_unused(slot, used_elsewhere)
        grad = self._slots.params[slot].grad
        if grad is not None and self._buffers.holds(slot, grad):
            self._publish_part(slot)

    def drop(self) -> None:
        """Lets the gradients of a pass that failed be of no use, those of earlier passes included."""
        super().drop()
        self._looked = False
        for run in self.active:
            self._set_aside.pop(run.index, None)
            for slot in run.slots:
                self._slots.params[slot].grad = None

    # -- layout --------------------------------------------------------------------------------------

    def relayout(self) -> None:
        """Lays the buffers out by what the slot table knows now. All ranks must call this at the same point."""
        layout = self._slots.plan()
        self._observer.before_layout(layout)
        self.before_gradients()
        whole = self._whole_aside() if layout != self.layout else None
        super().relayout()
        if whole is not None:
            self._set_aside.clear()
            for slot, values in whole.items():
                part = self.parts[slot]
                if part.bucket not in self._set_aside:
                    self._set_aside[part.bucket] = torch.zeros_like(self._shard(self._runs[part.bucket]))
                self._aside_part(slot).copy_(values[part.start : part.stop])
        self._observer.on_layout(self.layout)

    def _whole_aside(self) -> dict[int, Tensor]:
        """By slot, all of what was set aside, 1-D in the order of memory."""
        found: dict[int, Tensor] = {}
        # Of all ranks: one that has cleared its gradients alone has to help the others with theirs.
        everywhere = set().union(*self._observer.exchange(sorted(self._set_aside)))
        for index in sorted(everywhere):
            run = self._runs[index]
            whole = torch.zeros_like(run.flat)
            aside = self._set_aside.get(index)
            if aside is not None:
                self.groups.shard(whole).copy_(aside)
            self._observer.gather(whole)
            if aside is None:
                continue
            for slot in run.slots:
                if self._slots.params[slot].grad is not None:
                    place = self.layout.slots[slot]
                    begin = place.offset - self.layout.buckets[index].start
                    found[slot] = whole[begin : begin + place.spec.numel]
        return found

    def release(self) -> None:
        """Frees the buffers; what this rank does not hold of gradients is lost, and they with it."""
        if self.under_way():
            self.groups.leave_behind("it was closed in the middle of a pass")
        for slot in range(len(self._sharded)):
            if self.is_sharded(slot):
                self._slots.params[slot].grad = None
        super().release()
