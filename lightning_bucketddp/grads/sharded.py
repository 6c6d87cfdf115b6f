"""Gradients of which each rank keeps its shard after a pass, for buckets that are reduce-scattered.

A published ``.grad`` is a :class:`ShardedGrad`. Two backwards before one step accumulate: the second begins without a
gradient, and what it reduces is added to the accumulated shard::

    .grad after pass 1    in pass 2              after pass 2         zero_grad()
    ShardedGrad (a)       None, autograd's own   ShardedGrad (a + b)  None, or a ShardedGrad of zeros

After a local pass in between, ``.grad`` is the ShardedGrad again; the local gradients wait in the bucket, and whatever
scales or clears the one does so to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.shard_memory import ShardMemory
from lightning_bucketddp.grads.sharded_grad import ShardedGrad
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.plan import Layout


class LayoutObserver(Protocol):
    """Keeps something by shard that has to move when buckets are laid out anew."""

    def before_layout(self, layout: Layout) -> None:
        """Buckets are about to be laid out anew, on every rank."""

    def on_layout(self, layout: Layout) -> None:
        """They have been."""

    def exchange(self, mine: list[int]) -> list[list[int]]:
        """Every rank's list of numbers, by rank."""


class Sharded(Storage):
    """The storage of buckets of which this rank gets its shard.

    Args:
        table: The slots.
        buckets: The buckets.
        layout: Where each slot lies.
        collectives: The group of all ranks.
        groups: Among whom shards are divided.
        keep_shards: Whether only shards have memory between passes, and whole buckets during passes.

    Attributes:
        groups: Among whom shards are divided.
        shards: Where this rank's shards lie.
    """

    def __init__(
        self,
        table: SlotTable,
        buckets: Buckets,
        layout: Layout,
        collectives: Collectives,
        groups: ShardGroups,
        keep_shards: bool,
    ) -> None:
        self._inner = Contiguous(table, buckets, layout, main_grads=False)
        self._table, self._buckets = table, buckets
        self._collectives, self.groups = collectives, groups
        self._keep_shards = keep_shards
        self._observer: LayoutObserver | None = None
        self._away = False  # whether whole buckets have no memory
        self._accumulating: set[int] | None = None  # slots whose published gradient this pass adds to; None between
        self._make_shards()

    def _make_shards(self) -> None:
        self.shards = ShardMemory(self.layout, self._buckets, self.groups, self._keep_shards)

        def add_up(tensor: Tensor) -> None:
            self._collectives.all_reduce_sum(tensor).wait()

        self._sharded = []
        for slot, view in enumerate(self._inner.views):
            spec = self._table.specs[slot]
            if self._keep_shards:  # whatever would add to it in spite of all raises, its elements being one
                view = view.new_zeros(()).expand(spec.shape)
            self._sharded.append(ShardedGrad.of(view, spec.name, partial(self._pieces, slot), add_up))

    def _pieces(self, slot: int) -> tuple[Tensor, list[Tensor]]:
        """A slot's part, and all memory that an operation on its gradient concerns."""
        part = self.shards.part(slot)
        if not self.shards.is_apart(slot):
            return part, [self._inner.views[slot]]  # which the part is in
        return part, [part] if self._away else [part, self._inner.views[slot]]

    def observe(self, observer: LayoutObserver) -> None:
        """Let something move along when buckets are laid out anew."""
        self._observer = observer

    # -- what a rank holds ---------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Where the gradients lie now."""
        return self._inner.layout

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot."""
        self.require_memory()
        return self._inner.views

    def is_sharded(self, slot: int) -> bool:
        """Whether a slot's gradient is its published one, of which this rank holds its part."""
        return self._table.params[slot].grad is self._sharded[slot]

    def published_grad(self, slot: int) -> Tensor | None:
        """What lies in ``.grad``, as far as this rank holds it."""
        return self.shards.part(slot) if self.is_sharded(slot) else self._inner.published_grad(slot)

    def require_memory(self) -> None:
        """Give whole buckets memory again, if they have none."""
        if self._away:
            self._inner.buffers.take_out()
            self._away = False

    # -- a pass --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take published gradients out of ``.grad``: autograd must not add to them."""
        if self._accumulating is not None:
            return
        self.require_memory()
        self._inner.open()
        params, pending = self._table.params, self._buckets.pending
        self._accumulating = {slot for slot in range(len(self._sharded)) if self.is_sharded(slot)}
        self.shards.set_apart(self._accumulating)
        for slot in self._accumulating:
            params[slot].grad = self._inner.views[slot] if slot in pending else None

    def require_untouched(self, slot: int) -> None:
        """Require that no gradient was added to a published one.

        Raises:
            RuntimeError: If so; parts of other ranks' shards have no meaning, and cannot be added to.
        """
        if self.is_sharded(slot):
            raise RuntimeError(
                f"rank {self.groups.inside.rank}: a gradient of parameter {self._table.specs[slot].name!r} was added "
                "to its sharded one of an earlier pass, in a backward that did not come by an output of forward; clear "
                "gradients before it, or call backward inside backward_pass()"
            )

    def arrived(self, slot: int) -> None:
        """As for contiguous buffers."""
        self._inner.arrived(slot)

    def one_stream(self) -> bool:
        """As for contiguous buffers."""
        return self._inner.one_stream()

    def hold(self, slots: Sequence[int]) -> None:
        """As for contiguous buffers."""
        self._inner.hold(slots)

    def pack(self, bucket: Bucket, scale: float | None) -> None:
        """As for contiguous buffers."""
        self._inner.pack(bucket, scale)

    def publish(self, bucket: Bucket) -> None:
        """Bind the shards of slots that had a gradient on this rank, with what had accumulated before."""
        for slot in bucket.slots:
            if slot in self._buckets.pending:
                self._publish_part(slot)

    def _publish_part(self, slot: int) -> None:
        reduced = self.shards.in_bucket(slot)
        if slot in (self._accumulating or ()):
            self.shards.part(slot).add_(reduced)
        elif self.shards.is_apart(slot):
            self.shards.part(slot).copy_(reduced)
        self._bind(slot)

    def _bind(self, slot: int) -> None:
        self._inner.buffers.bind(slot, self._table.params[slot], self._sharded[slot])  # gives a lost grad_dtype back

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """Bind the shard if another rank had a gradient, else put back what was there before."""
        if not used_elsewhere:
            self._inner.publish_unused(slot, used_elsewhere)
        grad = self._table.params[slot].grad
        if used_elsewhere or (grad is not None and self._inner.buffers.holds(slot, grad)):
            self._publish_part(slot)

    def end(self, synchronised: bool) -> None:
        """A pass has ended: what had accumulated before is published again."""
        self._inner.end(synchronised)
        self.abandon()
        if synchronised:
            self.shards.put_back()
            in_use = any(self._table.params[slot].grad is view for slot, view in enumerate(self._inner.views))
            if self._keep_shards and not in_use:  # whole buckets have memory during passes only
                self._inner.buffers.put_away()
                self._away = True

    def abandon(self) -> None:
        """Publish again what had accumulated before; gradients that have come on top of it are dropped."""
        for slot in self._accumulating or ():
            self._bind(slot)
        self._accumulating = None

    def drop(self) -> None:
        """Let the gradients of a pass that failed be of no use, those of earlier passes included."""
        self._inner.drop()
        for bucket in self._buckets.active:
            if self._accumulating is not None:
                self._accumulating.difference_update(bucket.slots)
            for slot in bucket.slots:
                self._table.params[slot].grad = None
        self.abandon()

    def zero(self) -> None:
        """Set all gradients to zero, in the buffers."""
        self.require_memory()
        self._inner.zero()

    # -- layout --------------------------------------------------------------------------------------

    def lay_out(self, layout: Layout) -> bool:
        """Move to another layout when gradients are cleared. All ranks must call this at the same point.

        Raises:
            RuntimeError: On all ranks, if that cannot wait, as parameters have become trainable.
        """
        if layout == self.layout:
            return self._inner.lay_out(layout)
        mine = [len(self._accumulating or ())]
        everyone = [mine] if self._observer is None else self._observer.exchange(mine)
        accumulating = any(count for (count,) in everyone)
        if accumulating and len(layout.slots) == len(self.layout.slots):
            return False
        if accumulating:
            raise RuntimeError(
                f"rank {self.groups.inside.rank}: expected cleared gradients where further parameters become trainable "
                "with shard_optimizer, found accumulated ones on some rank; call optimizer.zero_grad() before backward"
            )
        if self._observer is not None:
            self._observer.before_layout(layout)
        self._inner.lay_out(layout)
        self._make_shards()
        if self._observer is not None:
            self._observer.on_layout(layout)
        return True

    def release(self) -> None:
        """Free the buffers; what this rank does not hold of gradients is lost, and they with it."""
        if self._buckets.under_way():
            self.groups.leave_behind("it was closed in the middle of a pass")
        for slot in range(len(self._sharded)):
            if self.is_sharded(slot):
                self._table.params[slot].grad = None
        self._inner.release()
