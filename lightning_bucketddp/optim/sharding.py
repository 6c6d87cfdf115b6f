"""A sharded optimizer's buffers: who has which part, when parameters are gathered, whole state from its parts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.grads.sharded_runs import ShardedRuns
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.plan import Layout, ParamSpec
from lightning_bucketddp.layout.shards import Part, parts_of
from lightning_bucketddp.optim.lazy_all_gather import Arrival
from lightning_bucketddp.optim.masters import STATE_DICT_KEY, params_of
from lightning_bucketddp.optim.param_buffers import ParamBuffers, in_memory_order, in_shape
from lightning_bucketddp.optim.sharded_params import ShardedParams, part_of_whole, sharded_params
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase

_log = logging.getLogger("lightning_bucketddp")


MAX_STAGES = 8
"""In how many stages an optimizer steps at most, each of which is sent while the next is stepped on."""


@dataclass(frozen=True)
class _Described:
    """What is in one rank's state of one parameter, for all ranks to know.

    Attributes:
        dtypes: Of the tensors with a value per element, by key.
        others: Everything else, by key.
        master: Whether there is an fp32 master.
    """

    dtypes: dict[str, torch.dtype]
    others: dict[str, Any]
    master: bool


class Sharding:
    """The parameters in buffers like those of their gradients, and the optimizers that step on shards of them.

    Args:
        slots: The slots.
        runs: The gradients' buckets.
        collectives: The group of all ranks that train together.
        peers: The other ranks.
    """

    def __init__(self, slots: SlotTable, runs: ShardedRuns, collectives: Collectives, peers: Peers) -> None:
        self._slots = slots
        self._runs = runs
        self._collectives = collectives
        self._groups = runs.groups
        ending = weakref.finalize(self, self._groups.end)
        ending.atexit = False
        self._peers = peers
        self._slot_of: dict[int, int] = {}
        self._buffers = ParamBuffers()
        self._devices: list[torch.device] = []
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, ShardedParams] = weakref.WeakKeyDictionary()
        self._number_of: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._sharded_ever = 0
        self._arrivals: dict[int, Arrival] = {}
        self._lay_out(runs.layout)
        runs.before_layout = self._before_layout
        runs.on_layout = self._lay_out
        runs.gather = self._gather_gradients
        runs.exchange = self._exchange

    # -- what a sharded optimizer asks ---------------------------------------------------------------

    def find(self, param: Tensor) -> tuple[ParamSpec, Part] | None:
        """A parameter's specification and this rank's part of it; None if the parameter is not sharded."""
        slot = self._slot_of.get(id(param))
        return None if slot is None else (self._slots.specs[slot], self._runs.parts[slot])

    def param_part(self, param: Tensor) -> Tensor:
        """The memory of this rank's part of a parameter, 1-D; a copy of it when parameters have left the buffers."""
        slot = self._slot_of[id(param)]
        part = self._runs.parts[slot]
        if self._buffers.flats:
            return self._buffers.part(part)
        return in_memory_order(param.detach(), self._slots.specs[slot])[part.start : part.stop].clone()

    def grad_part(self, param: Tensor) -> Tensor | None:
        """This rank's part of a parameter's gradient, 1-D; None if the parameter has no gradient."""
        slot = self._slot_of[id(param)]
        if self._runs.is_sharded(slot):
            return self._runs.part(slot)
        grad = param.grad
        if grad is None:
            return None
        part = self._runs.parts[slot]
        return in_memory_order(grad.detach(), self._slots.specs[slot])[part.start : part.stop]

    def before_update(self) -> None:
        """Parameters are about to be updated: nothing may be on its way from them.

        Raises:
            PeerFailureError: If the ranks cannot go on together.
        """
        self._peers.require_usable()
        self.wait()
        # On every rank, those included that have no part of a parameter: new values are gathered into the buffers.
        for slot, param in enumerate(self._slots.params):
            self._buffers.bring_back(slot, param)

    def look_for_raised_steps(self) -> None:
        """Finds steps that raised, of optimizers that somebody goes on with."""
        for sharded in list(self._optimizers.values()):
            sharded.restore()

    def half_updated(self) -> None:
        """An optimizer's step raised after it had changed some of this rank's parts: nobody else will get them."""
        if self._collectives.world_size == 1 or self._peers.message:
            return
        number = self._peers.position.pass_number
        cause = f"raised in optimizer.step() before pass {number}, with some parameters updated"
        self._peers.give_up(f"rank {self._collectives.rank} {cause}; restart from a checkpoint", cause)

    @torch.no_grad()
    def updated(self, params: Iterable[Tensor], complete: bool = True) -> None:
        """Sends the new values of parameters; whoever uses one waits for it. All ranks must call this alike.

        Args:
            params: The parameters.
            complete: Whether nothing more comes of the same step.
        """
        changed = [slot for param in params if (slot := self._slot_of.get(id(param))) is not None]
        if not changed:
            return
        buckets = {self._runs.parts[slot].bucket for slot in changed}
        for index in sorted(buckets & self._arrivals.keys()):
            self._arrivals[index].wait()
        for slot in changed:
            if self._runs.parts[slot].empty:  # else done before the step
                self._buffers.bring_back(slot, self._slots.params[slot])
            if self._slots.params[slot].grad is not None:
                torch.autograd.graph.increment_version(self._slots.params[slot])
                for sharded in self._optimizers.values():
                    sharded.synchronised(self._slots.params[slot])
        self._send(buckets, complete)

    def in_stages(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """The parameters in the order in which forward needs them, cut where they may be sent one after the other.

        Each stage has some buckets, the first has one, so that it leaves soon. Parameters that are not sharded are in
        none.
        """
        if self._groups.shards == 1:
            return []
        by_bucket: dict[int, list[Tensor]] = {}
        for param in params:
            if (slot := self._slot_of.get(id(param))) is not None:
                by_bucket.setdefault(self._runs.parts[slot].bucket, []).append(param)
        order = sorted(by_bucket, reverse=True)
        at_least = -(-len(order) // MAX_STAGES)
        stages = [order[:1], *(order[at : at + at_least] for at in range(1, len(order), at_least))]
        return [[param for index in stage for param in by_bucket[index]] for stage in stages if stage]

    def replaced(self) -> None:
        """Sends all parameters, of which each rank has written its own parts. All ranks must call this alike."""
        self.wait()
        for slot, param in enumerate(self._slots.params):
            self._buffers.bring_back(slot, param)
            torch.autograd.graph.increment_version(param)  # masters follow, in the next step
        self._send(range(len(self._runs.layout.buckets)))

    @torch.no_grad()
    def _send(self, chosen: Iterable[int], complete: bool = True) -> None:
        # The last bucket of backward is the first of forward.
        buckets = sorted(chosen, reverse=True)
        self._peers.here.note_update(buckets, complete)
        if self._groups.shards == 1:
            return
        for index in buckets:
            pending = self._groups.gathering.all_gather_shards(self._buffers.flats[index])
            params_here = [self._slots.params[slot] for slot in self._runs.layout.buckets[index].slots]
            self._arrivals[index] = Arrival(params_here, partial(self._wait_for, index, pending))

    def _wait_for(self, index: int, pending: Pending) -> None:
        names = [self._slots.specs[slot].name for slot in self._runs.layout.buckets[index].slots]
        what = f"the parameters {names[0]!r} to {names[-1]!r}"
        with self._peers.waiting_for(f"(gathering) {what}", Phase.UPDATE):
            pending.wait(self._peers.poll)
        self._arrivals.pop(index, None)

    @property
    def gathering(self) -> bool:
        """Whether parameters are on their way."""
        return bool(self._arrivals)

    def wait(self) -> None:
        """Waits for all parameters that are on their way."""
        for arrival in list(self._arrivals.values()):
            arrival.wait()

    # -- optimizers ----------------------------------------------------------------------------------

    def shard(self, optimizer: Optimizer, with_masters: bool) -> ShardedParams:
        """Makes an optimizer a sharded one.

        Raises:
            TypeError: If it is no torch optimizer, but a wrapper around one.
            ValueError: If it is not known to be element-wise, or steps on another wrapper's parameters too.
        """
        if isinstance(optimizer, Optimizer) and sharded_params(optimizer) is not None:
            raise ValueError(
                f"expected an optimizer over the parameters of one BucketDDP with shard_optimizer=True, found a "
                f"{type(optimizer).__name__} that is sharded by another one. Give each its own, or close() the other"
            )
        sharded = self._optimizers[optimizer] = ShardedParams(optimizer, self, with_masters)
        self._number_of[optimizer] = self._sharded_ever
        self._sharded_ever += 1
        return sharded

    def optimizers(self) -> list[Optimizer]:
        """The sharded optimizers that somebody still holds."""
        return list(self._optimizers)

    def sharded(self, optimizer: Optimizer) -> ShardedParams | None:
        """What makes an optimizer a sharded one; None if it is not."""
        return self._optimizers.get(optimizer)

    # -- layout --------------------------------------------------------------------------------------

    def _lay_out(self, layout: Layout) -> None:
        known, self._slot_of = self._slot_of, {id(param): slot for slot, param in enumerate(self._slots.params)}
        if layout == self._buffers.layout:
            return
        self._buffers.lay_out(layout, self._slots.params)
        self._devices = [flat.device for flat in self._buffers.flats]
        for optimizer, sharded in self._optimizers.items():
            sharded.forget_memory()
            for param in params_of(optimizer):
                if id(param) not in known:  # unfrozen, perhaps after its state was loaded
                    sharded.take_in(optimizer, param)

    def _before_layout(self, layout: Layout) -> None:
        """Buckets are about to change: what optimizers know of their parts has to move to other ranks."""
        if layout == self._buffers.layout:
            return
        self.wait()
        self._require_same_updates()
        parts = parts_of(layout, self._groups.shards, self._groups.index)
        for optimizer in self._known_everywhere():
            sharded = self._optimizers[optimizer]
            for param, state, master in self.whole_state(optimizer):
                slot = self._slot_of[id(param)]
                spec, part = self._slots.specs[slot], parts[slot]
                optimizer.state.pop(param, None)
                own, master = part_of_whole(spec, part, state or None, master)
                if own is not None:
                    optimizer.state[param] = own
                sharded.set_master(param, master)

    def _known_everywhere(self) -> list[Optimizer]:
        """The optimizers that nobody has dropped on any rank, in the order in which they were sharded."""
        mine = {number: optimizer for optimizer, number in self._number_of.items()}
        everywhere = set.intersection(*map(set, self._exchange(list(mine))))
        return [mine[number] for number in sorted(everywhere)]

    def _exchange(self, mine: list[int]) -> list[list[int]]:
        with self._peers.waiting_for("what is laid out anew", Phase.ROOT):
            return self._collectives.exchange_objects(mine, self._peers.poll)

    def _gather_gradients(self, flat: Tensor) -> None:
        with self._peers.waiting_for("(gathering) the gradients of earlier passes", Phase.ROOT):
            self._groups.inside.all_gather_shards(flat).wait(self._peers.poll)

    def _require_same_updates(self) -> None:
        """Requires that all ranks know the same optimizers, whose state is about to move."""
        mine = torch.tensor([self._peers.position.update, self._peers.here.updated], device=self._runs.device)
        with self._peers.waiting_for("what ranks have stepped on", Phase.ROOT):
            gathered, pending = self._collectives.all_gather(mine)
            pending.wait(self._peers.poll)
            self._peers.here.require_same_updates(gathered.tolist())

    # -- whole state ---------------------------------------------------------------------------------

    def whole_state(
        self, optimizer: Optimizer, keep: Callable[[Tensor], Tensor] | None = lambda tensor: tensor
    ) -> Iterator[tuple[Tensor, dict[str, Any], Tensor | None]]:
        """Each sharded parameter's whole state and master, put together from all ranks' parts, a bucket at a time.

        All ranks must call this, and go through to the end.

        Args:
            optimizer: A sharded optimizer.
            keep: Given each whole tensor, which is valid until the next bucket comes; gives what is to be returned of
                it. None if this rank only helps the others; states are empty then.
        """
        sharded = self.sharded(optimizer)
        assert sharded is not None
        params = [param for param in params_of(optimizer) if id(param) in self._slot_of]
        described = self._described(optimizer, sharded, params)
        by_bucket: dict[int, list[int]] = {}
        for at, param in enumerate(params):
            by_bucket.setdefault(self._runs.parts[self._slot_of[id(param)]].bucket, []).append(at)
        for index in sorted(by_bucket):
            members = [at for at in by_bucket[index] if described[at] is not None]
            whole: dict[int, dict[str, Tensor]] = {at: {} for at in members}
            keys = sorted({(key, dtype) for at in members for key, dtype in described[at].dtypes.items()}, key=repr)
            if any(described[at].master for at in members):
                keys.append((STATE_DICT_KEY, torch.float32))
            for key, dtype in keys:
                having = [
                    at
                    for at in members
                    if (described[at].master if key == STATE_DICT_KEY else described[at].dtypes.get(key) is dtype)
                ]
                for at, tensor in self._gathered(optimizer, sharded, index, key, dtype, having, params):
                    if keep is not None:
                        whole[at][key] = keep(tensor)
            for at in members:
                master = whole[at].pop(STATE_DICT_KEY, None)
                yield params[at], ({**described[at].others, **whole[at]} if keep is not None else {}), master

    def _described(
        self, optimizer: Optimizer, sharded: ShardedParams, params: Sequence[Tensor]
    ) -> list[_Described | Any]:
        """Per parameter, what the ranks that have a part of it know of its state; None if there is none."""
        mine: list[_Described | None] = []
        for param in params:
            state = optimizer.state.get(param)
            master = sharded.master(param)
            if not state and master is None:
                mine.append(None)
                continue
            part = self._runs.parts[self._slot_of[id(param)]]
            numel = part.stop - part.start
            tensors = {
                key: value
                for key, value in (state or {}).items()
                if isinstance(value, Tensor) and key != "step" and value.shape == (numel,)
            }
            others = {
                key: value.detach().cpu() if isinstance(value, Tensor) else value
                for key, value in (state or {}).items()
                if key not in tensors
            }
            dtypes = {key: value.dtype for key, value in tensors.items()}
            mine.append(_Described(dtypes, others, master is not None))
        found: list[_Described | None] = [None] * len(params)
        with self._peers.waiting_for("(gathering) what is in the optimizer's state"):
            everyone = self._collectives.exchange_objects(mine, self._peers.poll)
        for of_rank in everyone:
            for at, it in enumerate(of_rank):
                found[at] = found[at] or it
        return found

    def _gathered(
        self,
        optimizer: Optimizer,
        sharded: ShardedParams,
        index: int,
        key: str,
        dtype: torch.dtype,
        having: Sequence[int],
        params: Sequence[Tensor],
    ) -> Iterator[tuple[int, Tensor]]:
        """One tensor of the state of some parameters of one bucket, whole."""
        bucket = self._runs.layout.buckets[index]
        flat = torch.zeros(bucket.numel, dtype=dtype, device=self._devices[index])
        for at in having:
            part = self._runs.parts[self._slot_of[id(params[at])]]
            if part.empty:
                continue
            value = sharded.master(params[at]) if key == STATE_DICT_KEY else optimizer.state[params[at]][key]
            assert value is not None
            flat[part.at : part.at + part.stop - part.start].copy_(value)
        with self._peers.waiting_for(f"(gathering) the optimizer's state {key!r}"):
            self._groups.inside.all_gather_shards(flat).wait(self._peers.poll)
        for at in having:
            slot = self._slot_of[id(params[at])]
            place = self._runs.layout.slots[slot]
            begin = place.offset - bucket.start
            yield at, in_shape(flat[begin : begin + place.spec.numel], place.spec)

    # -- gradients -----------------------------------------------------------------------------------

    def sharded_grads(self, params: Iterable[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of gradients, and gradients that are whole on every rank."""
        chosen = self._slots.all_params if params is None else list(params)
        parts: list[Tensor] = []
        whole: list[Tensor] = []
        for param in chosen:
            slot = self._slot_of.get(id(param))
            if slot is not None and self._runs.is_sharded(slot):
                parts.append(self._runs.part(slot))
            elif param.grad is not None:
                whole.append(param.grad)
        return parts, whole

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0, params: Iterable[Tensor] | None = None) -> Tensor:
        """The norm of all gradients together, as one vector. All ranks must call this.

        Args:
            norm_type: Which; ``inf`` for the largest absolute value.
            params: Whose gradients; the module's if None.
        """
        parts, whole = self.sharded_grads(params)
        device = self._slots.all_params[0].device
        largest = norm_type == float("inf")

        def together(tensors: list[Tensor]) -> Tensor:
            tensors = [tensor for tensor in tensors if tensor.numel()]
            if not tensors:
                return torch.zeros((), device=device)
            norms = torch.stack([n.to(device, torch.float32) for n in torch._foreach_norm(tensors, norm_type)])
            return norms.amax() if largest else norms.pow(norm_type).sum()

        mine = together(parts).reshape(1)
        with self._peers.waiting_for("the norm of the gradients"):
            gathered, pending = self._groups.inside.all_gather(mine)
            pending.wait(self._peers.poll)
        both = [gathered.amax() if largest else gathered.sum(), together(whole)]
        return torch.stack(both).amax() if largest else torch.stack(both).sum().pow(1.0 / norm_type)

    def full_grad(self, param: Tensor) -> Tensor | None:
        """A copy of a parameter's whole gradient. All ranks must call this; None if there is no gradient."""
        slot = self._slot_of.get(id(param))
        mine = slot is not None and self._runs.is_sharded(slot)
        if slot is None or not any(flag for (flag,) in self._exchange([int(mine)])):  # not by what this rank has alone
            return None if param.grad is None else param.grad.detach().clone()
        part = self._runs.parts[slot]
        bucket = self._runs.layout.buckets[part.bucket]
        whole = self._runs.part(slot)
        flat = torch.zeros(bucket.numel, dtype=whole.dtype, device=whole.device)
        if mine:
            flat[part.at : part.at + part.stop - part.start].copy_(whole)
        with self._peers.waiting_for(f"(gathering) the gradient of {self._slots.specs[slot].name!r}"):
            self._groups.inside.all_gather_shards(flat).wait(self._peers.poll)
        place = self._runs.layout.slots[slot]
        begin = place.offset - bucket.start
        return in_shape(flat[begin : begin + place.spec.numel], place.spec).clone()

    def close(self) -> None:
        """Ends it; parameters get memory of their own. Sends nothing, but waits for what is on its way.

        :meth:`whole_state` still works, for optimizers that are not used any more.
        """
        try:
            if not self._peers.message:
                self.wait()
                self._groups.gathering.end()
        except Exception as error:  # of ranks that have failed; who closes is told by other means
            _log.warning("rank %d: parameters are not those of the last step: %s", self._collectives.rank, error)
        for arrival in list(self._arrivals.values()):
            arrival.forget()
        self._arrivals.clear()
        for sharded in list(self._optimizers.values()):
            sharded.close()
        self._buffers.release(self._slots.params)
