"""The optimizers of a module: shards and masters, norms, clipping and whole state, sharded or not."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.devices import has_foreach
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.sharded_grad import ShardedGrad
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.optim.element_wise import (
    needs_one_dtype,
    needs_whole_parameters,
    require_optimizer,
    require_shardable,
)
from lightning_bucketddp.optim.parts import ParamPart, Parts
from lightning_bucketddp.optim.sharded_params import ShardedParams
from lightning_bucketddp.optim.stepped import SHARD_KEY, STATE_DICT_KEY, gets_master, params_of
from lightning_bucketddp.optim.swap import Swap, holders_of_masters, master_params, swap_of
from lightning_bucketddp.peers.agreement import WrapError
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.reducer.state import PassState

if TYPE_CHECKING:
    from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint


class Optimizers(Participant):
    """Gives a module's optimizers shards and masters, and answers for gradients and state that are sharded.

    With ``shard_optimizer`` it takes part in passes: when buckets are laid out anew, parameters move along.

    Args:
        module: The module.
        known: Set of optimizers; gets each one that was prepared.
        passes: The module's passes.
        ranks: The ranks.
        options: The options.

    Attributes:
        parts: This rank's part of each parameter.
    """

    def __init__(
        self, module: nn.Module, known: WeakSet[Optimizer], passes: Passes, ranks: Ranks, options: Options
    ) -> None:
        self._module, self._known, self._passes, self._ranks = module, known, passes, ranks
        self._with_masters, self._mixes_dtypes = bool(options.master_params), options.grad_dtype is not None
        self._sharded: WeakKeyDictionary[Optimizer, Swap] = WeakKeyDictionary()  # close() detaches swaps
        self._warned = False
        self._params: ShardedParams | None = None
        storage, planner = passes.reducer.storage, passes.reducer.planner
        if isinstance(storage, Sharded):
            self._params = ShardedParams(module, passes.reducer.table, storage, planner, ranks.peers)
            passes.wrapped.add(self)
        self.parts: Parts = self._params or Parts()

    def close(self) -> None:
        """Close the swaps and give parameters memory of their own. Sends nothing; waits for parameters on their way."""
        for swap in list(self._sharded.values()):
            swap.close()
        if self._params is not None:
            self._params.release()

    # -- shards and masters ----------------------------------------------------------------------------

    def prepare(self, optimizer: Optimizer) -> Swap | None:
        """Have an optimizer step on shards or masters from now on.

        Returns:
            Its swap, the same in every call; None without shards and masters, and if it has other parameters only.

        Raises:
            TypeError: If it is a wrapper around an optimizer.
            ValueError: If it refuses the dtype of the gradients. With shards, if it is not known to be element-wise, or
                has another swap.
        """
        require_optimizer(optimizer)
        if self._params is None and type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            inner: Any = optimizer
            return self.prepare(inner.optim)  # which steps, and has hooks of its own
        own = {id(param) for param in self._module.parameters()}
        if own.isdisjoint(map(id, params_of(optimizer))):
            return None
        if self._params is None:  # shards are given gradients of their own dtype
            self._require_takes_gradients(optimizer)
            self._known.add(optimizer)
            return master_params(optimizer) if self._with_masters else None
        if optimizer not in self._sharded:
            require_shardable(optimizer)
            if swap_of(optimizer) is not None:
                raise ValueError(
                    f"expected an optimizer over the parameters of one BucketDDP with shard_optimizer=True, found a "
                    f"{type(optimizer).__name__} that is sharded by another one, or has whole master parameters. Give "
                    "each its own, or close() the other"
                )
            if needs_whole_parameters(optimizer):
                self._passes.wrapped.keep_whole(params_of(optimizer))
            self._known.add(optimizer)
            self._sharded[optimizer] = Swap(optimizer, self._params, self._with_masters)
        return self._sharded[optimizer]

    def refresh_masters(self) -> None:
        """Let the masters of all known optimizers follow parameters that were changed through ``.data``."""
        for optimizer in self._known:
            if (swap := swap_of(optimizer)) is not None:
                swap.refresh()

    def _require_takes_gradients(self, optimizer: Optimizer) -> None:
        """Require an optimizer that takes the gradients' dtype.

        Raises:
            ValueError: If it refuses the gradient of a parameter without a master.
        """
        if not self._mixes_dtypes or not needs_one_dtype(optimizer):
            return
        names = {id(param): name for name, param in self._module.named_parameters()}
        for param in params_of(optimizer):
            mixed = param.requires_grad and param.grad_dtype not in (None, param.dtype)
            if mixed and id(param) in names and not gets_master(param, self._with_masters):
                kind = type(optimizer).__name__
                raise ValueError(
                    f"expected an optimizer that takes a {param.grad_dtype} gradient of a {param.dtype} parameter, as "
                    f"grad_dtype gives it to {names[id(param)]!r}, found {kind}, which takes its own dtype alone. "
                    "bf16 and fp16 parameters get masters with grad_dtype=torch.float32 and master_params=True; for "
                    "others leave grad_dtype out, have the parameters in that dtype, or use SGD that is not fused"
                )

    def follow_steps(self) -> list[RemovableHandle]:
        """Look at every step of these parameters, by torch's global hooks. Return handles that remove the hooks.

        Prepares optimizers in their first step. A state dict that is loaded *before* is loaded as torch does: in the
        parameters' dtype and without masters. Whoever resumes training must prepare the optimizer first.
        """

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # torch calls the optimizer's own hooks after the global ones, and so those that this adds.
            if optimizer not in self._known:
                own = self._passes.wrapped.trains() if self._params is None else self._params.part_of
                if any(id(param) in own for param in params_of(optimizer)):
                    self.prepare(optimizer)
            if optimizer in self._known and (swap := swap_of(optimizer)) is not None:
                swap.be_innermost(optimizer)

        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._warn_of_local_gradients(optimizer)
            check, own = self._passes.wrapped.context.ranks_check, self._passes.reducer.table.index_of
            if check is not None and any(id(param) in own for param in params_of(optimizer)):
                check.note_step(optimizer)

        # A closure has run backward only after the step.
        handles = [register_optimizer_step_post_hook(after)]
        if self._params is not None or self._with_masters or self._mixes_dtypes:
            handles.append(register_optimizer_step_pre_hook(before))
        return handles

    def _warn_of_local_gradients(self, optimizer: Optimizer) -> None:
        """Warn, once, if a step has ignored gradients of local passes, or has used those of this rank alone."""
        reducer, peers = self._passes.reducer, self._passes.peers
        pending, index_of = reducer.table.pending, reducer.table.index_of
        if not pending or self._warned or reducer.state is not PassState.IDLE:
            return
        if self._params is None and peers.world_size == 1:
            return
        local = [
            param
            for param in params_of(optimizer)
            if param.grad is not None
            and (index := index_of.get(id(param))) is not None
            and reducer.table.key(index) in pending
        ]
        if not local:
            return
        self._warned = True
        effect = "left them out" if isinstance(local[0].grad, ShardedGrad) else "used those of this rank alone"
        warnings.warn(
            f"rank {peers.rank}: expected averaged gradients where {type(optimizer).__name__} steps, found gradients "
            f"of passes inside no_sync() that nothing has averaged since, of {len(local)} parameter(s), the first "
            f"{reducer.table.names[index_of[id(local[0])]]!r}. The step has {effect}. Run the last backward before a "
            "step outside of no_sync(), or call allreduce_gradients() before the step. This warning is not repeated",
            stacklevel=4,
        )

    def require_none(self) -> None:
        """Require that no optimizer steps on shards or masters of the parameters.

        Raises:
            WrapError: If one does.
        """
        if holders := [*holders_of_masters(self._passes.wrapped.trains()), *self._sharded]:
            raise WrapError(
                f"expected a module that can be wrapped again, found an open BucketDDP around it and an "
                f"{type(holders[0]).__name__} with shards or fp32 masters of its parameters; close() that wrapper first"
            )

    def restore(self) -> None:
        """Give optimizers their parameters back if their last step raised."""
        for optimizer in list(self._known) if self._params is not None or self._with_masters else ():
            if (swap := swap_of(optimizer)) is not None:
                swap.restore()

    # -- gradients -------------------------------------------------------------------------------------

    def _chosen(self, params: Iterable[Tensor] | None) -> list[Tensor]:
        return list(self._module.parameters() if params is None else params)

    @torch.no_grad()
    def grad_norm(self, norm_type: float, params: Iterable[Tensor] | None) -> Tensor:
        """Return the norm of the gradients of some parameters, of all if None, as if they were one vector."""
        grads = [param.grad for param in self._chosen(params) if param.grad is not None]
        shards = [grad.own_part for grad in grads if isinstance(grad, ShardedGrad)]
        whole = [grad for grad in grads if not isinstance(grad, ShardedGrad)]
        exact = any(param.dtype in (torch.float64, torch.complex128) for param in self._module.parameters())
        nothing = torch.zeros((), device=next(self._module.parameters()).device)  # torch's own would be on the CPU
        norm = nn.utils.get_total_norm(whole or [nothing], norm_type).to(torch.float64 if exact else torch.float32)
        return norm if self._params is None else self._params.add_norm(norm, shards, norm_type)

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, norm_type: float, params: Iterable[Tensor] | None, error_if_nonfinite: bool
    ) -> Tensor:
        """Scale gradients so that their norm is at most ``max_norm``; return the norm before."""
        chosen = self._chosen(params)
        norm = nn.utils.get_total_norm([self.grad_norm(norm_type, chosen)], norm_type, error_if_nonfinite)
        nn.utils.clip_grads_with_norm_(chosen, max_norm, norm, self._all_at_once())
        return norm

    def _all_at_once(self) -> bool | None:
        """Whether torch is to change all gradients at once: by itself it does not with sharded ones."""
        if self._params is None:
            return None
        return has_foreach(next(self._module.parameters()).device)

    def clip_grad_value(self, clip_value: float, params: Iterable[Tensor] | None) -> None:
        """Clamp gradients to ``[-clip_value, clip_value]``."""
        nn.utils.clip_grad_value_(self._chosen(params), clip_value, self._all_at_once())

    @torch.no_grad()
    def full_grad(self, param: Tensor) -> Tensor | None:
        """Copy a parameter's whole gradient; None if it has none. All ranks must call this."""
        if self._params is not None and (found := self._params.find(param)) is not None:
            mine = param.grad.own_part if isinstance(param.grad, ShardedGrad) else None
            what = f"the gradient of {found.spec.name!r}"
            if any(self._ranks.objects(mine is not None, what)):  # ranks may differ
                flat = self._params.gather(found.part.bucket, found.spec.dtype, [(found, mine)], what)
                return found.whole_in_bucket(flat).clone()
        return None if param.grad is None else param.grad.detach().clone()

    # -- state -----------------------------------------------------------------------------------------

    def checkpoint(self) -> ShardedCheckpoint:
        """Make the object that saves and loads the module and its optimizers in parts."""
        # Imported late: torch.distributed.checkpoint takes as long to import as the rest of this package.
        from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint

        return ShardedCheckpoint(self._module, self._ranks, self.parts, self.prepare)

    @torch.no_grad()
    def state_dict(self, optimizer: Optimizer, mine: bool) -> dict[str, Any] | None:
        """Gather an optimizer's whole state on the CPU, bucket by bucket. All ranks must call this.

        Args:
            optimizer: The optimizer.
            mine: Whether this rank gets the state; otherwise it only helps the others.

        Returns:
            None on ranks that only help.
        """
        if all(self.parts.find(param) is None for param in params_of(optimizer)):
            return _on_cpu(optimizer.state_dict()) if mine else None
        self.prepare(optimizer)
        packed = optimizer.state_dict()
        packed.pop(SHARD_KEY, None)
        sharded = {index for index, param in enumerate(params_of(optimizer)) if self.parts.find(param) is not None}
        for key in packed.keys() & {"state", STATE_DICT_KEY}:
            packed[key] = {index: entries for index, entries in packed[key].items() if index not in sharded}
        packed = _on_cpu(packed)
        state, masters = packed["state"], packed.pop(STATE_DICT_KEY, {})
        for index, whole in self._whole_state(optimizer):
            if mine:
                state[index] = _on_cpu(whole)
        masters |= {index: entries.pop(STATE_DICT_KEY) for index, entries in state.items() if STATE_DICT_KEY in entries}
        packed["state"] = {index: entries for index, entries in sorted(state.items()) if entries}
        if masters:
            packed[STATE_DICT_KEY] = dict(sorted(masters.items()))
        return packed if mine else None

    def _whole_state(self, optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any]]]:
        """Gather the state of all ranks' parts of an optimizer's parameters, bucket by bucket.

        All ranks must call this and take all items. They may after :meth:`close`, if they no longer step.

        Yields:
            The index of a parameter in the optimizer, and its whole state with its master, as in
            :meth:`Stepped.entries`.
        """
        assert self._params is not None
        stepped, params = self._sharded[optimizer].stepped, list(params_of(optimizer))
        found = {index: part for index, param in enumerate(params) if (part := self._params.find(param)) is not None}
        described = self._described(found, {index: stepped.entries(optimizer, params[index]) for index in found})
        for bucket in sorted({part.part.bucket for part in found.values()}):
            whole = {index: dict(entries) for index, entries in described.items() if found[index].part.bucket == bucket}
            kinds = {
                (key, dtype)
                for state in whole.values()
                for key, dtype in state.items()
                if isinstance(dtype, torch.dtype)
            }
            for key, dtype in sorted(kinds, key=repr):  # all ranks gather in the same order
                having = [index for index, entries in whole.items() if entries.get(key) is dtype]
                parts = [(found[index], stepped.entries(optimizer, params[index]).get(key)) for index in having]
                flat = self._params.gather(bucket, dtype, parts, f"the optimizer's state {key!r}")
                for index in having:
                    whole[index][key] = found[index].whole_in_bucket(flat)
            for index, state in whole.items():
                yield index, state
                state.clear()  # its memory is free for the next bucket

    def _described(
        self, found: Mapping[int, ParamPart], mine: Mapping[int, dict[str, Any]]
    ) -> Mapping[int, dict[str, Any]]:
        """Replace each entry of state that has a value per element by its dtype, and exchange the rest.

        Args:
            found: This rank's part of each sharded parameter, by index.
            mine: This rank's entries, by index.

        Returns:
            The same on all ranks: the entries of the first rank with a part of the parameter.
        """
        for index, entries in mine.items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    entries[key] = value.dtype if found[index].is_split(key, value) else value.detach().cpu()
        # Counted, so that a rank that alone saves is told so.
        known = {index: entries for index, entries in mine.items() if entries}
        return ChainMap(*self._ranks.objects(known, "the entries of the optimizer's state", Phase.AGREEMENT))

    # -- layout ----------------------------------------------------------------------------------------

    def laid_out(self, layout: Layout) -> None:
        """Move the parameters after their gradients."""
        assert self._params is not None
        for swap in self._sharded.values():
            swap.stepped.forget_shards()
        for param in self._params.lay_out(layout):
            for optimizer, swap in self._sharded.items():
                swap.stepped.keep_own_part(optimizer, param)  # was frozen; its state may have been loaded meanwhile


def _on_cpu(state: Any) -> Any:
    """Copy the tensors in dicts, lists and tuples of a state dict to the CPU."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return type(state)(map(_on_cpu, state)) if type(state) in (list, tuple) else state
