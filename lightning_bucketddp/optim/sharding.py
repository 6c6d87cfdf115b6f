"""Sharded optimizers: who has which part, whose state moves when buckets are laid out anew, norms of gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.layout.shards import parts_of
from lightning_bucketddp.optim.element_wise import require_element_wise
from lightning_bucketddp.optim.parts import ParamPart
from lightning_bucketddp.optim.sharded_params import ShardedParams
from lightning_bucketddp.optim.state_dicts import STATE_DICT_KEY, params_of
from lightning_bucketddp.optim.swap import Swap, swap_of
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.diagnose import LOOK_FOR_STEPS
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase

_log = logging.getLogger("lightning_bucketddp")

_Described = tuple[dict[str, torch.dtype], dict[str, Any]]
"""What a rank has of one parameter's state: the dtypes of its tensors with a value per element, and everything else."""


class Sharding:
    """The optimizers that step on shards of a module's parameters. Observes the gradients' buckets.

    Args:
        slots: The slots.
        storage: Where gradients lie.
        collectives: The group of all ranks that train together.
        peers: The other ranks.

    Attributes:
        params: The parameters.
    """

    def __init__(self, slots: SlotTable, storage: Sharded, collectives: Collectives, peers: Peers) -> None:
        self._slots = slots
        self._storage = storage
        self._collectives = collectives
        self._peers = peers
        self.params = ShardedParams(slots, storage, collectives, peers)
        # By optimizer, how many were sharded before it, and its swap, which is closed when training has ended.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, Swap]] = weakref.WeakKeyDictionary()
        self._sharded_ever = 0
        weakref.finalize(self, storage.groups.end).atexit = False
        storage.observe(self)

    # -- optimizers ----------------------------------------------------------------------------------

    def shard(self, optimizer: Optimizer, with_masters: bool) -> Swap:
        """Make an optimizer a sharded one.

        Raises:
            TypeError: If it is no torch optimizer, but a wrapper around one.
            ValueError: If it is not known to be element-wise, or steps on another wrapper's parameters too.
        """
        require_element_wise(optimizer)
        if swap_of(optimizer) is not None:
            raise ValueError(
                f"expected an optimizer over the parameters of one BucketDDP with shard_optimizer=True, found a "
                f"{type(optimizer).__name__} that is sharded by another one, or has whole master parameters. Give each "
                "its own, or close() the other"
            )
        swap = Swap(optimizer, self.params, with_masters)
        self._optimizers[optimizer] = self._sharded_ever, swap
        self._sharded_ever += 1
        return swap

    def optimizers(self) -> list[Optimizer]:
        """The sharded optimizers that somebody still holds."""
        return list(self._optimizers)

    def sharded(self, optimizer: Optimizer) -> Swap | None:
        """What makes an optimizer a sharded one; None if it is not."""
        known = self._optimizers.get(optimizer)
        return None if known is None else known[1]

    def look_for_raised_steps(self) -> None:
        """Find steps that raised, of optimizers that somebody goes on with."""
        for _, swap in list(self._optimizers.values()):
            swap.restore()

    def whole_state(
        self, optimizer: Optimizer, keep: Callable[[Tensor], Tensor] | None = lambda tensor: tensor
    ) -> Iterator[tuple[Tensor, dict[str, Any], Tensor | None]]:
        """Each sharded parameter's whole state and master, put together from all ranks' parts, a bucket at a time.

        All ranks must call this, and go through to the end. They may after :meth:`close`, for optimizers that are not
        used any more.

        Args:
            optimizer: A sharded optimizer.
            keep: Given each whole tensor, which is valid until the next bucket comes; gives what is to be returned of
                it. None if this rank only helps the others; states are empty then.
        """
        swap = self._optimizers[optimizer][1]
        found = {param: part for param in params_of(optimizer) if (part := self.params.find(param)) is not None}
        described = self._described(optimizer, swap, found)
        for bucket in sorted({part.part.bucket for part in found.values()}):
            numel = self._storage.layout.buckets[bucket].numel
            members = {param: it for param, it in described.items() if found[param].part.bucket == bucket}
            held = {
                param: _per_element(found[param], optimizer.state.get(param, {}), swap.master(param))
                for param in members
            }
            whole: dict[Tensor, dict[str, Tensor]] = {param: {} for param in members}
            # In any order that is the same on all ranks.
            for key, dtype in sorted({item for dtypes, _ in members.values() for item in dtypes.items()}, key=repr):
                having = [param for param, (dtypes, _) in members.items() if dtypes.get(key) is dtype]
                mine = [(found[param], held[param].get(key)) for param in having]
                flat = torch.zeros(numel, dtype=dtype, device=having[0].device)
                self._gather_parts(flat, mine, f"the optimizer's state {key!r}")
                if keep is not None:
                    for param in having:
                        whole[param][key] = keep(found[param].whole_in_bucket(flat))
            for param, (_, others) in members.items():
                master = whole[param].pop(STATE_DICT_KEY, None)
                yield param, {} if keep is None else {**others, **whole[param]}, master

    def _described(
        self, optimizer: Optimizer, swap: Swap, found: Mapping[Tensor, ParamPart]
    ) -> dict[Tensor, _Described]:
        """What is known of each parameter's state, by the first rank that has a part of it."""
        mine: list[_Described | None] = []
        for param, part in found.items():
            state = optimizer.state.get(param, {})
            tensors = _per_element(part, state, swap.master(param))
            others = {
                key: value.detach().cpu() if isinstance(value, Tensor) else value
                for key, value in state.items()
                if key not in tensors
            }
            dtypes = {key: value.dtype for key, value in tensors.items()}
            mine.append((dtypes, others) if state or tensors else None)
        with self._peers.waiting_for("(gathering) what is in the optimizer's state"):
            everyone = self._collectives.exchange_objects(mine, self._peers.poll)
        first = [next(filter(None, by_rank), None) for by_rank in zip(*everyone, strict=True)]
        return {param: it for param, it in zip(found, first, strict=True) if it is not None}

    def _gather_parts(self, flat: Tensor, mine: Iterable[tuple[ParamPart, Tensor | None]], what: str) -> None:
        """Fill a tensor like one bucket with all ranks' parts of some parameters.

        Args:
            flat: The tensor, of zeros.
            mine: This rank's parts, and their values if there are any.
            what: What is gathered, for messages.
        """
        for part, value in mine:
            if value is not None:
                part.in_bucket(flat).copy_(value)
        with self._peers.waiting_for(f"(gathering) {what}"):
            self._storage.groups.inside.all_gather_shards(flat).wait(self._peers.poll)

    # -- gradients -----------------------------------------------------------------------------------

    def sharded_grads(self, params: Iterable[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of gradients, and gradients that are whole on every rank."""
        parts: list[Tensor] = []
        whole: list[Tensor] = []
        for param in self._slots.all_params if params is None else params:
            if (part := self.params.sharded_grad(param)) is not None:
                parts.append(part)
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
        device = self._slots.all_params[0].device

        def norm_of(tensors: Iterable[Tensor]) -> Tensor:
            tensors = [tensor for tensor in tensors if tensor.numel()]
            norms = torch._foreach_norm(tensors, norm_type) if tensors else [torch.zeros(())]
            together = torch.stack([norm.to(device, torch.float32) for norm in norms])
            return torch.linalg.vector_norm(together, norm_type)  # the norm of norms is the norm of all

        parts, whole = self.sharded_grads(params)
        with self._peers.waiting_for("the norm of the gradients"):
            of_parts, pending = self._storage.groups.inside.all_gather(norm_of(parts))
            pending.wait(self._peers.poll)
        return norm_of([of_parts, norm_of(whole)])

    def full_grad(self, param: Tensor) -> Tensor | None:
        """A copy of a parameter's whole gradient. All ranks must call this; None if there is no gradient."""
        found = self.params.find(param)
        mine = self.params.sharded_grad(param)
        # Not by what this rank has alone.
        if found is None or not any(flag for (flag,) in self.exchange([int(mine is not None)])):
            return None if param.grad is None else param.grad.detach().clone()
        numel = self._storage.layout.buckets[found.part.bucket].numel
        flat = torch.zeros(numel, dtype=found.spec.dtype, device=param.device)
        self._gather_parts(flat, [(found, mine)], f"the gradient of {found.spec.name!r}")
        return found.whole_in_bucket(flat).clone()

    # -- layout: called by the gradients' buckets ----------------------------------------------------

    def before_layout(self, layout: Layout) -> None:
        """Buckets are about to be laid out anew: move what optimizers know of their parts to other ranks."""
        if layout == self._storage.layout:
            return
        self.params.wait()
        self._require_same_updates()
        mine = {number: optimizer for optimizer, (number, _) in self._optimizers.items()}
        known_everywhere = set.intersection(*map(set, self.exchange(list(mine))))  # dropped by nobody
        parts = parts_of(layout, self._storage.groups.shards, self._storage.groups.index)
        for number in sorted(known_everywhere):
            optimizer, swap = mine[number], self._optimizers[mine[number]][1]
            for param, state, master in self.whole_state(optimizer):
                slot = self.params.slot_of[id(param)]
                found = ParamPart(self._slots.specs[slot], parts[slot])
                swap.dicts.put_part(optimizer, param, found, state or None, master)

    def _require_same_updates(self) -> None:
        at = self._peers.position
        updates = torch.tensor([at.update, self._peers.here.updated], device=self._slots.all_params[0].device)
        with self._peers.waiting_for("what ranks have stepped on", Phase.ROOT):
            gathered, pending = self._collectives.all_gather(updates)
            pending.wait(self._peers.poll)
            everyone = gathered.tolist()
            other = next((rank for rank, it in enumerate(everyone) if it != everyone[0]), None)
            if other is not None:
                raise RankMismatchError(
                    f"rank {self._peers.rank}: ranks come to pass {at.pass_number} after different optimizer steps, "
                    f"rank 0 after {everyone[0][0]} and rank {other} after {everyone[other][0]}: {LOOK_FOR_STEPS}"
                )

    def on_layout(self, layout: Layout) -> None:
        """Buckets have been laid out anew: the parameters follow their gradients."""
        new = self.params.lay_out(layout)
        if new is None:
            return
        for optimizer, (_, swap) in self._optimizers.items():
            swap.stepped.forget_memory()
            for param in new:  # unfrozen, perhaps after its state was loaded
                swap.dicts.take_in(optimizer, param)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's list of numbers, by rank."""
        with self._peers.waiting_for("what is laid out anew", Phase.ROOT):
            return self._collectives.exchange_objects(numbers, self._peers.poll)

    def close(self) -> None:
        """End it; parameters get memory of their own. Sends nothing, but waits for what is on its way."""
        try:
            if not self._peers.message:
                self.params.wait()
                self._storage.groups.gathering.end()
        except Exception as error:  # of ranks that have failed; who closes is told by other means
            _log.warning("rank %d: parameters are not those of the last step: %s", self._collectives.rank, error)
        for _, swap in list(self._optimizers.values()):
            swap.close()
        self.params.release()


def _per_element(found: ParamPart, state: Mapping[str, Any], master: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a part's state that have a value per element, the master among them."""
    tensors = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step" and value.shape == (found.numel,)
    }
    return tensors if master is None else {**tensors, STATE_DICT_KEY: master}
