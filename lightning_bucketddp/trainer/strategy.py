"""``Trainer(strategy="bucketddp")``: Lightning's lifecycle around ``BucketDDP``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import DEFAULT_TIMEOUT, Options
from lightning_bucketddp.layout.require import require_choice
from lightning_bucketddp.peers.abort_listener import AbortListener, listen, tell_failure
from lightning_bucketddp.trainer.checkpoints import (
    is_checkpoint_directory,
    load_optimizers,
    load_weights,
    save_parts,
)
from lightning_bucketddp.trainer.common import (
    StartMethod,
    WrapperCalls,
    end_group_at_exit,
    looks_at_loss,
    register_names,
    require_start_method,
)
from lightning_bucketddp.trainer.finetuning import Trainable, add_trainable, restore_trainable, trainable_state
from lightning_bucketddp.trainer.layer_sync import BatchNormSync
from lightning_bucketddp.trainer.shard_clipping import clip_shards
from lightning_bucketddp.trainer.sigterm import quieten_sigterm
from lightning_bucketddp.trainer.uneven_loader import EvenedLoader, evened
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP, group_of, require_fit_group
from lightning_bucketddp.wrapper.join import UnevenInputs

_WEIGHT_AVERAGING = getattr(pl.callbacks, "WeightAveraging", ())  # since Lightning 2.6


class BucketDDPStrategy(WrapperCalls, DDPStrategy):
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
        self._options = Options(timeout=timeout, **options)  # raises here, before ranks are started
        self._options = _with_ddp_hook(self._options, ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        hook, hook_state = self._options.comm_hook, self._options.comm_hook_state
        require_start_method(start_method)
        require_choice("state_dict_type", state_dict_type, ("full", "sharded"))
        require_choice("uneven_inputs", uneven_inputs, ("world_size", "active_ranks"), optional=True)
        if uneven_inputs == "active_ranks" and self._options.rescales:
            raise ValueError(
                'expected uneven_inputs="active_ranks" or gradient_divide_by, found both: each says what gradients are '
                "divided by"
            )
        _require_averaging_possible(model_averaging_period, hook_state, self._options)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=hook_state,
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
        self._undo = ExitStack()
        """Gives the precision plugin its own methods back."""
        self._trainable_at_setup: Trainable | None = None
        self._warned_of_none = False

    @property
    def bucket_ddp(self) -> BucketDDP | None:
        """The wrapper around the LightningModule during ``fit``; None otherwise."""
        return self.model if isinstance(self.model, BucketDDP) else None

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def setup_distributed(self) -> None:
        mine = not dist.is_initialized()
        super().setup_distributed()
        if not dist.is_initialized():
            return  # a test mocks `init_process_group`
        if mine:
            end_group_at_exit()
        else:  # another fit in the same processes: Lightning's own collectives come before the module is wrapped
            require_fit_group(None, self._timeout)
        self._listener = listen(Collectives(None))
        self._listener.begin(self._interrupted)

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
        self._trainable_at_setup = trainable_state(self.model)
        self.model = self._setup_model(self.model)
        plugin = self.precision_plugin
        own = {"backward": plugin.backward} if "backward" in vars(plugin) else {}
        self._undo.callback(vars(plugin).update, own)
        self._undo.callback(vars(plugin).pop, "backward")  # the last one comes first
        vars(plugin)["backward"] = partial(self._run_as_pass, plugin.backward)
        if self._options.shard_optimizer:
            self._undo.callback(clip_shards(plugin, self.model))

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
            self._undo.close()
            if self._in_parts():
                self._ended = wrapper  # the Trainer's optimizers are still looked at, by trainer.save_checkpoint()
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

    def _in_parts(self) -> bool:
        """Whether a wrapper is needed to save what is in parts, or in the form of parts, when training has ended."""
        in_parts = self._options.shard_optimizer or self._state_dict_type == "sharded"
        return in_parts and not self._interrupted()

    def _interrupted(self) -> bool:
        """Whether callbacks are being told of an exception; where they save a checkpoint the other ranks may not be."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

    # -- each step -----------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: the pass is opened later, around the precision plugin's ``backward``."""

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing: gradients are final when the precision plugin's ``backward`` returns."""

    def _run_as_pass(
        self, backward: Callable[..., None], loss: Tensor, module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the precision plugin's ``backward`` as a pass.

        The strategy's own ``backward`` stays Lightning's, so that whoever patches or wraps that one sees each call.
        Gradients are averaged when the plugin's returns: ``on_after_backward`` follows.
        """
        wrapper = self.bucket_ddp
        assert wrapper is not None
        if wrapper.is_replaying:
            loss = _zero_loss(loss)
        with wrapper.backward_pass(loss):
            backward(loss, module, *args, **kwargs)
        if wrapper.require_backward_grad_sync and (wrapper.some_replay or _averages_weights(module)):
            # What goes into an average or a checkpoint is to be the same on every rank, and to count.
            wrapper.synchronise_module_buffers()

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
            self._warn_of_none()
        return output

    def _warn_of_none(self) -> None:
        if not self._warned_of_none:
            self._warned_of_none = True
            warnings.warn(
                f"rank {self.global_rank}: `training_step` returned None, which counts as zero in the mean over the "
                "ranks; where all of them return None, nothing is updated. If this is on purpose, ignore this warning; "
                "it is not repeated",
                stacklevel=2,
            )

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
        masters = wrapper.prepare_optimizer(optimizer)
        with nullcontext() if masters is None else masters.restored_after():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _closure(self, wrapper: BucketDDP, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """What an optimizer sees of the closure: the loss averaged over the ranks, if it looks at the loss."""
        loss = closure()
        if looks_at_loss(optimizer):  # whether this rank has one or not
            loss = wrapper.average_loss(loss)
        if getattr(self.precision_plugin, "scaler", None) is not None and _has_no_gradient(optimizer):
            return None  # no rank had a loss: a scaler would miss the gradients, and skips the step of a None
        return loss

    def grad_norm(self, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """The norm of all gradients together, as if they were one vector; for logging. All ranks must call this.

        With ``shard_optimizer`` there is no other way to it: Lightning's utility ``grad_norm`` looks at gradients. As
        that, it is what optimizers see in ``on_before_optimizer_step``; in ``on_after_backward`` fp16 mixed precision
        has gradients scaled.

        Args:
            norm_type: Which; ``inf`` for the largest absolute value.
            parameters: Whose gradients; the module's if None.

        Returns:
            An fp32 tensor without a dimension, the same on every rank.

        Raises:
            RuntimeError: Outside of ``fit``.
        """
        return self._wrapper_for("grad_norm").grad_norm(norm_type, parameters)

    @override
    def _wrapper_for(self, call: str) -> BucketDDP:
        if (wrapper := self.bucket_ddp) is None:
            raise RuntimeError(f"expected {call}() to be called during fit, found no wrapped module")
        return wrapper

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        wrapper = self.bucket_ddp
        if wrapper is None:
            yield
            return
        with wrapper.no_sync():
            yield

    # -- ranks that run out of batches ---------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        if self._uneven_inputs is None or module is None or not module.trainer.training:
            return dataloader
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "expected a training_step that gets batches where uneven_inputs is given, found one that takes them "
                "from `dataloader_iter`, so that nobody knows which of them count"
            )
        if self._evened_loader is not None and not self._evened_loader.started:
            raise ValueError(
                "expected one training dataloader where uneven_inputs is given, found several; combine them in one "
                "dataset"
            )
        self._evened_loader = evened(cast("Iterable[Any]", dataloader), self._exchange, self.global_rank)
        return self._evened_loader

    def _exchange(self, value: int) -> list[int]:
        if (wrapper := self.bucket_ddp) is not None:
            return wrapper.exchange(value)
        # The module is not wrapped yet: `estimated_stepping_batches` was asked for in `setup` or `configure_model`.
        group = group_of(self._options.process_group, self._options.device_mesh)
        return UnevenInputs(Collectives(group), self.root_device).tell(value, lambda: None)

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

    @override
    def on_test_start(self) -> None:
        quieten_sigterm()

    @override
    def on_predict_start(self) -> None:
        quieten_sigterm()

    @override
    def on_validation_start(self) -> None:
        quieten_sigterm()
        self._wait_for_parameters()
        self._synchronise_module_buffers()

    @override
    def on_train_end(self) -> None:
        self._wait_for_parameters()
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.end_training()  # first: ranks that have more batches are not there to synchronise with
        self._synchronise_module_buffers()

    def _wait_for_parameters(self) -> None:
        # Uses of parameters wait by themselves, but for those in compiled functions that are not the module's own.
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.wait_for_parameters()

    def _synchronise_module_buffers(self) -> None:
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.synchronise_module_buffers()

    # -- checkpoints ---------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, whole; with ``shard_optimizer`` on rank 0 alone, which writes it, and empty elsewhere.

        Called on all ranks, as Lightning does for each checkpoint. Where ranks handle an exception, they may not all
        have come here: then it is what this rank has.
        """
        wrapper = self.bucket_ddp or self._ended
        if self._state_dict_type == "sharded" and not self._interrupted():
            return {}
        if wrapper is None or not self._options.shard_optimizer:
            return super().optimizer_state(optimizer)
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._interrupted():
            rank_zero_warn(
                "a checkpoint that is saved while an exception is handled has this rank's part of the optimizers' "
                "state, as the other ranks may not be there: weights can be loaded from it, but training cannot be "
                "resumed"
            )
            return optimizer.state_dict()
        return wrapper.optimizer_state_dict(optimizer) or {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.lightning_module is not None:
            add_trainable(checkpoint, self.lightning_module, self._trainable_at_setup)
        if self._state_dict_type == "sharded" and not self._interrupted():  # then the others may not be there
            if storage_options is not None:
                raise TypeError(
                    f'expected no storage_options with state_dict_type="sharded", found {storage_options!r}: no '
                    "CheckpointIO is used"
                )
            assert self.lightning_module is not None
            wrapper = self.bucket_ddp or self._ended
            path = Path(self.broadcast(filepath))
            save_parts(checkpoint, path, self.lightning_module, wrapper, self.optimizers)
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._resumed_from = None
        path = Path(self.broadcast(checkpoint_path))
        if not is_checkpoint_directory(path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        if weights_only:
            raise ValueError(
                f"expected weights_only to be left out for the directory {path}, found {weights_only!r}: what is not a "
                "tensor is pickled there"
            )
        assert self.lightning_module is not None
        checkpoint = load_weights(path, self.lightning_module, self.bucket_ddp)
        self._resumed_from = path
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module is not None:
            restore_trainable(checkpoint, self.lightning_module)
        if self._resumed_from is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.bucket_ddp is not None
        load_optimizers(self._resumed_from, self.bucket_ddp, self.optimizers)

    # -- registry ------------------------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds the names to a registry; the ones that are there already are left alone."""
        register_names(cls, strategy_registry)


def _with_ddp_hook(
    options: Options,
    ddp_hook: Callable[..., Any] | None,
    ddp_state: Any,
    ddp_wrapper: Callable[..., Any] | None,
) -> Options:
    """The options with one communication hook and its state, whichever way they were spelled.

    Raises:
        ValueError: If one was given in both ways, or what belongs to a hook without one.
    """
    hook, state = options.comm_hook, options.comm_hook_state
    if hook is not None and ddp_hook is not None:
        raise ValueError("expected comm_hook or ddp_comm_hook, found both; they mean the same")
    if state is not None and ddp_state is not None:
        raise ValueError("expected comm_hook_state or ddp_comm_state, found both; they mean the same")
    hook = ddp_hook if hook is None else hook
    state = ddp_state if state is None else state
    if ddp_wrapper is not None:
        if not callable(hook):
            raise ValueError(
                f"expected a function as communication hook where ddp_comm_wrapper is given, found {hook!r}; for "
                "torch's wrappers around an all-reduce pass torch's allreduce_hook"
            )
        hook = ddp_wrapper(hook)
    if state is not None and hook is None:
        raise ValueError("expected no state of a communication hook without the hook, found one; pass the hook too")
    return replace(options, comm_hook=hook, comm_hook_state=state)


def _require_averaging_possible(period: int | None, hook_state: Any, options: Options) -> None:
    averages = isinstance(hook_state, PostLocalSGDState)
    if averages is not (period is not None):
        found = f"model_averaging_period={period!r} with a state of {type(hook_state).__name__}"
        raise ValueError(
            f"expected model_averaging_period together with a PostLocalSGDState as the hook's state, found {found}"
        )
    if averages and options.shard_optimizer:
        raise ValueError(
            "expected model averaging or shard_optimizer=True, found both: ranks whose models differ between averages "
            "cannot share an optimizer; leave out model_averaging_period, or pass shard_optimizer=False"
        )
    if averages and options.master_params:
        raise ValueError(
            "expected model averaging or fp32 master parameters, found both: what would be averaged are the rounded "
            "parameters; leave out model_averaging_period, or pass master_params=False"
        )


def _averages_weights(module: pl.LightningModule) -> bool:
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, _WEIGHT_AVERAGING) for callback in callbacks)


def _zero_loss(loss: Tensor) -> Tensor:
    """A loss that reaches no parameter."""
    return torch.zeros_like(loss, requires_grad=True)


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


def register() -> None:
    """Registers this package's strategies with Lightning's Trainer. Importing the package does it."""
    BucketDDPStrategy.register_strategies(StrategyRegistry)
