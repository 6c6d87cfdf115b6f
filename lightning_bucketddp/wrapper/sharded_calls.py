"""What callers of a ``BucketDDP`` use instead of looking at gradients and optimizers that are sharded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.optim.state_dicts import SHARD_KEY, STATE_DICT_KEY, params_of

if TYPE_CHECKING:
    from lightning_bucketddp.comm.collectives import Collectives
    from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint
    from lightning_bucketddp.optim.sharding import Sharding


class ShardedCalls:
    """Norms, clipping and state that are right whether or not the optimizer is sharded; for ``BucketDDP``."""

    _collectives: Collectives
    _sharding: Sharding | None
    module: nn.Module

    def prepare_optimizer(self, optimizer: Optimizer) -> Any:
        """See the class that has it."""
        raise NotImplementedError

    def wait_for_parameters(self) -> None:
        """Waits for parameters whose new values are still on their way, with ``shard_optimizer``.

        Whatever goes by torch's functions waits by itself. Call this before a captured CUDA graph is replayed or
        memory is read past torch.
        """
        sharding = self.__dict__.get("_sharding")
        if sharding is not None:
            sharding.wait()

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """The norm of all gradients together, as if they were one vector. All ranks must call this.

        Args:
            norm_type: Which; ``inf`` for the largest absolute value.
            parameters: Whose gradients; the module's if None.

        Returns:
            An fp32 tensor without a dimension, the same on every rank.
        """
        if self._sharding is not None:
            return self._sharding.grad_norm(norm_type, parameters)
        chosen = list(self.module.parameters() if parameters is None else parameters)
        grads = [param.grad for param in chosen if param.grad is not None]
        return nn.utils.get_total_norm(grads, norm_type).float()

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: Iterable[Tensor] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scales gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

        All ranks must call this.

        Args:
            max_norm: The largest norm.
            norm_type: As for :meth:`grad_norm`.
            parameters: As for :meth:`grad_norm`.
            error_if_nonfinite: Whether to raise if the norm is NaN or infinite.

        Returns:
            The norm before.

        Raises:
            RuntimeError: If the norm is not finite, if that was asked for.
        """
        chosen = list(self.module.parameters() if parameters is None else parameters)
        norm = self.grad_norm(norm_type, chosen)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"expected gradients of a finite norm of order {norm_type}, found {norm.item()}; to scale by it all "
                "the same, set error_if_nonfinite=False"
            )
        if self._sharding is None:
            nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
            return norm
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        parts, whole = self._sharding.sharded_grads(chosen)
        for grad in [*parts, *whole]:
            grad.mul_(factor.to(grad.device))
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float, parameters: Iterable[Tensor] | None = None) -> None:
        """Clamps gradients to ``[-clip_value, clip_value]``, as ``torch.nn.utils.clip_grad_value_`` does."""
        chosen = list(self.module.parameters() if parameters is None else parameters)
        if self._sharding is None:
            nn.utils.clip_grad_value_(chosen, clip_value)
            return
        parts, whole = self._sharding.sharded_grads(chosen)
        for grad in [*parts, *whole]:
            grad.clamp_(-clip_value, clip_value)

    @torch.no_grad()
    def full_grad(self, param: Tensor) -> Tensor | None:
        """A copy of a parameter's whole gradient; None if it has none. All ranks must call this."""
        if self._sharding is not None:
            return self._sharding.full_grad(param)
        return None if param.grad is None else param.grad.detach().clone()

    @torch.no_grad()
    def optimizer_state_dict(self, optimizer: Optimizer, *, every_rank: bool = False) -> dict[str, Any] | None:
        """An optimizer's whole state, with the keys and shapes that ``optimizer.state_dict()`` has in one process.

        Put together on the CPU, bucket by bucket. All ranks must call this, which they may after :meth:`close` too. It
        loads into the same optimizer over the same module at any world size, sharded or not. Unlike torch's it is a
        copy.

        Args:
            optimizer: An optimizer that holds parameters of the module.
            every_rank: Whether every rank gets it.

        Returns:
            None on ranks other than 0, unless they were to get it too.
        """
        sharding = self._sharding
        if sharding is None or (sharding.sharded(optimizer) is None and not self._holds_sharded(optimizer)):
            return optimizer.state_dict() if every_rank or self.rank == 0 else None
        self.prepare_optimizer(optimizer)
        mine = every_rank or self.rank == 0
        packed = optimizer.state_dict()
        packed.pop(SHARD_KEY, None)
        index_of = {id(param): index for index, param in enumerate(params_of(optimizer))}
        state = dict(packed["state"])
        masters = dict(packed.pop(STATE_DICT_KEY, {}))
        for param, whole, master in sharding.whole_state(optimizer, _on_cpu if mine else None):
            index = index_of[id(param)]
            if whole:
                state[index] = whole
            if master is not None:
                masters[index] = master
        if not mine:
            return None
        packed["state"] = dict(sorted(state.items()))
        if masters:
            packed[STATE_DICT_KEY] = dict(sorted(masters.items()))
        return packed

    def _holds_sharded(self, optimizer: Optimizer) -> bool:
        assert self._sharding is not None
        return any(self._sharding.find(param) is not None for param in params_of(optimizer))

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads an optimizer's whole state, as :meth:`optimizer_state_dict` or any strategy's checkpoint has it.

        Each rank keeps what belongs to its shard, and moves that alone to the device.

        Args:
            optimizer: An optimizer that holds parameters of the module.
            state_dict: The same on every rank.
        """
        self.prepare_optimizer(optimizer)
        optimizer.load_state_dict(dict(state_dict))

    def save_sharded(
        self,
        path: str | os.PathLike[str],
        optimizers: Sequence[Optimizer] = (),
        *,
        extra: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Saves the module and its optimizers into a directory, each rank its own parts, and no rank the whole.

        All ranks must call this; an error on one is an error on all. In the format of ``torch.distributed.checkpoint``,
        with the names and shapes that tensors have in one process: torch's ``dcp_to_torch_save`` makes one file of it.
        Module buffers are saved as rank 0 has them, fp32 masters under a key of their own.

        Args:
            path: The directory, on a file system that all ranks share. It comes into being when everything has been
                written; until then it is called ``<path>.partial``.
            optimizers: Optimizers of the module, in the order in which they will be loaded.
            extra: Whatever is to be saved with them; rank 0's, pickled.
            overwrite: Whether what is at ``path`` is replaced.

        Raises:
            FileExistsError: If there is something at ``path``, unless it is to be replaced.
            ValueError: If an optimizer holds parameters that are not the module's.
            RuntimeError: If anything else went wrong on some rank; says where and what.
        """
        self.sharded_checkpoint().save(Path(path), optimizers, extra, overwrite)

    def load_sharded(
        self, path: str | os.PathLike[str], optimizers: Sequence[Optimizer] = (), *, strict: bool = True
    ) -> dict[str, Any]:
        """Loads what :meth:`save_sharded` has saved, at this or any other world size, sharded or not.

        All ranks must call this; an error on one is an error on all. Each rank reads what overlaps with its own parts;
        parameters are then gathered. Names and shapes are compared before anything is read; an error while reading
        leaves the module half-way between what it was and what was to be loaded.

        Args:
            path: The directory.
            optimizers: As many as were saved, with the same parameters in the same groups; none to load the module
                alone.
            strict: Whether the module must have just the names that were saved.

        Returns:
            What was saved as ``extra``; empty if nothing was. Unpickled, so load only what can be trusted.

        Raises:
            ValueError: If names, shapes or parameter groups differ; names the first.
            RuntimeError: If anything else went wrong on some rank; says where and what.
        """
        if self.closed:
            raise RuntimeError("expected an open BucketDDP, found one after close(); load before that")
        return self.sharded_checkpoint().load(Path(path), optimizers, strict)

    def sharded_checkpoint(self) -> ShardedCheckpoint:
        """What saves and loads the module and its optimizers in parts."""
        # Not imported before it is needed: torch.distributed.checkpoint takes as long as the rest of this package.
        from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint

        return ShardedCheckpoint(self.module, self._collectives, self._sharding, self.prepare_optimizer)

    @property
    def closed(self) -> bool:
        """See the class that has it."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This process's rank among those that train together."""
        raise NotImplementedError


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
