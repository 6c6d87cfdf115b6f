"""``Trainer(strategy="bucketddp")``: Lightning's lifecycle around ``BucketDDP``."""

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import DEFAULT_TIMEOUT, Options
from lightning_bucketddp.layout.registry import REGISTERED, register_names
from lightning_bucketddp.layout.require import require, require_choice
from lightning_bucketddp.optim.checkpoint_writer import CheckpointWriter
from lightning_bucketddp.peers.abort_listener import AbortListener, listen, tell_failure
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.trainer import checkpoints, common, finetuning
from lightning_bucketddp.trainer.batch_size_finder import require_ours
from lightning_bucketddp.trainer.common import BucketDDPInLightning, StartMethod, forwarded
from lightning_bucketddp.trainer.ddp_hooks import require_averaging_possible, with_ddp_hook
from lightning_bucketddp.trainer.exact_evaluation import EachSampleOnce
from lightning_bucketddp.trainer.launchers import ScriptLauncher, TellingLauncher
from lightning_bucketddp.trainer.layer_sync import BatchNormSync
from lightning_bucketddp.trainer.precision import adapt_precision
from lightning_bucketddp.trainer.samples import SampleCount
from lightning_bucketddp.trainer.sigterm import quieten_sigterm
from lightning_bucketddp.trainer.uneven_loader import EvenedLoader, require_countable_batches
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP


class BucketDDPStrategy(EachSampleOnce):
    """Data-parallel training in one process per device, with gradients averaged by :class:`BucketDDP`.

    ``import lightning_bucketddp`` registers it as ``bucketddp``, ``bucketddp_spawn``, ``bucketddp_fork`` and
    ``bucketddp_notebook``. Names that begin with ``bucketddp_sharded`` add ``shard_optimizer``; names may end in
    ``_find_unused_parameters_true`` or ``_false``. A subclass of ``DDPStrategy``, so that Lightning treats it as its
    own. Nothing of torch's ``DistributedDataParallel`` is used.

    Takes all arguments of ``DDPStrategy`` and torch DDP, except torch's experimental ones (``mixed_precision``,
    ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``).

    Args:
        accelerator: LIGHTNING'S ARGUMENTS. The accelerator; set by the Trainer.
        parallel_devices: This node's devices; set by the Trainer.
        cluster_environment: Where ranks and the main address come from; set by the Trainer.
        checkpoint_io: How checkpoints are read and written.
        precision_plugin: The precision; set by the Trainer.
        ddp_comm_state: ``DDPStrategy``'s name for ``comm_hook_state``.
        ddp_comm_hook: ``DDPStrategy``'s name for ``comm_hook``. Hooks work on every backend.
        ddp_comm_wrapper: Wraps the communication hook, as torch's ``fp16_compress_wrapper`` does.
        model_averaging_period: With a ``PostLocalSGDState``: parameters are averaged every so many steps.
        process_group_backend: E.g. ``"nccl"`` or ``"gloo"``; by device if None.
        timeout: How long collectives, and agreements through the store, wait; torch's 30 minutes by default.
        start_method: How processes are started.
        state_dict_type: CHECKPOINTS AND DATA. How checkpoints are saved. ``"full"``: one file that any strategy loads.
            ``"sharded"``: a directory to which every rank writes its own parts, in the format of
            ``torch.distributed.checkpoint`` (torch's ``dcp_to_torch_save`` makes a file of it). Both load with either
            choice, at any number of ranks.
        async_save: With ``state_dict_type="sharded"``: a checkpoint is copied to the host, and a thread writes it while
            training goes on. It has its name when it is complete, and older ones are removed then. A checkpoint of a
            later step waits for it. So do loading, the end of ``fit`` and a preemption. If it cannot be written, the
            next save, or the end of ``fit``, raises that on all ranks.
        uneven_inputs: Lets ranks have different numbers of training batches. A rank that runs out repeats its last
            batch until all have run out, so that loops, hooks and collectives stay in step. Its gradients and module
            buffers then do not count; what it logs does. Gradients are divided by the ``"world_size"``, or by the
            number of ``"active_ranks"``, which have batches. Costs one tiny collective per batch. None: ranks must
            have the same number of batches.
        exact_evaluation: Validation and test take each sample once. By default Lightning's sampler repeats some, so
            that ranks have equally many. Here they have equally many batches, and the last one or two of a rank are
            smaller. Epoch means with ``sync_dist=True`` weigh by samples. Samplers of your own are left alone.
        logged_keys: Which keys ranks may log with ``self.log(..., sync_dist=True)``. ``"same"``: all ranks the same
            ones. A key that a rank lacks is an error on all ranks. ``"any"``: a rank may lack keys that others have
            logged in the batches of an epoch. Their epoch value is that of the ranks that have them. Costs one tiny
            collective per epoch and dataloader. Values of ``on_step=True`` need all ranks in either case.
        options: The fields of :class:`Options`, which documents them.

    Raises:
        TypeError: If an option has a value of the wrong type.
        ValueError: If an option is out of range, cannot be honoured or contradicts another; says which.
    """

    leaves_out_collectives = False  # the Trainer's, in a trial of a batch size

    @common.list_options
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
        async_save: bool = False,
        uneven_inputs: Literal["world_size", "active_ranks"] | None = None,
        exact_evaluation: bool = False,
        logged_keys: Literal["same", "any"] = "same",
        **options: Any,
    ) -> None:
        checked = Options(timeout=timeout, **options)  # raises before ranks are started
        self._options = with_ddp_hook(checked, ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        common.require_start_method(start_method)
        require_choice("state_dict_type", state_dict_type, ("full", "sharded"))
        require_choice("uneven_inputs", uneven_inputs, ("world_size", "active_ranks"), optional=True)
        require("async_save", async_save, "True or False", bool)
        if async_save and state_dict_type != "sharded":
            raise ValueError(
                f'expected state_dict_type="sharded" with async_save=True, found {state_dict_type!r}: a single file is '
                "written by a CheckpointIO. Give the Trainer Lightning's AsyncCheckpointIO for that"
            )
        require("exact_evaluation", exact_evaluation, "True or False", bool)
        require_choice("logged_keys", logged_keys, ("same", "any"))
        if uneven_inputs == "active_ranks" and self._options.rescales:
            raise ValueError(
                'expected uneven_inputs="active_ranks" or gradient_divide_by, found both: each says what gradients are '
                "divided by. Leave one of them out"
            )
        require_averaging_possible(model_averaging_period, self._options)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=self._options.comm_hook_state,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            exact_evaluation=exact_evaluation,
        )
        self._state_dict_type = state_dict_type
        self._async_save = async_save
        self._writer: CheckpointWriter | None = None  # while training, with `async_save`
        self._uneven_inputs = uneven_inputs
        self._logged_keys = logged_keys
        self._evaluation_peers: Peers | None = None
        self._evened_loader: EvenedLoader | None = None
        self._listener: AbortListener | None = None
        self._ended: BucketDDP | None = None  # the last fit's wrapper, for trainer.save_checkpoint() with shards
        self._restore_precision: Callable[[], None] | None = None
        self._trainable_at_setup: finetuning.Trainable | None = None
        self._warned_of_none = False
        self._schedulers_held = False

    @property
    def bucket_ddp(self) -> "BucketDDPInTrainer | None":
        """The wrapper around the LightningModule during ``fit``; None otherwise."""
        return self.model if isinstance(self.model, BucketDDPInTrainer) else None

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def setup_distributed(self) -> None:
        if (module := self.lightning_module) is not None and module._trainer is not None:
            require_ours(module.trainer.callbacks)  # type: ignore[attr-defined]
        with common.group_set_up(self._timeout):
            super().setup_distributed()
            if dist.is_initialized():  # not if a test mocks `init_process_group`
                self._listener = listen(Collectives(None), self._options.report_after)
                self._listener.begin(self._interrupted)  # ends the last fit, before ranks wait for one another

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = TellingLauncher(self, self._launcher._start_method)
        elif isinstance(self._launcher, _SubprocessScriptLauncher):
            self._launcher = ScriptLauncher(self._launcher.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if type(self._layer_sync) is TorchSyncBatchNorm:  # of sync_batchnorm=True, not a user's own subclass
            self._layer_sync = BatchNormSync(self._timeout)
        quieten_sigterm(trainer)
        super().setup(trainer)
        if self._listener is None or self.world_size == 1:
            return
        if self.bucket_ddp is None:
            self._evaluation_peers = Peers(Collectives(None), self._timeout)
        self._agree_on_logged_keys(trainer)

    def _agree_on_logged_keys(self, trainer: pl.Trainer) -> None:
        try:
            from lightning_bucketddp.trainer.logged_keys import LoggedKeys, install

            install(trainer, LoggedKeys(self, self._logged_keys == "any"))
        except (ImportError, AttributeError):  # a Lightning without these private names; then `self.log` is its own
            if self._logged_keys == "any" or self._exact_evaluation:
                raise

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, pl.LightningModule)
        self._ended = None
        self._trainable_at_setup = finetuning.trainable_state(self.model)
        self.model = self._setup_model(self.model)
        self._restore_precision = adapt_precision(self.precision_plugin, self.model, self._options.shard_optimizer)

    @override
    def _setup_model(self, model: Module) -> BucketDDP:  # type: ignore[override]
        common.leave_shared_memory(model, self._start_method)
        wrapper = BucketDDPInTrainer(model, self, **vars(self._options))
        if self._uneven_inputs == "active_ranks":
            wrapper._uneven.divide_by_active()
        if self._options.gradient_divide_by == "samples":
            wrapper.samples = SampleCount()
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
        self._end_writer()  # is there after an exception
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.close()
            self.model = self.lightning_module
            if self._options.shard_optimizer or self._state_dict_type == "sharded":  # else a destroyed group would stay
                self._ended = wrapper
            self._release_schedulers()
            if self._restore_precision is not None:
                self._restore_precision()
                self._restore_precision = None
        if self._evaluation_peers is not None:
            self._evaluation_peers.end_training()
            self._evaluation_peers = None
        self._evened_loader = None
        if self._listener is not None:
            self._listener.end()
            self._listener = None
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._listener is not None:
            tell_failure(exception)  # the others may wait for this rank, in a pass or elsewhere

    # -- Lightning's collectives: other ranks may ask where this one waits -----------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not (self.leaves_out_collectives or self._interrupted()):
            with self._collective("barrier"):
                super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if self.leaves_out_collectives or self._interrupted():
            return obj
        with self._collective("broadcast"):
            return super().broadcast(obj, src)

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if self.leaves_out_collectives:
            return torch.stack([tensor] * self.world_size)
        with self._collective("all_gather", group):
            return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.leaves_out_collectives:
            return tensor
        with self._collective("reduce", group):
            return super().reduce(tensor, group, reduce_op)

    def _collective(self, name: str, group: Any = None) -> AbstractContextManager[None]:
        peers = self._peers
        if peers is None or group not in (None, dist.group.WORLD):
            return nullcontext()
        return peers.trainers_collective(f"the Trainer's {name}")

    @property
    def _peers(self) -> Peers | None:
        """The ranks of the default group, as far as this strategy knows them."""
        wrapper = self.bucket_ddp
        if wrapper is None:
            return self._evaluation_peers
        return wrapper._passes.peers if wrapper._runtime.collectives.is_default() else None

    def _interrupted(self) -> bool:
        """Whether this rank handles an exception. If a callback saves a checkpoint then, other ranks may be gone."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

    # -- each step -----------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        wrapper = self.bucket_ddp
        if wrapper is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        self._release_schedulers()
        wrapper.begin_step()
        if wrapper.samples is not None:
            wrapper.samples.look_at(args, kwargs)
        try:
            output = super().training_step(*args, **kwargs)
        except torch.OutOfMemoryError:
            # A manual step may have several backwards: nobody knows which ones the others run. A trial of a batch size
            # ends.
            automatic = self.lightning_module.automatic_optimization and not self.leaves_out_collectives
            if "oom" not in self._options.skip_step_on or not automatic:
                raise
            output = wrapper.skip_step("ran out of memory in training_step")
        if not self.lightning_module.automatic_optimization:  # otherwise backward is still to come
            wrapper.end_step()
        elif output is None and self.world_size > 1:
            # Take part with a loss that reaches no parameter: other ranks may have a real one.
            output = torch.zeros((), device=self.root_device, requires_grad=True)
            if wrapper.samples is not None:
                wrapper.samples.skip()
            if not self._warned_of_none:
                self._warned_of_none = True
                warnings.warn(
                    f"rank {self.global_rank}: `training_step` returned None. This counts as zero in the mean over the "
                    "ranks. If all ranks return None, nothing is updated. This warning is not repeated",
                    stacklevel=1,
                )
        return output

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if (wrapper := self.bucket_ddp) is not None and wrapper.samples is not None:
            wrapper.samples.count(wrapper)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        wrapper = self.bucket_ddp
        if wrapper is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if closure is not do_nothing_closure:  # Lightning's word for no closure
            closure = partial(self._closure, wrapper, optimizer, closure)
        elif common.gradients_dropped(wrapper):
            return None
        with common.stepping(wrapper, optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _closure(self, wrapper: BucketDDP, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Run the closure and return the loss for the optimizer: averaged over the ranks, if the optimizer uses it."""
        loss = common.run_closure(wrapper, closure, self._hold_schedulers)
        if common.looks_at_loss(optimizer):  # whether this rank has a loss or not
            loss = wrapper.average_loss(loss)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if all(param.grad is None for param in params):
                return None  # no rank had a loss: a scaler would fail without gradients, and skips the step of a None
        return loss

    def _hold_schedulers(self) -> None:
        """Have schedulers leave out their step, unless they follow epochs."""
        assert self.lightning_module is not None
        vars(self.lightning_module)["lr_scheduler_step"] = MethodType(_step_others, self.lightning_module)
        self._schedulers_held = True

    def _release_schedulers(self) -> None:
        if self._schedulers_held:
            vars(self.lightning_module).pop("lr_scheduler_step", None)
            self._schedulers_held = False

    # Of the wrapper, during `fit`. In `on_before_optimizer_step` gradients are as optimizers see them. In
    # `on_after_backward` fp16 mixed precision has them scaled.
    count_tokens = forwarded(BucketDDP.count_tokens)
    count_samples = forwarded(BucketDDP.count_samples)
    skip_step = forwarded(BucketDDP.skip_step)
    step_skipped = forwarded(BucketDDP.step_skipped)
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
    def process_dataloader(self, dataloader: Any) -> object:
        module = self.lightning_module
        if self._uneven_inputs is None or module is None or not module.trainer.training:
            return super().process_dataloader(dataloader)
        require_countable_batches(module, self._evened_loader)
        self._evened_loader = EvenedLoader(dataloader, self._exchange, self.global_rank)
        return self._evened_loader

    def _exchange(self, value: int) -> list[int]:
        if (wrapper := self.bucket_ddp) is not None:
            return wrapper._uneven.tell(value)
        # Not wrapped yet: the user has asked for `estimated_stepping_batches` in `setup` or `configure_model`.
        return self.all_gather(torch.tensor([value], device=self.root_device)).flatten().tolist()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # The training loop calls this first with a batch. Hooks from `on_after_batch_transfer` on may count tokens.
        wrapper, module = self.bucket_ddp, self.lightning_module
        if wrapper is not None and self._evened_loader is not None and module is not None and module.trainer.training:
            wrapper._uneven.set_active(self._evened_loader.take())
        return super().batch_to_device(batch, device, dataloader_idx)

    # -- the same module buffers on every rank ---------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        if (wrapper := self.bucket_ddp) is not None:
            wrapper._passes.peers.here.begin_validation()
            wrapper.wait_for_parameters()
            wrapper.synchronise_module_buffers()

    @override
    def on_train_start(self) -> None:
        self._end_writer()  # is there if the search for a batch size has broken a training off
        if self._async_save and (wrapper := self.bucket_ddp) is not None and (module := self.lightning_module):
            self._writer = checkpoints.start_writer(wrapper, module.trainer)

    @override
    def on_train_end(self) -> None:
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.wait_for_parameters()
            wrapper._end_training()  # first: a rank with more batches must hear of it, as it does not come here
            wrapper.synchronise_module_buffers()
            wrapper._compare_ranks()
        if self._writer is not None:
            self._writer.settle()
            self._end_writer()

    # -- checkpoints ---------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state, with ``shard_optimizer`` on rank 0 alone, which writes it.

        All ranks call this for each checkpoint. While an exception is handled, a rank returns its own part.
        """
        if self._saves_parts():
            return {}
        wrapper = self.bucket_ddp or self._ended
        if wrapper is None or not self._options.shard_optimizer:
            return super().optimizer_state(optimizer)
        return checkpoints.whole_state(wrapper, optimizer, self._interrupted())

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self.lightning_module is not None:
            finetuning.add_trainable(checkpoint, self.lightning_module, self._trainable_at_setup)
        if not self._saves_parts():
            self._end_writer()  # it may be writing a checkpoint of that name
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        module, wrapper, writer = self.lightning_module, self.bucket_ddp or self._ended, self._writer
        assert module is not None
        path = Path(self.broadcast(filepath))
        if writer is not None:
            writer.begin(path, module.trainer.global_step)
        checkpoints.save_parts(checkpoint, path, module, wrapper, self.optimizers, storage_options, writer)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self._writer is None:
            super().remove_checkpoint(filepath)
        else:
            self._writer.remove(partial(super().remove_checkpoint, filepath))

    def _end_writer(self) -> None:
        """Wait for the checkpoint that this rank writes. Later ones are written at once."""
        if self._writer is not None:
            self._writer.end()
            self._writer = None
            assert self.lightning_module is not None
            checkpoints.release_names(self.lightning_module.trainer)

    def _saves_parts(self) -> bool:
        """Whether each rank saves its own parts.

        While an exception is handled, other ranks may be gone. After ranks that were spawned, only the main process is.
        """
        return self._state_dict_type == "sharded" and dist.is_initialized() and not self._interrupted()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.settle()
        checkpoint_path = self.broadcast(checkpoint_path)  # a batch-size finder's has another name on each rank
        path = Path(checkpoint_path)
        if not checkpoints.is_checkpoint_directory(path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        return checkpoints.load_weights(path, self.lightning_module, self.bucket_ddp, weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module is not None:
            finetuning.restore_trainable(checkpoint, self.lightning_module)
        if self.bucket_ddp is not None:
            self.bucket_ddp._passes.wrapped.resume_order(checkpoint.get(checkpoints.ORDER_KEY, []))
        if (directory := checkpoint.get(checkpoints.DIRECTORY_KEY)) is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.bucket_ddp is not None
        parts = self.bucket_ddp._runtime.optimizers.checkpoint()
        parts.load(directory, self.optimizers, strict=True, with_module=False)

    __repr__ = common.described

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_names(strategy_registry, cls, REGISTERED)


def _step_others(module: pl.LightningModule, scheduler: Any, metric: Any) -> None:
    """``lr_scheduler_step`` after a skipped step: only schedulers that follow epochs step."""
    configs = module.trainer.lr_scheduler_configs
    if next(config.interval for config in configs if config.scheduler is scheduler) != "step":
        type(module).lr_scheduler_step(module, scheduler, metric)


class BucketDDPInTrainer(BucketDDPInLightning):
    """A wrapper whose module may be frozen entirely when ``fit`` starts, as callbacks may unfreeze it.

    Attributes:
        samples: Counts the samples of batches, with ``gradient_divide_by="samples"``.
    """

    _may_be_frozen = True
    samples: SampleCount | None = None

    @classmethod
    def of(cls, trainer: pl.Trainer, callback: pl.Callback) -> Self:
        """The wrapper of a Trainer in ``fit``, for a callback that needs one.

        Raises:
            MisconfigurationException: If the strategy is another one.
        """
        if isinstance(trainer.strategy.model, cls):
            return trainer.strategy.model
        name, found = type(callback).__name__, type(trainer.strategy).__name__
        raise MisconfigurationException(f"expected strategy='bucketddp' for {name}, found {found}")
