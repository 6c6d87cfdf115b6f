"""``Fabric(strategy="bucketddp")``: Fabric's hooks around ``BucketDDP``."""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.trainer import common
from lightning_bucketddp.trainer.common import forwarded
from lightning_bucketddp.trainer.launchers import FabricScriptLauncher
from lightning_bucketddp.trainer.wrapper import BucketDDPInLightning
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP

_owners: weakref.WeakKeyDictionary[BucketDDPInLightning, "BucketDDPFabricStrategy"] = weakref.WeakKeyDictionary()
"""By wrapper, the strategy that made it. Not in the strategy, which is pickled for `spawn`."""


class BucketDDPFabricStrategy(DDPStrategy):
    """Data-parallel training with Fabric, with gradients averaged by :class:`BucketDDP`.

    ``import lightning_bucketddp`` registers it as ``bucketddp``, ``bucketddp_spawn``, ``bucketddp_fork`` and
    ``bucketddp_notebook``. Names that begin with ``bucketddp_sharded`` add ``shard_optimizer``; names may end in
    ``_find_unused_parameters_true`` or ``_false``. The arguments are those of Fabric's ``DDPStrategy``, except torch
    DDP's experimental ones. Nothing of torch's ``DistributedDataParallel`` is used, and checkpoints are the same.

    All ranks call ``fabric.backward(loss)``. A rank whose loss reaches no parameter takes part, and the others hear at
    once of an exception inside backward. With several models (a GAN) pass ``model=`` for that; otherwise a rank whose
    loss reaches none of them is an error. Plain ``loss.backward()`` is averaged too.

    Args:
        accelerator: LIGHTNING'S ARGUMENTS. The accelerator; set by Fabric.
        parallel_devices: This node's devices; set by Fabric.
        cluster_environment: Where ranks and the main address come from; set by Fabric.
        checkpoint_io: How checkpoints are read and written.
        precision: The precision; set by Fabric.
        process_group_backend: E.g. ``"nccl"`` or ``"gloo"``; by device if None.
        timeout: How long collectives, and agreements through the store, wait; torch's 30 minutes by default.
        start_method: How processes are started: ``"popen"`` (the default) starts the script once more for each;
            ``"spawn"``, ``"fork"`` and ``"forkserver"`` are ``torch.multiprocessing``'s.
        options: The fields of :class:`Options`, which documents them.

    Raises:
        TypeError: If an option has a value of the wrong type.
        ValueError: If an option is out of range, cannot be honoured or contradicts another; says which.
    """

    @common.list_options(DDPStrategy, Options)
    def __init__(self, *args: Any, **given: Any) -> None:
        lightnings, options = common.divided(type(self).__name__, DDPStrategy, Options, args, given)
        self._options = Options(**options)  # raises before ranks are started
        super().__init__(**lightnings)
        self._backward_sync_control = _BackwardSync()  # type: ignore[assignment]

    # -- wrappers ------------------------------------------------------------------------------------

    def wrapper_of(self, module: Module) -> BucketDDP:
        """Return the wrapper of a module that was set up, for calls that Fabric does not have.

        With a single module, ``count_tokens()``, ``count_samples()``, ``last_pass()``, ``full_grad()`` and clipping are
        calls of the strategy too.

        Args:
            module: What ``fabric.setup`` returned, or was given.

        Raises:
            ValueError: If the module was not set up, or with another strategy.
        """
        for wrapper in self._wrappers():
            if wrapper.module is module or wrapper.module is getattr(module, "module", None):
                return wrapper
        raise ValueError(f"expected a module that fabric.setup() was given or returned, found {type(module).__name__}")

    # Of the one module that was set up.
    count_tokens = forwarded(BucketDDP.count_tokens)
    count_samples = forwarded(BucketDDP.count_samples)
    skip_step = forwarded(BucketDDP.skip_step)
    step_skipped = forwarded(BucketDDP.step_skipped)
    last_pass = forwarded(BucketDDP.last_pass)
    full_grad = forwarded(BucketDDP.full_grad)
    clip_grad_norm_ = forwarded(BucketDDP.clip_grad_norm_)
    clip_grad_value_ = forwarded(BucketDDP.clip_grad_value_)

    def _wrapper_for(self, call: str) -> BucketDDP:
        wrappers = self._wrappers()
        if len(wrappers) != 1:
            raise RuntimeError(
                f"expected one module that fabric.setup() was given where {call}() is called, found {len(wrappers)}; "
                f"with several, name one: strategy.wrapper_of(module).{call}()"
            )
        return wrappers[0]

    def _wrappers(self) -> list[BucketDDPInLightning]:
        """Return this strategy's open wrappers."""
        return [wrapper for wrapper, owner in list(_owners.items()) if owner is self and not wrapper.closed]

    def _wrapper_behind(self, optimizer: Optimizer) -> BucketDDPInLightning | None:
        """Return a wrapper with parameters that the optimizer steps on."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        wrappers = self._wrappers()
        return next((one for one in wrappers if any(id(param) in held for param in one.parameters())), None)

    def _sharding_wrapper(self, optimizer: Optimizer) -> BucketDDP | None:
        """Return the wrapper that shards the optimizer; None if it is not sharded."""
        return self._wrapper_behind(optimizer) if self._options.shard_optimizer else None

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = FabricScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        common.set_up_group(super().setup_environment, self._options)

    @override
    def setup_module(self, module: Module) -> BucketDDP:  # type: ignore[override]
        for earlier in list(_owners):
            if earlier.module is module:  # set up again, as Fabric's `ddp` allows
                earlier.close()
        wrapper = BucketDDPInLightning(module, self)
        _owners[wrapper] = self
        return wrapper

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        # Before a checkpoint's state is loaded into it, which has the fp32 masters.
        if (wrapper := self._wrapper_behind(optimizer)) is not None:
            wrapper.prepare_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    @override
    def teardown(self) -> None:
        for wrapper in self._wrappers():
            wrapper.close()
        super().teardown()

    # -- each step -----------------------------------------------------------------------------------

    # Fabric refuses plain `loss.backward()` with strategies that override this method. It looks for what `wraps` sets.
    @wraps(DDPStrategy.backward)
    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Run backward as a pass of the model, all ranks together."""
        wrappers = self._wrappers()
        synchronised = [wrapper for wrapper in wrappers if wrapper.require_backward_grad_sync]
        before = sum(wrapper.passes for wrapper in synchronised)
        for wrapper in synchronised:
            wrapper.begin_step()
        candidates = [wrapper for wrapper in wrappers if module is None or wrapper is module]
        with candidates[0].backward_pass(tensor) if len(candidates) == 1 else nullcontext():
            super().backward(tensor, module, *args, **kwargs)
        if sum(wrapper.passes for wrapper in synchronised) == before:
            for wrapper in synchronised:  # ranks that are in a pass need not wait for this one
                wrapper.end_step()

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        wrapper = self._wrapper_behind(optimizer)
        if wrapper is None:
            return super().optimizer_step(optimizer, **kwargs)
        closure = kwargs.pop("closure", None)
        return wrapper.run_step(optimizer, closure, partial(super().optimizer_step, optimizer, **kwargs))

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
        if (wrapper := self._sharding_wrapper(optimizer)) is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        params = list(self.precision.main_params(optimizer))
        return wrapper.clip_grad_norm_(max_norm, float(norm_type), params, error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        if (wrapper := self._sharding_wrapper(optimizer)) is None:
            return super().clip_gradients_value(module, optimizer, clip_val)
        self.precision.unscale_gradients(optimizer)
        return wrapper.clip_grad_value_(clip_val, list(self.precision.main_params(optimizer)))

    def grad_norm(self, module: Module, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Return the norm of a module's gradients, as if they were one vector. All ranks must call this.

        Args:
            module: What ``fabric.setup`` returned, or was given.
            norm_type: The order of the norm; ``inf`` for the largest absolute value.
            parameters: The parameters whose gradients count; the module's if None.

        Returns:
            An fp32 tensor without dimensions, the same on every rank.

        Raises:
            ValueError: If the module was not set up, or with another strategy.
        """
        return self.wrapper_of(module).grad_norm(norm_type, parameters)

    # -- state ---------------------------------------------------------------------------------------

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state, with ``shard_optimizer`` on rank 0 alone. All ranks must call this."""
        if (wrapper := self._sharding_wrapper(optimizer)) is None:
            return super().get_optimizer_state(optimizer)
        return wrapper.optimizer_state_dict(optimizer) or {}

    __repr__ = common.described


class _BackwardSync:
    """Fabric's interface for ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients without reducing them.

        Raises:
            TypeError: If the module is not wrapped.
        """
        if not enabled:
            return nullcontext()
        if not isinstance(module, BucketDDP):
            raise TypeError(
                f"expected a module that fabric.setup() returned, found {type(module).__name__}; set it up with this "
                "strategy first"
            )
        return module.no_sync()
