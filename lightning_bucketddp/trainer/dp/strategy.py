"""``Trainer(strategy="bucketdp")``: several devices in one process, without launching anything."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from typing_extensions import override

from lightning_bucketddp.replicas.module_copies import require_copyable
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.trainer.dp.batch_division import ScatterBatch, divide
from lightning_bucketddp.trainer.dp.doubts import StepMemory
from lightning_bucketddp.trainer.dp.step import ReplicaStep

NAME = "bucketdp"
"""The name by which the Trainer knows the strategy."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class BucketDPStrategy(ParallelStrategy):
    """Data-parallel training in one process: each batch is divided among replicas of the LightningModule, in threads.

    Registered as ``bucketdp`` by importing ``lightning_bucketddp``. For notebooks, debuggers and systems where
    processes cannot be started: ``Trainer(accelerator="cpu", devices=2, strategy="bucketdp")`` is all there is to
    it. To the Trainer, the callbacks and the optimizers it is training on one device: there is one rank, one
    LightningModule, one set of batches, and checkpoints are those of a single device. Where each GPU can have a
    process of its own, ``bucketddp`` is faster, as Python runs one thread at a time.

    A batch's samples, which lie along the first dimension of its tensors, are divided among the devices, and steps
    end as one device would have ended them:

    - The loss is the mean of the replicas' losses, weighted by their samples. There is one backward.
    - Outputs are concatenated, and numbers averaged or, if they are integers, added up; see :func:`merge`. So is what
      all replicas append to a list that is an attribute of the LightningModule. Integers that are no counts stay as
      they are under a name that says so, with idx, index, epoch, step, seed, dim or classes in it; the step's
      position without a name, as in ``return batch_idx, predictions``, is added up with a warning.
    - ``self.log`` is called once: with the mean weighted by batch sizes, or the sum, minimum or maximum, as its
      ``reduce_fx`` says. Of integers that differ, or that are the numbers of samples, it is the sum.
    - Metrics of torchmetrics get what all replicas give them in one piece. Calls that return something, as
      ``self.accuracy(...)``, have to be made in all replicas; ``update`` may be called in some.
    - In manual optimisation, replicas wait for each other wherever something is changed that they share:
      ``manual_backward``, what optimizers and schedulers do, toggling and clipping happen once for all of them.

    Lists, deques and dicts that are attributes of the module and its submodules are each replica's own during a step,
    and the first one's hold what all have added when it has ended. Hooks, methods, ``functools.partial`` and nested
    functions that refer to ``self`` see their own replica; one that keeps such a list or dict in a variable of its own
    still sees the first one's. Other attributes that a step sets stay if the first replica set them; other objects
    that it changes are changed by all replicas. Module buffers keep what the first replica makes of them; where
    numbers or buffers lose what the others have counted, a warning says so once. BatchNorm has statistics of each
    replica's samples, and keeps the first one's; a last batch that leaves a replica one sample fails in it as a batch
    of one does, which ``drop_last=True`` avoids. Profilers record what the first replica does.

    What a step has to observe:

    - Losses must be means over samples: of sums, the mean over the replicas is not what one device would have had.
      Nor is it of means over something else, of which replicas may have more or less: of tokens, of samples weighted by
      their classes, or of those that ``ignore_index`` leaves. The same holds for floating-point numbers that are
      returned or logged without their ``batch_size``.
    - What is returned has the samples along its first dimension, or is a number: of vectors and matrices that are made
      of all samples, such as a mean over them or a confusion matrix, one device would have had one, which a metric
      makes. A fixed number of values is a tuple or a dict, not a list.
    - In manual optimisation, gradients are clipped by ``self.clip_gradients``, and otherwise changed in
      ``on_before_optimizer_step``: a step that changes them itself, as by ``torch.nn.utils.clip_grad_norm_``, would do
      so once in each replica on the same gradients, and raises.
    - Outputs keep their first dimension: ``squeeze(1)`` in the place of ``squeeze()``, which cannot be told from
      another output where every replica has one sample.
    - Replicas of one device run one after the other, up to the next call that all of them make: steps that wait for
      each other in ways of their own would wait for ever.

    Args:
        accelerator: The accelerator; set by the Trainer.
        parallel_devices: The devices; set by the Trainer.
        cluster_environment: Set by the Trainer; may have no more than one process.
        checkpoint_io: How checkpoints are read and written.
        precision_plugin: The precision; set by the Trainer.
        scatter_batch: Divides batches that are not made of tensors with the samples along the first dimension, in
            lists, tuples, dicts and dataclasses: gets a batch and the number of devices, and returns a list of at most
            as many pairs, a shard and its number of samples.

    Raises:
        ValueError: If there are several nodes or processes, or an option of the Trainer cannot be honoured.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        scatter_batch: ScatterBatch | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._scatter_batch = scatter_batch
        self._share = True
        self._replicas: Replicas | None = None
        self._memory = StepMemory()

    # -- one rank ------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    def num_nodes(self) -> int:
        """One."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count != 1:
            raise ValueError(
                f'expected one node with strategy="bucketdp", which has one process, found num_nodes={count}; use '
                'strategy="bucketddp" for several nodes'
            )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """There is nobody to wait for."""

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return obj

    # -- setting up and taking down ------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        environment = self.cluster_environment
        if environment is not None and environment.world_size() > 1:
            raise ValueError(
                f'expected one process with strategy="bucketdp", found {environment.world_size()} in '
                f'{type(environment).__name__}; start one, or use strategy="bucketddp"'
            )
        super().setup_environment()

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        assert self.parallel_devices is not None
        if self._layer_sync is not None:
            raise ValueError(
                'expected Trainer(sync_batchnorm=False) with strategy="bucketdp", whose replicas each have the '
                f"statistics of their own samples, found {type(self._layer_sync).__name__}; leave it out, or use "
                'strategy="bucketddp"'
            )
        if len(self.parallel_devices) > 1:
            _require_replicable(self.lightning_module)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        self._replicas = None
        self._memory.forget()
        super().teardown()

    # -- steps ---------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._step("training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, **kwargs)

    def _step(self, hook: str, batch: Any, *args: Any) -> Any:
        module, devices = self.lightning_module, self.parallel_devices
        assert module is not None
        assert devices is not None
        if len(devices) > 1:
            division = divide(batch, devices, self._scatter_batch)
            if len(division.shards) > 1:
                if self._replicas is None:
                    self._replicas = Replicas(module, devices, share=self._share)
                return ReplicaStep(module, hook, self._replicas, division, self._memory).run(*args)
            (batch,) = division.shards
        return getattr(module, hook)(batch, *args)


def _require_replicable(module: pl.LightningModule) -> None:
    require_copyable(module)
    for hook in _STEPS:
        if hook in vars(module):
            raise TypeError(
                f"expected {hook} as a method of {type(module).__name__}, found one that was set on the instance, "
                "which replicas could not be given; define it in the class"
            )
        if is_param_in_hook_signature(getattr(module, hook), "dataloader_iter", explicit=True):
            raise TypeError(
                f"expected a batch as argument of {hook}, which is divided among the devices, found dataloader_iter; "
                "take a batch"
            )
    synchronised = [name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if synchronised:
        rank_zero_warn(
            f'SyncBatchNorm synchronises processes, and strategy="bucketdp" has one: {", ".join(synchronised[:3])} '
            "will have the statistics of each replica's samples, as BatchNorm has"
        )


def register() -> None:
    """Registers the strategy with Lightning's Trainer. Importing the package does it."""
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, BucketDPStrategy, description="BucketDP strategy: devices of one process")
