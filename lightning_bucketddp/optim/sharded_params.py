"""Parameters that are divided between ranks: this rank's parts, and the all-gather of new values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.sharded_grad import ShardedGrad
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.layout.shards import parts_of
from lightning_bucketddp.optim.lazy_all_gather import Arrival, ModulesWait
from lightning_bucketddp.optim.param_buffers import ParamBuffers
from lightning_bucketddp.optim.parts import ParamPart, Parts
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase

_log = logging.getLogger("lightning_bucketddp")


class ShardedParams(Parts):
    """The sharded parameters, in buffers laid out like their gradients.

    Args:
        module: The module.
        slots: The slots.
        storage: The gradients.
        planner: Plans their layout.
        peers: The other ranks.

    Attributes:
        part_of: This rank's part of each sharded parameter, by the parameter's id.
    """

    swap_before_closure = False  # element-wise optimizers call it first; forward then waits only for what it uses

    def __init__(
        self, module: nn.Module, slots: SlotTable, storage: Sharded, planner: LayoutPlanner, peers: Peers
    ) -> None:
        self._slots, self._storage, self._planner, self._peers = slots, storage, planner, peers
        self.part_of: dict[int, ParamPart] = {}
        self._buffers = ParamBuffers()
        self._arrivals: dict[int, Arrival] = {}  # by bucket
        self._modules_wait = ModulesWait(module, self._arrivals)
        self.lay_out(storage.layout)

    # -- parts ---------------------------------------------------------------------------------------

    def find(self, param: Tensor) -> ParamPart | None:
        """Return this rank's part of a parameter; None if the parameter is not sharded."""
        return self.part_of.get(id(param))

    def param_part(self, param: Tensor) -> Tensor:
        """Return the memory of this rank's part; the parameter itself if it is not sharded.

        In the flat tensor, if it lies there: an optimizer keeps it, and ``param.share_memory_()`` moves no flat tensor.
        """
        if (found := self.find(param)) is None:
            return param
        flat = self._buffers.flats[found.part.bucket] if self._buffers.flats else None  # none after release()
        if flat is None or found.whole_in_bucket(flat).data_ptr() != param.data_ptr():
            return found.of(param.data)
        return found.shaped(found.in_bucket(flat))

    def grad_part(self, param: Tensor) -> Tensor | None:
        """Return the gradient of this rank's part; None if the parameter has no gradient."""
        found, grad = self.find(param), param.grad
        if isinstance(grad, ShardedGrad):
            own = grad.own_part.detach()  # another object, as an optimizer may give it other memory
            return own if found is None else found.shaped(own)
        return grad if grad is None or found is None else found.of(grad.detach())

    def gather(
        self, bucket: int, dtype: torch.dtype, parts: Iterable[tuple[ParamPart, Tensor | None]], what: str
    ) -> Tensor:
        """Gather all ranks' parts of some tensors into a flat tensor like one bucket. All ranks must call this.

        Args:
            bucket: The bucket's index.
            dtype: The dtype of the tensors.
            parts: This rank's parts, with their values; None where it has no value.
            what: The tensors, for messages.
        """
        layout = self._storage.layout.buckets[bucket]
        flat = torch.zeros(layout.numel, dtype=dtype, device=self._slots.params[layout.slots[0]].device)
        for part, value in parts:
            if value is not None:
                part.in_bucket(flat).copy_(part.run(value))
        with self._storage.inside.waiting_for(what):
            self._storage.groups.gather(flat)
        return flat

    def add_norm(self, norm: Tensor, shards: Sequence[Tensor], norm_type: float) -> Tensor:
        """Add this and the other ranks' shards of gradients to a norm. All ranks must call this.

        Args:
            norm: The norm of gradients that are whole on every rank; its dtype is the result's.
            shards: This rank's shards.
            norm_type: The order of the norm.
        """
        parts = [shard for shard in shards if shard.numel()] or [torch.zeros_like(norm)]
        device, mine = self._slots.all_params[0].device, nn.utils.get_total_norm(parts, norm_type)
        norms = self._storage.inside.gather(mine.to(device, norm.dtype), "the norm of the gradients")
        return torch.linalg.vector_norm(torch.stack([*norms, norm.to(device)]), norm_type)

    # -- steps ---------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Wait for parameters that are on their way, before an optimizer updates them.

        Raises:
            PeerFailureError: If the ranks cannot go on together.
        """
        self._peers.require_usable()
        self._bring_back()

    def _bring_back(self) -> None:
        """Move all parameters back into the buffers, where new values are gathered."""
        self.wait()
        self._buffers.bring_back(self._slots.params)

    def half_updated(self) -> None:
        """Give up: a step raised after it had changed some parts, which the other ranks will not get."""
        number = self._peers.position.pass_number
        self._peers.fail(f"raised in optimizer.step() before pass {number}, with some parameters updated")

    def updated(self, params: Sequence[Tensor]) -> None:
        """Send the new values of parameters. All ranks must call this alike."""
        self.keep_place()
        changed = [param for param in params if id(param) in self.part_of and param.grad is not None]
        # Backward must notice that a saved parameter has changed, also where this rank has no part of it.
        torch.autograd.graph.increment_version(changed)
        self.send(params)

    @torch.no_grad()
    def send(self, params: Iterable[Tensor]) -> None:
        """Start the all-gather of each bucket with one of these parameters. Whoever uses a parameter waits for it.

        Waits now where others see a parameter's memory: nobody tells when they read it.
        """
        chosen = {found.part.bucket for param in params if (found := self.find(param)) is not None}
        buckets = sorted(chosen, reverse=True)  # the last bucket of backward is the first of forward
        if buckets:
            self._peers.here.note_update(buckets)
        groups = self._storage.groups
        for index in buckets if groups.shards > 1 else ():
            work = groups.start_gather(self._buffers.flats[index], index)
            arriving = [self._slots.params[slot] for slot in self._storage.layout.buckets[index].slots]
            arrived = partial(self._arrivals.pop, index, None)
            self._arrivals[index] = Arrival(arriving, partial(self._wait_for, index, work), arrived)
        for index in sorted(self._buffers.seen() & self._arrivals.keys(), reverse=True):
            self._arrivals[index].wait()
        self._buffers.give_back(self._slots.params)
        if self._arrivals:
            self._modules_wait.begin()

    def replaced(self) -> None:
        """Send all parameters, after each rank has written its own parts. All ranks must call this alike."""
        self._bring_back()
        torch.autograd.graph.increment_version(self._slots.params)  # masters follow, in the next step
        self.send(self._slots.params)

    # -- the lazy all-gather -------------------------------------------------------------------------

    def _wait_for(self, index: int, work: Work) -> torch.Event | None:
        names = [self._slots.specs[slot].name for slot in self._storage.layout.buckets[index].slots]
        what = f"the parameters {names[0]!r} to {names[-1]!r}"
        with self._peers.waiting_for(what, Phase.UPDATE):
            work.wait()
        device = self._buffers.flats[index].device
        if not is_accelerator(device):  # the host has waited, and with it everybody
            return None
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        return event

    @property
    def gathering(self) -> bool:
        """Whether parameters are on their way."""
        return bool(self._arrivals)

    def wait(self) -> None:
        """Wait for all parameters that are on their way."""
        for arrival in list(self._arrivals.values()):
            arrival.wait()
        self._modules_wait.end()

    def in_forward(self, trains: bool) -> AbstractContextManager[None]:
        """The wrapper's forward, in which modules wait for their parameters."""
        return self._modules_wait.in_forward(trains)

    # -- layout --------------------------------------------------------------------------------------

    def lay_out(self, layout: Layout) -> list[Tensor]:
        """Move the parameters to their places in a new layout; return those that were not sharded before."""
        slots, groups, known = self._slots, self._storage.groups, self.part_of
        self.wait()
        parts = zip(slots.params, slots.specs, parts_of(layout, groups.shards, groups.index), strict=True)
        self.part_of = {id(param): ParamPart(spec, part) for param, spec, part in parts}
        self._buffers.lay_out(layout, slots.params)
        return [param for param in slots.params if id(param) not in known]

    def keep_place(self) -> None:
        """Let parameters stay where they are, as optimizer state lies there too."""
        self._planner.settle()

    def release(self) -> None:
        """Wait for parameters that are on their way, and give all memory of their own."""
        try:
            if self._peers.failure is None:
                self.wait()
        except Exception as error:  # ranks have failed, which other errors tell
            _log.warning("rank %d: parameters of the last step could not be gathered: %s", self._peers.rank, error)
        for arrival in list(self._arrivals.values()):
            arrival.forget()
        self._modules_wait.end()
        self._buffers.release(self._slots.params)
