"""Parameters in buffers like those of their gradients: this rank's parts, and when new values are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.optim.lazy_all_gather import Arrival
from lightning_bucketddp.optim.param_buffers import ParamBuffers
from lightning_bucketddp.optim.parts import ParamPart, Parts
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase

MAX_STAGES = 8
"""In how many stages an optimizer steps at most, each of which is sent while the next is stepped on."""


class ShardedParams(Parts):
    """The parameters that are sharded.

    Args:
        slots: The slots.
        storage: Where gradients lie.
        collectives: The group of all ranks that train together.
        peers: The other ranks.

    Attributes:
        slot_of: By id of each sharded parameter, its slot.
    """

    swap_before_closure = False  # element-wise optimizers call it first; forward then waits for what it needs alone

    def __init__(self, slots: SlotTable, storage: Sharded, collectives: Collectives, peers: Peers) -> None:
        self._slots = slots
        self._storage = storage
        self._collectives = collectives
        self._peers = peers
        self.slot_of: dict[int, int] = {}
        self._buffers = ParamBuffers()
        self._arrivals: dict[int, Arrival] = {}
        self.lay_out(storage.layout)

    # -- parts ---------------------------------------------------------------------------------------

    def find(self, param: Tensor) -> ParamPart | None:
        """This rank's part of a parameter; None if the parameter is not sharded."""
        slot = self.slot_of.get(id(param))
        return None if slot is None else ParamPart(self._slots.specs[slot], self._storage.shards.parts[slot])

    def param_part(self, param: Tensor) -> Tensor:
        """The memory of this rank's part of a parameter, 1-D; a copy of it when parameters have left the buffers."""
        found = self.find(param)
        if found is None:
            return param
        if self._buffers.flats:
            return found.in_bucket(self._buffers.flats[found.part.bucket])
        return found.of(param.detach()).clone()

    def sharded_grad(self, param: Tensor) -> Tensor | None:
        """This rank's part of a gradient that is sharded, 1-D; None if the parameter's is not."""
        slot = self.slot_of.get(id(param))
        return None if slot is None or not self._storage.is_sharded(slot) else self._storage.shards.part(slot)

    def grad_part(self, param: Tensor) -> Tensor | None:
        """The gradient of this rank's part of a parameter, 1-D; None if the parameter has no gradient."""
        part = self.sharded_grad(param)
        if part is not None:
            return part
        found = self.find(param)
        return param.grad if found is None or param.grad is None else found.of(param.grad.detach())

    # -- steps ---------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Parameters are about to be updated: wait for those that are on their way.

        Raises:
            PeerFailureError: If the ranks cannot go on together.
        """
        self._peers.require_usable()
        self.wait()
        # On every rank, those included that have no part of a parameter: new values are gathered into the buffers.
        for slot, param in enumerate(self._slots.params):
            self._buffers.bring_back(slot, param)

    def half_updated(self) -> None:
        """A step raised after it had changed some of this rank's parts: nobody else will get them."""
        if self._collectives.world_size == 1 or self._peers.message:
            return
        number = self._peers.position.pass_number
        cause = f"raised in optimizer.step() before pass {number}, with some parameters updated"
        self._peers.give_up(f"rank {self._collectives.rank} {cause}; restart from a checkpoint", cause)

    def updated(self, params: Iterable[Tensor]) -> None:
        """Let graphs that have saved parameters notice their new values, also where this rank has no part of them."""
        for param in params:
            if id(param) in self.slot_of and param.grad is not None:
                torch.autograd.graph.increment_version(param)

    @torch.no_grad()
    def send(self, params: Iterable[Tensor], complete: bool = True) -> None:
        """Send the new values of parameters; whoever uses one waits for it. All ranks must call this alike."""
        chosen = {found.part.bucket for param in params if (found := self.find(param)) is not None}
        if not chosen:
            return
        buckets = sorted(chosen, reverse=True)  # the last bucket of backward is the first of forward
        self._peers.here.note_update(buckets, complete)
        groups = self._storage.groups
        for index in buckets if groups.shards > 1 else ():
            pending = groups.gathering.all_gather_shards(self._buffers.flats[index])
            arriving = [self._slots.params[slot] for slot in self._storage.layout.buckets[index].slots]
            self._arrivals[index] = Arrival(arriving, partial(self._wait_for, index, pending))

    def in_stages(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """The parameters in the order in which forward needs them, cut where they may be sent one after the other.

        Each stage has some buckets, the first has one, so that it leaves soon. Parameters that are not sharded are in
        none.
        """
        if self._storage.groups.shards == 1:
            return []
        by_bucket: dict[int, list[Tensor]] = {}
        for param in params:
            if (found := self.find(param)) is not None:
                by_bucket.setdefault(found.part.bucket, []).append(param)
        order = sorted(by_bucket, reverse=True)
        at_least = -(-len(order) // MAX_STAGES)
        stages = [order[:1], *(order[at : at + at_least] for at in range(1, len(order), at_least))]
        return [[param for index in stage for param in by_bucket[index]] for stage in stages if stage]

    def replaced(self) -> None:
        """Send all parameters, of which each rank has written its own parts. All ranks must call this alike."""
        self.wait()
        for slot, param in enumerate(self._slots.params):
            self._buffers.bring_back(slot, param)
            torch.autograd.graph.increment_version(param)  # masters follow, in the next step
        self.send(self._slots.params)

    # -- the lazy all-gather -------------------------------------------------------------------------

    def _wait_for(self, index: int, pending: Work) -> None:
        names = [self._slots.specs[slot].name for slot in self._storage.layout.buckets[index].slots]
        what = f"the parameters {names[0]!r} to {names[-1]!r}"
        with self._peers.waiting_for(f"(gathering) {what}", Phase.UPDATE):
            pending.wait(self._peers.poll)
        self._arrivals.pop(index, None)

    @property
    def gathering(self) -> bool:
        """Whether parameters are on their way."""
        return bool(self._arrivals)

    def wait(self) -> None:
        """Wait for all parameters that are on their way."""
        for arrival in list(self._arrivals.values()):
            arrival.wait()

    # -- layout --------------------------------------------------------------------------------------

    def lay_out(self, layout: Layout) -> Sequence[Tensor] | None:
        """Move the parameters to where a layout has them.

        Returns:
            The parameters that were not sharded before; None if nothing has moved.
        """
        known, self.slot_of = self.slot_of, {id(param): slot for slot, param in enumerate(self._slots.params)}
        if layout == self._buffers.layout:
            return None
        self._buffers.lay_out(layout, self._slots.params)
        return [param for param in self._slots.params if id(param) not in known]

    def release(self) -> None:
        """Give parameters memory of their own, arrived or not."""
        for arrival in list(self._arrivals.values()):
            arrival.forget()
        self._arrivals.clear()
        self._buffers.release(self._slots.params)
