"""What optimizers step on, and what callers use instead of looking at gradients and states that are sharded."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.sharding import Sharding
from lightning_bucketddp.optim.state_dicts import SHARD_KEY, STATE_DICT_KEY, params_of
from lightning_bucketddp.optim.swap import Swap, holders_of_masters, master_params, prepare_at_first_step
from lightning_bucketddp.peers.agreement import WrapError
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.wrapper.module_params import ModuleParams

if TYPE_CHECKING:
    from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint


class Optimizers:
    """Shards and masters for the optimizers of a module; norms, clipping and state that are right with or without.

    Args:
        params: The module and its parameters.
        passes: The module's passes.
        collectives: The group.
        options: What was asked for.

    Attributes:
        sharding: What knows of the shards; None without ``shard_optimizer``.
    """

    def __init__(self, params: ModuleParams, passes: Passes, collectives: Collectives, options: Options) -> None:
        self._params, self._passes, self._collectives = params, passes, collectives
        self._with_masters = bool(options.master_params)
        self.sharding: Sharding | None = None
        if options.shard_optimizer:
            reducer = passes.reducer
            assert isinstance(reducer.storage, Sharded)
            self.sharding = Sharding(reducer.table, reducer.storage, collectives, passes.peers)

    def prepare(self, optimizer: Optimizer) -> Swap | None:
        """Have an optimizer step on fp32 masters, or on this rank's shard, from now on; None if on neither."""
        self._params.optimizers.add(optimizer)
        if self.sharding is not None:
            return self.sharding.sharded(optimizer) or self.sharding.shard(optimizer, self._with_masters)
        return master_params(optimizer) if self._with_masters else None

    def prepare_at_first_step(self) -> RemovableHandle | None:
        """Prepare every optimizer that steps on some of the parameters, in its first step if it was not before.

        Returns:
            What ends it; None if there is nothing to prepare.
        """
        if (sharding := self.sharding) is not None:
            return prepare_at_first_step(lambda: sharding.params.slot_of, self.prepare)
        return prepare_at_first_step(self._passes.upkeep.trains, self.prepare) if self._with_masters else None

    def require_none(self) -> None:
        """Require that no optimizer steps on shards or masters of the parameters.

        Raises:
            WrapError: If one does.
        """
        holders = holders_of_masters(self._passes.upkeep.trains()) + (
            self.sharding.optimizers() if self.sharding else []
        )
        if holders:
            raise WrapError(
                f"expected a module that can be wrapped again, found an open BucketDDP around it and an "
                f"{type(holders[0]).__name__} with shards or fp32 masters of its parameters; close() that wrapper first"
            )

    # -- gradients -------------------------------------------------------------------------------------

    def _chosen(self, params: Iterable[Tensor] | None) -> list[Tensor]:
        return list(self._params.module.parameters() if params is None else params)

    @torch.no_grad()
    def grad_norm(self, norm_type: float, params: Iterable[Tensor] | None) -> Tensor:
        """The norm of the gradients of some parameters, of all if None, as if they were one vector."""
        if self.sharding is not None:
            return self.sharding.grad_norm(norm_type, params)
        grads = [param.grad for param in self._chosen(params) if param.grad is not None]
        return nn.utils.get_total_norm(grads, norm_type).float()

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, norm_type: float, params: Iterable[Tensor] | None, error_if_nonfinite: bool
    ) -> Tensor:
        """Scale gradients so that their norm is at most ``max_norm``; return the norm before."""
        chosen = self._chosen(params)
        norm = self.grad_norm(norm_type, chosen)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"expected gradients of a finite norm of order {norm_type}, found {norm.item()}; to scale by it all "
                "the same, set error_if_nonfinite=False"
            )
        if self.sharding is None:
            nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
            return norm
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in chain(*self.sharding.sharded_grads(chosen)):
            grad.mul_(factor.to(grad.device))
        return norm

    @torch.no_grad()
    def clip_grad_value(self, clip_value: float, params: Iterable[Tensor] | None) -> None:
        """Clamp gradients to ``[-clip_value, clip_value]``."""
        if self.sharding is None:
            nn.utils.clip_grad_value_(self._chosen(params), clip_value)
            return
        for grad in chain(*self.sharding.sharded_grads(self._chosen(params))):
            grad.clamp_(-clip_value, clip_value)

    @torch.no_grad()
    def full_grad(self, param: Tensor) -> Tensor | None:
        """A copy of a parameter's whole gradient; None if it has none."""
        if self.sharding is not None:
            return self.sharding.full_grad(param)
        return None if param.grad is None else param.grad.detach().clone()

    # -- state -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, optimizer: Optimizer, mine: bool) -> dict[str, Any] | None:
        """An optimizer's whole state, put together on the CPU bucket by bucket.

        Args:
            optimizer: The optimizer.
            mine: Whether this rank gets the state; otherwise it only helps the others.

        Returns:
            None on ranks that only help.
        """
        if not self._is_sharded(optimizer):
            return optimizer.state_dict() if mine else None
        self.prepare(optimizer)
        packed = optimizer.state_dict()
        packed.pop(SHARD_KEY, None)
        index_of = {id(param): index for index, param in enumerate(params_of(optimizer))}
        state, masters = dict(packed["state"]), dict(packed.pop(STATE_DICT_KEY, {}))
        assert self.sharding is not None
        for param, whole, master in self.sharding.whole_state(optimizer, _on_cpu if mine else None):
            index = index_of[id(param)]
            if whole:
                state[index] = whole
            if master is not None:
                masters[index] = master
        packed["state"] = dict(sorted(state.items()))
        if masters:
            packed[STATE_DICT_KEY] = dict(sorted(masters.items()))
        return packed if mine else None

    def _is_sharded(self, optimizer: Optimizer) -> bool:
        if self.sharding is None:
            return False
        find, params = self.sharding.params.find, params_of(optimizer)
        return self.sharding.sharded(optimizer) is not None or any(find(param) is not None for param in params)

    def checkpoint(self) -> ShardedCheckpoint:
        """What saves and loads the module and its optimizers in parts."""
        # Not imported before it is needed: torch.distributed.checkpoint takes as long as the rest of this package.
        from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint

        return ShardedCheckpoint(self._params.module, self._collectives, self.sharding, self.prepare)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
