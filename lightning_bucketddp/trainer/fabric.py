"""``Fabric(strategy="bucketddp")``: Fabric's hooks around ``BucketDDP``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bucketddp.layout.options import DEFAULT_TIMEOUT, Options
from lightning_bucketddp.trainer.common import (
    StartMethod,
    forwarded,
    group_set_up,
    looks_at_loss,
    register_names,
    require_start_method,
    stepping,
)
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP

_wrappers: weakref.WeakSet[BucketDDP] = weakref.WeakSet()
"""Every wrapper that a strategy of this file has made in this process."""


class BucketDDPFabricStrategy(DDPStrategy):
    """Data-parallel training with Fabric, with gradients averaged by :class:`BucketDDP`.

    Registered as ``bucketddp``, ``bucketddp_spawn``, ``bucketddp_fork`` and ``bucketddp_notebook`` by importing
    ``lightning_bucketddp``, with ``shard_optimizer`` as ``bucketddp_sharded``, ``bucketddp_sharded_spawn`` and so on,
    and with ``_find_unused_parameters_true`` or ``_false`` behind these. A subclass of Fabric's ``DDPStrategy``, whose
    arguments it takes but for torch DDP's experimental ones; nothing of torch's ``DistributedDataParallel`` is used,
    and checkpoints are the same.

    ``fabric.backward(loss)`` is for all ranks to call: one whose loss reaches no parameter takes part, and an exception
    inside backward is told to the others at once. Where several models are set up (a GAN), pass ``model=`` for that;
    a rank whose loss reaches none of them is an error otherwise. Plain ``loss.backward()`` is averaged too.

    Args:
        accelerator: The accelerator; set by Fabric.
        parallel_devices: This node's devices; set by Fabric.
        cluster_environment: Where ranks and the main address come from; set by Fabric.
        checkpoint_io: How checkpoints are read and written.
        precision: The precision; set by Fabric.
        process_group_backend: E.g. ``"nccl"`` or ``"gloo"``; by device if None.
        timeout: How long collectives, and agreements through the store, wait; torch's 30 minutes by default.
        start_method: How processes are started.
        options: The fields of :class:`Options`, which says what each of them means.

    Raises:
        TypeError: If an option has a value of the wrong type.
        ValueError: If an option is out of range, cannot be honoured or contradicts another; says which.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        **options: Any,
    ) -> None:
        self._options = Options(timeout=timeout, **options)  # raises here, before ranks are started
        require_start_method(start_method)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = _BackwardSync()  # type: ignore[assignment]
        self._own: list[weakref.ref[BucketDDP]] = []  # which can be pickled while there are none, for `spawn`

    def wrapper_of(self, module: Module) -> BucketDDP:
        """The wrapper of a module that was set up, for what Fabric has no call for.

        ``count_tokens()``, ``last_pass()``, ``full_grad()`` and clipping are calls of the strategy too, where one
        module is set up.

        Args:
            module: What ``fabric.setup`` returned, or was given.

        Raises:
            ValueError: If the module was not set up, or with another strategy.
        """
        for wrapper in self._open_wrappers():
            if wrapper.module is module or wrapper.module is getattr(module, "module", None):
                return wrapper
        raise ValueError(f"expected a module that fabric.setup() was given or returned, found {type(module).__name__}")

    # Of the one module that was set up.
    count_tokens = forwarded(BucketDDP.count_tokens)
    last_pass = forwarded(BucketDDP.last_pass)
    full_grad = forwarded(BucketDDP.full_grad)
    clip_grad_norm_ = forwarded(BucketDDP.clip_grad_norm_)
    clip_grad_value_ = forwarded(BucketDDP.clip_grad_value_)

    def _wrapper_for(self, call: str) -> BucketDDP:
        wrappers = self._open_wrappers()
        if len(wrappers) != 1:
            raise RuntimeError(
                f"expected one module that fabric.setup() was given where {call}() is called, found {len(wrappers)}; "
                f"of several, name one: strategy.wrapper_of(module).{call}()"
            )
        return wrappers[0]

    def _open_wrappers(self) -> list[BucketDDP]:
        found = [ref() for ref in self._own]
        return [wrapper for wrapper in found if wrapper is not None and not wrapper.closed]

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        with group_set_up(self._timeout):
            super().setup_environment()

    @override
    def setup_module(self, module: Module) -> BucketDDP:  # type: ignore[override]
        for earlier in list(_wrappers):
            if earlier.module is module:  # set up again, as may be done with `ddp`
                earlier.close()
        wrapper = BucketDDP(module, **vars(self._options))
        _wrappers.add(wrapper)
        self._own = [ref for ref in self._own if ref() is not None] + [weakref.ref(wrapper)]
        return wrapper

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        # Before a checkpoint's state is loaded into it, which has the fp32 masters.
        if (wrapper := self._wrapper_behind(optimizer)) is not None:
            wrapper.prepare_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    def _wrapper_behind(self, optimizer: Optimizer) -> BucketDDP | None:
        """A wrapper with parameters that the optimizer steps on."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        candidates = self._open_wrappers()
        return next((one for one in candidates if any(id(param) in held for param in one.parameters())), None)

    @override
    def teardown(self) -> None:
        for wrapper in self._open_wrappers():
            wrapper.close()
        super().teardown()

    # -- each step -----------------------------------------------------------------------------------

    # Fabric refuses plain `loss.backward()` with strategies that override this method, which it finds out from what
    # `wraps` sets. Here that works, as it does with `ddp`.
    @wraps(DDPStrategy.backward)
    def backward(  # type: ignore[override]
        self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Runs backward as a pass of the model, all ranks together."""
        wrappers = self._open_wrappers()
        synchronised = [wrapper for wrapper in wrappers if wrapper.require_backward_grad_sync]
        before = sum(wrapper.passes for wrapper in synchronised)
        for wrapper in synchronised:
            wrapper.begin_step()
        trained = module if isinstance(module, BucketDDP) else wrappers[0] if len(wrappers) == 1 else None
        with nullcontext() if trained is None or trained.closed else trained.backward_pass(tensor):
            super().backward(tensor, module, *args, **kwargs)
        if sum(wrapper.passes for wrapper in synchronised) == before:
            for wrapper in synchronised:  # ranks that have come to a pass need not wait for this one
                wrapper.end_step()

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        wrapper = self._wrapper_behind(optimizer)
        if wrapper is None:
            return super().optimizer_step(optimizer, **kwargs)
        closure = kwargs.get("closure")
        if closure is not None and looks_at_loss(optimizer):
            # Line searches then take the same steps on all ranks.
            kwargs["closure"] = lambda: wrapper.average_loss(closure())
        with stepping(wrapper, optimizer):
            return super().optimizer_step(optimizer, **kwargs)

    # -- gradients -----------------------------------------------------------------------------------

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        wrapper = self._wrapper_behind(optimizer) if self._options.shard_optimizer else None
        if wrapper is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        params = list(self.precision.main_params(optimizer))
        return wrapper.clip_grad_norm_(max_norm, float(norm_type), params, error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        wrapper = self._wrapper_behind(optimizer) if self._options.shard_optimizer else None
        if wrapper is None:
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        self.precision.unscale_gradients(optimizer)
        wrapper.clip_grad_value_(clip_val, list(self.precision.main_params(optimizer)))

    def grad_norm(self, module: Module, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """The norm of a module's gradients together, as if they were one vector. All ranks must call this.

        Args:
            module: What ``fabric.setup`` returned, or was given.
            norm_type: Which; ``inf`` for the largest absolute value.
            parameters: Whose gradients; the module's if None.

        Returns:
            An fp32 tensor without a dimension, the same on every rank.

        Raises:
            ValueError: If the module was not set up, or with another strategy.
        """
        return self.wrapper_of(module).grad_norm(norm_type, parameters)

    # -- state ---------------------------------------------------------------------------------------

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, whole; with ``shard_optimizer`` on rank 0 alone. All ranks must call this."""
        wrapper = self._wrapper_behind(optimizer) if self._options.shard_optimizer else None
        if wrapper is None:
            return super().get_optimizer_state(optimizer)
        return wrapper.optimizer_state_dict(optimizer) or {}

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Module | Optimizer | Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        for value in state.values():
            if isinstance(value, BucketDDP) and not value.closed:  # rank 0's are saved; make them everyone's
                value.synchronise_module_buffers()
        super().save_checkpoint(path, state, storage_options, filter)

    # -- registry ------------------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds the names to a registry; the ones that are there already are left alone."""
        register_names(cls, strategy_registry)


class _BackwardSync:
    """What ``fabric.no_backward_sync`` looks for."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Backwards in the context accumulate gradients without reducing them.

        Raises:
            TypeError: If the module is not wrapped.
        """
        if not enabled:
            return nullcontext()
        if not isinstance(module, BucketDDP):
            raise TypeError(
                f"expected a module that was set up with this strategy, whose gradients are a BucketDDP's; found "
                f"{type(module).__name__}"
            )
        return module.no_sync()
