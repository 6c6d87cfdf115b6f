"""The gradients of sharded optimizers: after a pass each rank keeps only its shard of each bucket.

A published ``.grad`` is a :class:`ShardedGrad`. Two backwards before one step accumulate: the second begins without a
gradient, and its reduced gradient is added to the shard::

    .grad after pass 1    in pass 2              after pass 2         zero_grad()
    ShardedGrad (a)       None, autograd's own   ShardedGrad (a + b)  None, or a ShardedGrad of zeros

After a local pass in between, ``.grad`` is the ShardedGrad again, and the local gradients wait in the bucket.
Operations that scale or clear the ShardedGrad do the same to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_

from torch import Tensor

from lightning_bucketddp.comm.lane import Streams
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.shard_memory import ShardMemory
from lightning_bucketddp.grads.sharded_grad import ShardedGrad
from lightning_bucketddp.grads.slots import SlotTable, attributes_only
from lightning_bucketddp.grads.storage import Storage, Taken
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.ranks import Ranks


class Sharded(Storage):
    """The storage of buckets that leave each rank its shard.

    Args:
        table: The slots.
        buckets: The buckets.
        layout: The place of each slot.
        streams: The streams on which gradients are made.
        groups: The groups in which shards travel.
        inside: The ranks that divide the shards.
        keep_shards: Whether only shards have memory between passes. Whole buckets then have memory during passes.

    Attributes:
        layout: The present layout.
        groups: The groups in which shards travel.
        inside: The ranks that divide the shards.
        shards: This rank's shards.
    """

    def __init__(
        self,
        table: SlotTable,
        buckets: Buckets,
        layout: Layout,
        streams: Streams,
        groups: ShardGroups,
        inside: Ranks,
        keep_shards: bool,
    ) -> None:
        self._inner = Contiguous(table, buckets, layout, streams, main_grads=False)
        self._table, self._buckets = table, buckets
        self.groups, self.inside, self._keep_shards = groups, inside, keep_shards
        self._whole_freed = False  # whether whole buckets have no memory
        # Slots to whose published gradient this pass adds. None between passes.
        self._accumulating: set[int] | None = None
        self._make_shards({})

    def _make_shards(self, stashed: Mapping[int, Tensor]) -> None:
        self.layout = self._inner.layout
        self.shards = ShardMemory(self.layout, self._buckets, self.groups, self._keep_shards, stashed)
        self._sharded = []
        for slot, (spec, view) in enumerate(zip(self._table.specs, self._inner.views, strict=True)):
            # All elements of such a view are one, so any operation that would write to it raises.
            shape = view.new_zeros(()).expand(spec.shape) if self._keep_shards else view
            self._sharded.append(ShardedGrad.of(shape, spec.name, partial(self._pieces, slot), self._sum_over_ranks))

    def _sum_over_ranks(self, tensor: Tensor) -> None:
        self.inside.total(tensor, "a sum over the shards of gradients")  # other groups have the same shards

    def _pieces(self, slot: int) -> tuple[Tensor, list[Tensor]]:
        """A slot's part, and all tensors that an operation on its gradient changes."""
        part = self.shards.part(slot)
        if not self.shards.is_stashed(slot):
            return part, [self._inner.views[slot]]  # holds the part
        return part, [part] if self._whole_freed else [part, self._inner.views[slot]]

    # -- what a rank holds ---------------------------------------------------------------------------

    def is_sharded(self, slot: int) -> bool:
        """Whether a slot's ``.grad`` is published, so that this rank holds its part."""
        return self._table.params[slot].grad is self._sharded[slot]

    def _require_memory(self) -> None:
        """Give whole buckets memory again, if they have none."""
        if self._whole_freed:
            self._inner.buffers.alloc_storage()
            self._whole_freed = False

    # -- a pass --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take published gradients out of ``.grad``: autograd must not add to them."""
        if self._accumulating is not None:
            return
        self._require_memory()
        self._inner.open()
        with attributes_only():
            published = enumerate(zip(self._table.params, self._sharded, strict=True))
            self._accumulating = {slot for slot, (param, grad) in published if param.grad is grad}
        for slot in self._accumulating:  # what local passes have added stays
            self._table.params[slot].grad = self._inner.views[slot] if slot in self._table.pending else None
        self.shards.stash(self._accumulating)

    def require_untouched(self, slot: int) -> None:
        """Require that autograd added nothing to a published gradient.

        Raises:
            RuntimeError: If it did. This rank does not hold the parts of other ranks.
        """
        if self.is_sharded(slot):
            raise RuntimeError(
                f"rank {self.groups.inside.rank}: backward added to the sharded gradient of parameter "
                f"{self._table.specs[slot].name!r} from an earlier pass, because it did not start from an output of "
                "forward; clear gradients before this backward, or call it inside backward_pass()"
            )

    def gradient_ready(self, slot: int) -> None:
        """As for contiguous buffers."""
        self._inner.gradient_ready(slot)

    def pack_and_bind(self, slots: Sequence[int]) -> None:
        """As for contiguous buffers."""
        self._inner.pack_and_bind(slots)

    def take(self, bucket: Bucket) -> Taken:
        """As for contiguous buffers."""
        return self._inner.take(bucket)

    def pack(self, bucket: Bucket, taken: Taken, scale: float | None, memory: Tensor | None = None) -> None:
        """As for contiguous buffers."""
        self._inner.pack(bucket, taken, scale, memory)

    def publish(self, bucket: Bucket) -> None:
        """Bind the shards of slots with a gradient on this rank, and add earlier passes to them."""
        pending, stashed, views = self._table.pending, bucket.index in self.shards.stashed, self._inner.views
        if stashed:
            for slot in bucket.slots:
                if slot in pending:
                    self._add_part(slot)
        with attributes_only():
            for slot, param in zip(bucket.slots, bucket.params, strict=True):
                if slot in pending:
                    if param.grad_dtype is views[slot].dtype:
                        param.grad = self._sharded[slot]
                    else:
                        self._bind(slot)

    def _add_part(self, slot: int) -> None:
        """Bring a slot's part of the bucket into the stashed shard."""
        if slot in (self._accumulating or ()):
            self.shards.part(slot).add_(self.shards.in_bucket[slot])
        else:
            self.shards.part(slot).copy_(self.shards.in_bucket[slot])

    def _bind(self, slot: int) -> None:
        self._inner.buffers.bind(slot, self._table.params[slot], self._sharded[slot])

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """Bind the shard if another rank had a gradient, else put the old gradient back."""
        self._inner.publish_unused(slot, used_elsewhere)
        grad = self._table.params[slot].grad
        if grad is not None and self._inner.buffers.holds(slot, grad):
            if self.shards.is_stashed(slot):
                self._add_part(slot)
            self._bind(slot)

    def end(self, synchronised: bool) -> None:
        """End a pass: publish again the gradients of earlier passes."""
        if not synchronised and self._accumulating is None:
            return  # the end of backward_pass(), after the engine's
        self._inner.end(synchronised)
        self.abandon()
        if synchronised:
            self.shards.put_back()
            if self._keep_shards and not self._views_in_use():
                self._inner.buffers.free_storage()
                self._whole_freed = True

    def _views_in_use(self) -> bool:
        with attributes_only():
            grads = [param.grad for param in self._table.params]
        return any(map(is_, grads, self._inner.views))

    def abandon(self) -> None:
        """Publish again the gradients of earlier passes, and drop gradients that came on top of them."""
        for slot in self._accumulating or ():
            self._bind(slot)
        self._accumulating = None

    def zero(self) -> None:
        """Set all gradients to zero, in the buffers."""
        self._require_memory()
        self._inner.zero()

    def rename(self) -> None:
        """Follow the slots to the new names of their parameters."""
        specs = self._table.specs
        slots = tuple([replace(slot, spec=specs[number]) for number, slot in enumerate(self.layout.slots)])
        self.layout = self._inner.layout = replace(self.layout, slots=slots)
        for grad, spec in zip(self._sharded, specs, strict=True):
            grad.param_name = spec.name

    # -- layout --------------------------------------------------------------------------------------

    def lay_out(self, layout: Layout) -> None:
        """Move to another layout. Between passes there must be no published gradients.

        Slots with published gradients lie where they did.
        """
        self._require_memory()
        if layout == self.layout:
            self._inner.lay_out(layout)
            return
        pairs = enumerate(zip(self.layout.buckets, layout.buckets, strict=False))
        stay = {index for index, (old, new) in pairs if old == new}
        stashed = {index: shard for index, shard in self.shards.stashed.items() if index in stay}
        del self._sharded, self.shards  # which hold the old memory
        self._inner.lay_out(layout)
        self._make_shards(stashed)

    def release(self) -> None:
        """Free the buffers, and drop published gradients, because this rank holds only parts of them."""
        for slot in range(len(self._sharded)):
            if self.is_sharded(slot):
                self._table.params[slot].grad = None
        self._inner.release()
