"""``Trainer(strategy="bucketddp")``: Lightning's lifecycle around ``BucketDDP``."""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import finishes_within, is_accelerator, wait_for_device
from lightning_bucketddp.layout.options import TrainerOptions
from lightning_bucketddp.optim.checkpoint_writer import CheckpointWriter
from lightning_bucketddp.optim.stepped import params_of
from lightning_bucketddp.peers.abort_listener import AbortListener, tell_failure
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.end_signals import end_signals
from lightning_bucketddp.peers.names import in_words, this_process
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.trainer import checkpoints, common, finetuning
from lightning_bucketddp.trainer.common import forwarded
from lightning_bucketddp.trainer.ddp_hooks import with_ddp_hook
from lightning_bucketddp.trainer.exact_evaluation import EachSampleOnce
from lightning_bucketddp.trainer.exact_resume import ExactResume
from lightning_bucketddp.trainer.launchers import ScriptLauncher, TellingLauncher
from lightning_bucketddp.trainer.layer_sync import BatchNormSync
from lightning_bucketddp.trainer.precision import adapt_precision
from lightning_bucketddp.trainer.sampled_epoch import begin_epoch_anew
from lightning_bucketddp.trainer.sigterm import GOT_SIGTERM, quieten_sigterm
from lightning_bucketddp.trainer.uneven_loader import EvenedLoader, require_countable_batches
from lightning_bucketddp.trainer.wrapper import BucketDDPInTrainer, hold_schedulers
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP
from lightning_bucketddp.wrapper.validation import require_no_sync_batchnorm

_log = logging.getLogger(__name__)

DEVICE_SECONDS = 5.0
"""How long an accelerator may take, after a failure, to end what it was given."""


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
        model_averaging_period: With a ``PostLocalSGDState``: average parameters once in this many steps.
        process_group_backend: E.g. ``"nccl"`` or ``"gloo"``; by device if None.
        timeout: How long collectives, and agreements through the store, wait; torch's 30 minutes by default.
        start_method: How processes are started: ``"popen"`` (the default) starts the script once more for each;
            ``"spawn"``, ``"fork"`` and ``"forkserver"`` are ``torch.multiprocessing``'s.
        state_dict_type: CHECKPOINTS AND DATA. How checkpoints are saved. ``"full"`` (the default): one file that any
            strategy loads. ``"sharded"``: a directory to which every rank writes its own parts, in the format of
            ``torch.distributed.checkpoint`` (torch's ``dcp_to_torch_save`` makes a file of it). Both load with either
            choice, at any number of ranks.
        async_save: With ``state_dict_type="sharded"``: a checkpoint is copied to the host, and a thread writes it while
            training goes on. The checkpoint gets its name when it is complete, and older ones are removed then. The
            checkpoint of a later step, loading, the end of ``fit`` and a preemption wait for it. If it cannot be
            written, the next save, or the end of ``fit``, raises the error on all ranks.
        uneven_inputs: Lets ranks have different numbers of training batches. A rank that runs out repeats its last
            batch until all have run out, so that loops, hooks and collectives stay in step. Its gradients and module
            buffers then do not count; what it logs does. Gradients are divided by the ``"world_size"``, or by the
            number of ``"active_ranks"``, which have batches. Costs one tiny collective per batch, before which the
            host waits for an accelerator. None: ranks must have the same number of batches.
        exact_evaluation: Validation and test take each sample once. By default Lightning's sampler repeats some, so
            that ranks have equally many. Here they have equally many batches, and the last one or two of a rank are
            smaller. Epoch means with ``sync_dist=True`` weigh by samples. Samplers of your own are left alone.
        exact_resume: A checkpoint says which samples of an epoch are left, and what each rank needs to take them as the
            undisturbed run would have. A resumed run then ends with its weights, bit for bit if kernels are
            deterministic. On another number of ranks it takes each sample that is left once. Data loading workers seed
            their generators for each batch. What cannot be resumed so is named when training starts.
        logged_keys: Which keys ranks may log with ``self.log(..., sync_dist=True)``. ``"same"`` (the default): all
            ranks the same ones. A key that a rank lacks is an error on all ranks. ``"any"``: a rank may lack keys that
            others have logged in the batches of an epoch. Their epoch value is that of the ranks that have them. Costs
            one tiny collective per epoch and dataloader. Values of ``on_step=True`` need all ranks in either case.
        options: The fields of :class:`Options`, which documents them.

    Raises:
        TypeError: If an option has a value of the wrong type.
        ValueError: If an option is out of range, cannot be honoured or contradicts another; says which.
    """

    leaves_out_collectives = False  # the Trainer's, in a trial of a batch size

    @common.list_options(DDPStrategy, TrainerOptions)
    def __init__(self, *args: Any, **given: Any) -> None:
        lightnings, options = common.divided(type(self).__name__, DDPStrategy, TrainerOptions, args, given)
        self._options = with_ddp_hook(TrainerOptions(**options), lightnings)  # raises before ranks are started
        lightnings["ddp_comm_state"] = self._options.comm_hook_state
        lightnings |= common.of_torch(options)  # for programs that look at them
        super().__init__(exact_evaluation=self._options.exact_evaluation, **lightnings)
        self.exact_resume = ExactResume(self, self._options.exact_resume)
        self._writer: CheckpointWriter | None = None  # while training, with `async_save`
        self._evened_loader: EvenedLoader | None = None
        self._listener: AbortListener | None = None
        self._peers: Peers | None = None  # the ranks of the default group, as far as this strategy knows them
        self._until_teardown = ExitStack()
        self._ended: BucketDDP | None = None  # the last fit's wrapper, for trainer.save_checkpoint() with shards
        self._trainable_at_setup: finetuning.Trainable | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which leave out what belongs to this process and its group."""
        left_out = dict.fromkeys(("_writer", "_evened_loader", "_listener", "_peers", "_ended"))
        return {**super().__getstate__(), **left_out, "_until_teardown": ExitStack()}

    @property
    def bucket_ddp(self) -> BucketDDPInTrainer | None:
        """The wrapper around the LightningModule during ``fit``; None otherwise."""
        return self.model if isinstance(self.model, BucketDDPInTrainer) else None

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def setup_distributed(self) -> None:
        self._listener = common.set_up_group(super().setup_distributed, self._options, self._interrupted)
        if self._listener is not None:
            self._until_teardown.callback(self._listener.end_fit)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = TellingLauncher(self, self._start_method)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if type(self._layer_sync) is TorchSyncBatchNorm:  # of sync_batchnorm=True, not a user's own subclass
            self._layer_sync = BatchNormSync(self._timeout)
        quieten_sigterm(trainer)
        super().setup(trainer)
        if (wrapper := self.bucket_ddp) is not None:
            for optimizer in self.optimizers:  # before a checkpoint's state is loaded into them, which has the masters
                wrapper.prepare_optimizer(optimizer)
                self._warn_of_other_params(optimizer, wrapper)
            if self._options.skips_steps:
                self._until_teardown.callback(hold_schedulers(trainer, wrapper))
        if self._listener is None or self.world_size == 1:
            return
        if self._peers is None:
            self._peers = self._ranks().peers
            self._until_teardown.callback(self._peers.end_training)
        try:
            from lightning_bucketddp.trainer.logged_keys import LoggedKeys, install

            install(trainer, LoggedKeys(self, self._options.logged_keys == "any"))
        except (ImportError, AttributeError):  # a Lightning without these private names; then `self.log` is its own
            if self._options.logged_keys == "any" or self._options.exact_evaluation:
                raise

    def _warn_of_other_params(self, optimizer: Optimizer, wrapper: BucketDDP) -> None:
        own = {id(param) for param in wrapper.parameters()}
        trained = [param for param in params_of(optimizer) if param.requires_grad and id(param) not in own]
        if trained and self.world_size > 1:
            rank_zero_warn(
                f"expected optimizers of the LightningModule's parameters, found {len(trained)} in "
                f"{type(optimizer).__name__} that it does not have, the first of shape {tuple(trained[0].shape)}. "
                "Their gradients are not averaged, and ranks drift apart. Assign them to an attribute of the module, "
                "or put them into an nn.ParameterList or nn.ParameterDict in it"
            )

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, pl.LightningModule)
        if self._options.uneven_inputs and self.world_size > 1 and is_accelerator(self.root_device):
            # There the layers are torch's own.
            require_no_sync_batchnorm(self.model, "uneven_inputs on an accelerator", "has no batch left")
        self._ended = None
        self._trainable_at_setup = finetuning.trainable_state(self.model)
        self.model = wrapper = BucketDDPInTrainer(self.model, self)
        if self._options.uneven_inputs == "active_ranks":
            wrapper._uneven.divide_by_active()
        if wrapper._runtime.collectives.is_default():
            self._peers = wrapper._passes.peers
        sharded = self._options.shard_optimizer
        self._until_teardown.callback(adapt_precision(self.precision_plugin, wrapper, sharded))

    @override
    def teardown(self) -> None:
        self._end_writer()  # is there after an exception
        self._free_device()
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.module.zero_grad()  # else they are copied out of the buffers, which takes as much memory again
            wrapper.close()
            self.model = self.lightning_module
            if (
                self._options.shard_optimizer or self._options.state_dict_type == "sharded"
            ):  # else a destroyed group would stay
                self._ended = wrapper
        self.exact_resume.end()
        self._until_teardown.close()
        self._evened_loader = self._listener = self._peers = None
        super().teardown()

    def _free_device(self) -> None:
        """After a failure, abort what the device waits for: ranks that do not come."""
        listener = self._listener
        if listener is None or not listener.failure or not is_accelerator(self.root_device):
            return
        if not finishes_within(self.root_device, DEVICE_SECONDS):
            listener.abort()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._listener is not None:  # the others may wait for this rank, in a pass or elsewhere
            what = GOT_SIGTERM if isinstance(exception, SIGTERMException) and not end_signals.ending else ""
            if what:  # it ends without another word
                _log.error("%s %s", in_words([self.global_rank], {self.global_rank: this_process()}), what)
            tell_failure(exception, what)

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
        if self._peers is None or group not in (None, dist.group.WORLD):
            return nullcontext()
        return self._peers.trainers_collective(f"the Trainer's {name}")

    def _ranks(self) -> Ranks:
        """All ranks. They must call this at the same point of the program."""
        collectives = Collectives(None)
        return Ranks(collectives, self._peers or Peers(collectives, self._timeout))

    def _interrupted(self) -> bool:
        """Whether this rank handles an exception. If a callback saves a checkpoint then, other ranks may be gone."""
        with suppress(RuntimeError):  # the module has no Trainer
            return self.lightning_module is not None and self.lightning_module.trainer.interrupted
        return False

    # -- each step -----------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        wrapper = self.bucket_ddp
        if wrapper is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
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
            output = wrapper.loss_of_none()
        return output

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        wrapper = self.bucket_ddp
        if wrapper is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        given = None if closure is do_nothing_closure else closure  # Lightning's word for no closure
        step = partial(super().optimizer_step, optimizer, closure=do_nothing_closure, model=model, **kwargs)
        return wrapper.run_step(optimizer, given, step)

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
        if module is not None and module.trainer.training:
            self.exact_resume.take_in(dataloader)
        if self._options.uneven_inputs is None or module is None or not module.trainer.training:
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
        if (module := self.lightning_module) is not None:
            begin_epoch_anew(module.trainer)
            self.exact_resume.begin()
        self._end_writer()  # is there if the search for a batch size has broken a training off
        if self._options.async_save and (wrapper := self.bucket_ddp) is not None and (module := self.lightning_module):
            self._writer = checkpoints.start_writer(wrapper, module.trainer, self._until_teardown)

    @override
    def on_train_end(self) -> None:
        if (wrapper := self.bucket_ddp) is not None:
            wrapper.wait_for_parameters()
            wrapper._end_training()  # first: a rank with more batches must hear of it, as it does not come here
            wrapper.synchronise_module_buffers()
            wrapper._compare_ranks()
            wrapper._runtime.require_right()
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
        if not self._is_known_to_be_right():
            rank_zero_warn(
                f"not saved: {filepath}. Ranks failed; parameters may have been updated with gradients of one rank"
            )
            return
        if self.lightning_module is not None:
            finetuning.add_trainable(checkpoint, self.lightning_module, self._trainable_at_setup)
            self.exact_resume.add_to(checkpoint)
        if not self._saves_parts():
            self._end_writer()  # it may be writing a checkpoint of that name
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        module, wrapper, writer = self.lightning_module, self.bucket_ddp or self._ended, self._writer
        assert module is not None
        path = Path(self.broadcast(filepath))
        if writer is not None:
            writer.begin(path, module.trainer.global_step)
        checkpoints.save_parts(
            checkpoint, path, module, wrapper, self._ranks(), self.optimizers, storage_options, writer
        )

    def _is_known_to_be_right(self) -> bool:
        """Whether a device has trained with values of all ranks. The host waits, and reads what it is told late.

        False after an abort, after which a device goes on with any values, and for a mismatch while an exception is
        handled.

        Raises:
            PeerFailureError, RankMismatchError: If it has not, and no exception is being handled.
        """
        if not is_accelerator(self.root_device) or not dist.is_initialized():
            return True
        self._free_device()  # the listener aborts nothing when this rank raises by itself
        wait_for_device(self.root_device)
        wrapper, default = self.bucket_ddp, Collectives(None)
        own = default if wrapper is None else wrapper._runtime.collectives
        try:
            if self._peers is not None and not self._interrupted():
                self._peers.require_usable()
            if default.left_behind() or own.left_behind():  # after an abort a device goes on with any values
                return False
            if wrapper is not None:
                wrapper._passes.wrapped.context.control.read_what_arrived()
        except RankMismatchError:
            if not self._interrupted():
                raise
            return False
        return True

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

    def _saves_parts(self) -> bool:
        """Whether each rank saves its own parts.

        While an exception is handled, other ranks may be gone. After ranks that were spawned, only the main process is.
        """
        return self._options.state_dict_type == "sharded" and dist.is_initialized() and not self._interrupted()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.settle()
        checkpoint_path = self.broadcast(checkpoint_path)  # a batch-size finder's has another name on each rank
        path = Path(checkpoint_path)
        if not checkpoints.is_checkpoint_directory(path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        return checkpoints.load_weights(path, self.lightning_module, self.bucket_ddp, self._ranks(), weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module is not None:
            finetuning.restore_trainable(checkpoint, self.lightning_module)
        if self.bucket_ddp is not None:
            self.exact_resume.restore(checkpoint)
        if (directory := checkpoint.get(checkpoints.DIRECTORY_KEY)) is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.bucket_ddp is not None
        parts = self.bucket_ddp._runtime.optimizers.checkpoint()
        parts.load(directory, self.optimizers, strict=True, with_module=False)

    __repr__ = common.described
