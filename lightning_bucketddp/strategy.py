"""``Trainer(strategy="bucketddp")``: Lightning's lifecycle around ``BucketDDP``."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bucketddp.module_state import ModuleBufferSync
from lightning_bucketddp.options import DEFAULT_TIMEOUT
from lightning_bucketddp.wrapper import BucketDDP, require_fit_group

_START_METHODS: dict[str, Literal["popen", "spawn", "fork", "forkserver"]] = {
    "bucketddp": "popen",
    "bucketddp_spawn": "spawn",
    "bucketddp_fork": "fork",
    "bucketddp_notebook": "fork",
}


class BucketDDPStrategy(DDPStrategy):
    """Data-parallel training in one process per device, with gradients averaged by :class:`BucketDDP`.

    Registered as ``bucketddp``, ``bucketddp_spawn``, ``bucketddp_fork`` and ``bucketddp_notebook`` by importing
    ``lightning_bucketddp``. A subclass of ``DDPStrategy``, so that Lightning treats it as one of its own; nothing of
    torch's ``DistributedDataParallel`` is used.

    Args:
        accelerator: The accelerator; set by the Trainer.
        parallel_devices: This node's devices; set by the Trainer.
        cluster_environment: Where ranks and the main address come from; set by the Trainer.
        checkpoint_io: How checkpoints are read and written.
        precision_plugin: The precision; set by the Trainer.
        process_group_backend: E.g. ``"nccl"`` or ``"gloo"``; by device if None.
        timeout: How long collectives, and agreements through the store, wait; torch's 30 minutes by default.
        start_method: How processes are started.
        bucket_cap_mb: See :class:`BucketDDP`.
        module_buffers: See :class:`BucketDDP`. They are synchronised before validation and at the end of ``fit`` too.
        find_unused_parameters: See :class:`BucketDDP`; a matter of speed only.
        init_sync: See :class:`BucketDDP`.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        bucket_cap_mb: float | None = None,
        module_buffers: ModuleBufferSync = "broadcast",
        find_unused_parameters: bool = False,
        init_sync: bool = True,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._bucket_cap_mb = bucket_cap_mb
        self._module_buffers: ModuleBufferSync = module_buffers
        self._find_unused_parameters = find_unused_parameters
        self._init_sync = init_sync

    @property
    def bucket_ddp(self) -> BucketDDP | None:
        """The wrapper around the LightningModule during ``fit``; None otherwise."""
        return self.model if isinstance(self.model, BucketDDP) else None

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def setup_distributed(self) -> None:
        mine = not dist.is_initialized()
        super().setup_distributed()
        if mine:
            # Lightning does this for NCCL only; a gloo process that exits with an open group aborts now and then.
            atexit.register(_destroy_process_group)
        else:  # another fit in the same processes: Lightning's own collectives come before the module is wrapped
            require_fit_group(None, self._timeout)

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, pl.LightningModule)
        self.model = self._setup_model(self.model)

    @override
    def _setup_model(self, model: Module) -> BucketDDP:  # type: ignore[override]
        return BucketDDP(
            model,
            bucket_cap_mb=self._bucket_cap_mb,
            module_buffers=self._module_buffers,
            find_unused_parameters=self._find_unused_parameters,
            init_sync=self._init_sync,
            timeout=self._timeout,
        )

    @override
    def teardown(self) -> None:
        # The parent unwraps torch's DDP only.
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.close()
            self.model = self.lightning_module
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Other ranks may be waiting for this one in a pass it will never get to.
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.publish_failure(exception)

    # -- each step -----------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: the pass is opened in :meth:`backward`."""

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing: gradients are final when ``backward`` returns."""

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward as a pass, between Lightning's hooks before and after it.

        ``on_after_backward`` fires in the precision plugin's ``post_backward`` and must see averaged gradients,
        so the pass ends before that.
        """
        wrapper = self.bucket_ddp
        if wrapper is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with wrapper.backward_pass(closure_loss):
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        wrapper = self.bucket_ddp
        if wrapper is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        wrapper.begin_step()
        output = super().training_step(*args, **kwargs)
        if not self.lightning_module.automatic_optimization:  # otherwise backward is still to come
            wrapper.end_step()
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        wrapper = self.bucket_ddp
        if wrapper is None:
            yield
            return
        with wrapper.no_sync():
            yield

    # -- the same module on every rank wherever it is looked at -------------------------------------

    @override
    def on_validation_start(self) -> None:
        self._synchronise_module_buffers()

    @override
    def on_train_end(self) -> None:
        self._synchronise_module_buffers()

    def _synchronise_module_buffers(self) -> None:
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.synchronise_module_buffers()

    # -- registry ------------------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds the names to a registry; the ones that are there already are left alone."""
        for name, start_method in _START_METHODS.items():
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description=f"BucketDDP strategy with `start_method` {start_method!r}",
                    start_method=start_method,
                )


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Reference cycles, the Trainer's among them, keep the group and gloo's threads alive beyond that, and a process
    # that ends with those running aborts now and then.
    gc.collect()


def register() -> None:
    """Registers this package's strategies with Lightning's Trainer. Importing the package does it."""
    BucketDDPStrategy.register_strategies(StrategyRegistry)
