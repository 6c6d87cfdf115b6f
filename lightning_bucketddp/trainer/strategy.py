"""``Trainer(strategy="bucketddp")``: Lightning's lifecycle around ``BucketDDP``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import DEFAULT_TIMEOUT, Options
from lightning_bucketddp.layout.require import require_choice
from lightning_bucketddp.peers.abort_listener import AbortListener, listen, tell_failure
from lightning_bucketddp.trainer import checkpoints, finetuning
from lightning_bucketddp.trainer.common import (
    StartMethod,
    forwarded,
    group_set_up,
    looks_at_loss,
    register_names,
    require_start_method,
    stepping,
)
from lightning_bucketddp.trainer.ddp_hooks import require_averaging_possible, with_ddp_hook
from lightning_bucketddp.trainer.layer_sync import BatchNormSync
from lightning_bucketddp.trainer.precision import adapt_precision
from lightning_bucketddp.trainer.sigterm import quieten_sigterm
from lightning_bucketddp.trainer.uneven_loader import EvenedLoader, evened_for_training
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP
from lightning_bucketddp.wrapper.join import tell
from lightning_bucketddp.wrapper.runtime import group_of


class BucketDDPStrategy(DDPStrategy):
    """Data-parallel training in one process per device, with gradients averaged by :class:`BucketDDP`.

    Registered as ``bucketddp``, ``bucketddp_spawn``, ``bucketddp_fork`` and ``bucketddp_notebook`` by importing
    ``lightning_bucketddp``, and with ``shard_optimizer`` as ``bucketddp_sharded``, ``bucketddp_sharded_spawn`` and so
    on. A subclass of ``DDPStrategy``, so that Lightning treats it as one of its own; nothing of
    torch's ``DistributedDataParallel`` is used.

    Everything that ``DDPStrategy`` accepts is accepted, as an argument of its own, except torch DDP's experimental
    arguments (``mixed_precision``, ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``,
    ``skip_all_reduce_unused_params``, ``batched_grad_copy``, ``bucket_cap_mb_list``).

    Args:
        accelerator: The accelerator; set by the Trainer.
        parallel_devices: This node's devices; set by the Trainer.
        cluster_environment: Where ranks and the main address come from; set by the Trainer.
        checkpoint_io: How checkpoints are read and written.
        precision_plugin: The precision; set by the Trainer.
        ddp_comm_state: ``DDPStrategy``'s name for ``comm_hook_state``.
        ddp_comm_hook: ``DDPStrategy``'s name for ``comm_hook``. Hooks work on every backend.
        ddp_comm_wrapper: Wraps the communication hook, as torch's ``fp16_compress_wrapper`` does.
        model_averaging_period: With a ``PostLocalSGDState``: after how many steps parameters are averaged.
        process_group_backend: E.g. ``"nccl"`` or ``"gloo"``; by device if None.
        timeout: How long collectives, and agreements through the store, wait; torch's 30 minutes by default.
        start_method: How processes are started.
        state_dict_type: How checkpoints are saved: ``"full"``, one file that any strategy loads, or ``"sharded"``, a
            directory to which every rank writes its own parts, so that nothing is put together on one of them
            (``torch.distributed.checkpoint``'s format; torch's ``dcp_to_torch_save`` makes a file of it). Either is
            loaded whatever is chosen, at any number of ranks.
        uneven_inputs: Lets ranks have different numbers of training batches. A rank that runs out goes on with its last
            batch until the others have run out too, so that loops, hooks and collectives stay in step, but its
            gradients and module buffers do not count; what it logs does. Gradients are divided by the
            ``"world_size"``, or by the number of ``"active_ranks"``, which have batches. One tiny collective per batch.
            None: ranks must have the same number of batches.
        options: The fields of :class:`Options`, which says what each of them means.

    Raises:
        TypeError: If an option has a value of the wrong type.
        ValueError: If an option is out of range, cannot be honoured or contradicts another; says which.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        *,
        state_dict_type: Literal["full", "sharded"] = "full",
        uneven_inputs: Literal["world_size", "active_ranks"] | None = None,
        **options: Any,
    ) -> None:
        checked = Options(timeout=timeout, **options)  # raises here, before ranks are started
        self._options = with_ddp_hook(checked, ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        require_start_method(start_method)
        require_choice("state_dict_type", state_dict_type, ("full", "sharded"))
        require_choice("uneven_inputs", uneven_inputs, ("world_size", "active_ranks"), optional=True)
        if uneven_inputs == "active_ranks" and self._options.rescales:
            raise ValueError(
                'expected uneven_inputs="active_ranks" or gradient_divide_by, found both: each says what gradients are '
                "divided by"
            )
        require_averaging_possible(model_averaging_period, self._options)
        hook = self._options.comm_hook
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=self._options.comm_hook_state,
            ddp_comm_hook=hook if callable(hook) else None,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._state_dict_type = state_dict_type
        self._resumed_from: Path | None = None  # a directory that optimizers are yet to be loaded from
        self._uneven_inputs = uneven_inputs
        self._evened_loader: EvenedLoader | None = None
        self._listener: AbortListener | None = None
        self._ended: BucketDDP | None = None
        self._restore_precision: Callable[[], None] | None = None
        self._trainable_at_setup: finetuning.Trainable | None = None
        self._warned_of_none = False

    @property
    def bucket_ddp(self) -> BucketDDP | None:
        """The wrapper around the LightningModule during ``fit``; None otherwise."""
        return self.model if isinstance(self.model, BucketDDP) else None

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def setup_distributed(self) -> None:
        with group_set_up(self._timeout):
            super().setup_distributed()
            if dist.is_initialized():  # not where a test mocks `init_process_group`
                self._listener = listen(Collectives(None))
                self._listener.begin(self._interrupted)  # before ranks wait for one another: the last fit is over

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = TellingLauncher(self, self._launcher._start_method)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if type(self._layer_sync) is TorchSyncBatchNorm:  # what sync_batchnorm=True stands for; not a user's own
            self._layer_sync = BatchNormSync(self._timeout)
        super().setup(trainer)

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, pl.LightningModule)
        self._ended = None
        self._trainable_at_setup = finetuning.trainable_state(self.model)
        self.model = self._setup_model(self.model)
        self._restore_precision = adapt_precision(self.precision_plugin, self.model, self._options.shard_optimizer)

    @override
    def _setup_model(self, model: Module) -> BucketDDP:  # type: ignore[override]
        wrapper = FrozenAtFirst(model, **vars(self._options))
        if self._uneven_inputs == "active_ranks":
            wrapper.divide_by_active_ranks()
        return wrapper

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        # Before a checkpoint's state is loaded into them, which has the fp32 masters.
        if (wrapper := self.bucket_ddp) is not None:
            for optimizer in self.optimizers:
                wrapper.prepare_optimizer(optimizer)

    @override
    def teardown(self) -> None:
        # The parent unwraps torch's DDP only.
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.close()
            self.model = self.lightning_module
            if self._restore_precision is not None:
                self._restore_precision()
                self._restore_precision = None
            in_parts = self._options.shard_optimizer or self._state_dict_type == "sharded"
            if in_parts and not self._interrupted():
                self._ended = wrapper  # trainer.save_checkpoint() may still look at the optimizers
        self._evened_loader = None
        if self._listener is not None:
            self._listener.end()
            self._listener = None
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Other ranks may be waiting for this one in a pass it will never get to, or elsewhere.
        if self._listener is not None:
            tell_failure(exception)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._interrupted():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return obj if self._interrupted() else super().broadcast(obj, src)

    def _interrupted(self) -> bool:
        """Whether callbacks are being told of an exception; where they save a checkpoint the other ranks may not be."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

    # -- each step -----------------------------------------------------------------------------------

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
        elif output is None and self.world_size > 1:
            # This rank takes part with a loss that reaches no parameter, as others may have one that does.
            output = torch.zeros((), device=self.root_device, requires_grad=True)
            if not self._warned_of_none:
                self._warned_of_none = True
                warnings.warn(
                    f"rank {self.global_rank}: `training_step` returned None, which counts as zero in the mean over "
                    "the ranks; where all of them return None, nothing is updated. If this is on purpose, ignore this "
                    "warning; it is not repeated",
                    stacklevel=1,
                )
        return output

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        wrapper = self.bucket_ddp
        if wrapper is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if closure is not do_nothing_closure:  # which stands for none
            closure = partial(self._closure, wrapper, optimizer, closure)
        with stepping(wrapper, optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _closure(self, wrapper: BucketDDP, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """What an optimizer sees of the closure: the loss averaged over the ranks, if it looks at the loss."""
        loss = closure()
        if looks_at_loss(optimizer):  # whether this rank has one or not
            loss = wrapper.average_loss(loss)
        if getattr(self.precision_plugin, "scaler", None) is not None and _has_no_gradient(optimizer):
            return None  # no rank had a loss: a scaler would miss the gradients, and skips the step of a None
        return loss

    # Of the wrapper, during ``fit``. Gradients are as optimizers see them in ``on_before_optimizer_step``; in
    # ``on_after_backward`` fp16 mixed precision has them scaled.
    count_tokens = forwarded(BucketDDP.count_tokens)
    last_pass = forwarded(BucketDDP.last_pass)
    full_grad = forwarded(BucketDDP.full_grad)
    grad_norm = forwarded(BucketDDP.grad_norm)
    clip_grad_norm_ = forwarded(BucketDDP.clip_grad_norm_)
    clip_grad_value_ = forwarded(BucketDDP.clip_grad_value_)

    def _wrapper_for(self, call: str) -> BucketDDP:
        if (wrapper := self.bucket_ddp) is None:
            raise RuntimeError(f"expected {call}() to be called during fit, found no wrapped module")
        return wrapper

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        wrapper = self.bucket_ddp
        with nullcontext() if wrapper is None else wrapper.no_sync():
            yield

    # -- ranks that run out of batches ---------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        if self._uneven_inputs is None or module is None or not module.trainer.training:
            return dataloader
        before = self._evened_loader
        self._evened_loader = evened_for_training(dataloader, module, before, self._exchange, self.global_rank)
        return self._evened_loader

    def _exchange(self, value: int) -> list[int]:
        if (wrapper := self.bucket_ddp) is not None:
            return wrapper.exchange(value)
        # The module is not wrapped yet: `estimated_stepping_batches` was asked for in `setup` or `configure_model`.
        group = group_of(self._options.process_group, self._options.device_mesh)
        return tell(value, Collectives(group), self.root_device, lambda: None)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # What the training loop does first with a batch: hooks from `on_after_batch_transfer` on may count tokens.
        wrapper, module = self.bucket_ddp, self.lightning_module
        if wrapper is not None and self._evened_loader is not None and module is not None and module.trainer.training:
            wrapper.set_active_ranks(self._evened_loader.take())
        return super().batch_to_device(batch, device, dataloader_idx)

    # -- the same module on every rank wherever it is looked at -------------------------------------

    @override
    def on_train_start(self) -> None:
        quieten_sigterm()

    on_test_start = on_predict_start = on_train_start

    @override
    def on_validation_start(self) -> None:
        quieten_sigterm()
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.wait_for_parameters()
            wrapper.synchronise_module_buffers()

    @override
    def on_train_end(self) -> None:
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.wait_for_parameters()
            wrapper.end_training()  # first: ranks that have more batches are not there to synchronise with
            wrapper.synchronise_module_buffers()

    # -- checkpoints ---------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, whole; with ``shard_optimizer`` on rank 0 alone, which writes it, and empty elsewhere.

        Called on all ranks, as Lightning does for each checkpoint. Where ranks handle an exception, they may not all
        have come here: then it is what this rank has.
        """
        if self._saves_parts():
            return {}
        wrapper = self.bucket_ddp or self._ended
        if wrapper is None or not self._options.shard_optimizer:
            return super().optimizer_state(optimizer)
        return checkpoints.whole_state(wrapper, optimizer, self._interrupted())

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.lightning_module is not None:
            finetuning.add_trainable(checkpoint, self.lightning_module, self._trainable_at_setup)
        if not self._saves_parts():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        path, wrapper = Path(self.broadcast(filepath)), self.bucket_ddp or self._ended
        checkpoints.save_parts(checkpoint, path, self.lightning_module, wrapper, self.optimizers, storage_options)

    def _saves_parts(self) -> bool:
        """Whether each rank saves its own parts; where an exception is handled, the others may not be there."""
        return self._state_dict_type == "sharded" and not self._interrupted()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        self._resumed_from = path if checkpoints.is_checkpoint_directory(path) else None
        if self._resumed_from is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        return checkpoints.load_weights(path, self.lightning_module, self.bucket_ddp, weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module is not None:
            finetuning.restore_trainable(checkpoint, self.lightning_module)
        if self._resumed_from is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.bucket_ddp is not None
        parts = self.bucket_ddp.sharded_checkpoint()
        parts.load(self._resumed_from, self.optimizers, strict=True, with_module=False)

    # -- registry ------------------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds the names to a registry; the ones that are there already are left alone."""
        register_names(cls, strategy_registry)


def _has_no_gradient(optimizer: Optimizer) -> bool:
    return all(param.grad is None for group in optimizer.param_groups for param in group["params"])


class FrozenAtFirst(BucketDDP):
    """A wrapper around a module whose parameters may all be frozen when ``fit`` starts: callbacks unfreeze them."""

    _may_be_frozen = True


class TellingLauncher(_MultiProcessingLauncher):
    """Tells the strategy of exceptions in the processes that are started, which Lightning tells the main one only."""

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)
            raise
