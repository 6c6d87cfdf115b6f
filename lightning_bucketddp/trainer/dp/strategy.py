"""``Trainer(strategy="bucketdp")``: several devices in one process, without launching anything."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_bucketddp.replicas.module_copies import require_copyable, require_no_collectives
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.trainer.common import described
from lightning_bucketddp.trainer.dp.batch_division import ScatterBatch, divide
from lightning_bucketddp.trainer.dp.step import ReplicaSteps


class BucketDPStrategy(ParallelStrategy):
    """Data-parallel training in one process: each batch is split among replicas of the LightningModule.

    Importing ``lightning_bucketddp`` registers it as ``bucketdp``. It is for notebooks, debuggers and systems where
    processes cannot be started. Where each device can have a process, ``bucketddp`` is faster. To the Trainer,
    callbacks, optimizers and checkpoints there is one device. ``training_step``, ``validation_step``, ``test_step`` and
    ``predict_step`` run on each replica with its samples. Replicas of one device take turns.

    - What steps return is merged: floating-point scalars are averaged by samples. Tensors have one row per sample and
      are concatenated. Containers are merged item by item, None stays None. Anything else is an error.
    - ``self.log`` takes floating-point values and logs their mean by samples (by ``batch_size``, if the step gives that
      of its part), once. Other numbers need ``reduce_fx="sum"``, ``"min"`` or ``"max"``.
    - Metrics of torchmetrics are the replica's own during a step. Their states are merged after it.
    - Attributes that a replica sets are its own and gone after the step. Objects that it changes are everybody's.
    - Module buffers are what the first replica makes of them. BatchNorm normalises each replica's samples.
    - A step may not change parameters (do it in ``on_train_batch_end``). Manual optimisation is an error.

    Args:
        accelerator: The accelerator; set by the Trainer.
        parallel_devices: The devices; set by the Trainer.
        cluster_environment: Set by the Trainer; may have no more than one process.
        checkpoint_io: How checkpoints are read and written.
        precision_plugin: The precision; set by the Trainer.
        scatter_batch: Splits other batches than tensors in lists, tuples, dicts and dataclasses. Gets a batch and the
            number of devices. Returns at most as many pairs of a shard and its number of samples. By default
            :func:`batch_division.divide`.

    Raises:
        ValueError: If there are several nodes or processes, or an option of the Trainer cannot be honoured.
    """

    num_nodes = 1  # the Trainer's

    def __init__(self, *args: Any, scatter_batch: ScatterBatch | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scatter_batch = scatter_batch
        self._share = True
        self._steps: ReplicaSteps | None = None

    __repr__ = described

    # -- one rank ------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """There is nobody to wait for."""

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return obj

    # -- set-up and teardown -------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        if self.num_nodes > 1 or self.world_size > 1:
            raise ValueError(
                f'expected one node and one process with strategy="bucketdp", found num_nodes={self.num_nodes} and '
                f"{self.world_size} processes in {type(self.cluster_environment).__name__}; start one, or use "
                'strategy="bucketddp"'
            )
        super().setup_environment()

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None:
            raise ValueError(
                'expected Trainer(sync_batchnorm=False) with strategy="bucketdp", whose replicas each have the '
                f"statistics of their own samples, found {type(self._layer_sync).__name__}; leave it out, or use "
                'strategy="bucketddp"'
            )
        if trainer.num_devices > 1:
            module = trainer.lightning_module
            require_copyable(module)
            if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
                raise ValueError(
                    'expected automatic optimisation with strategy="bucketdp", whose replicas would each step the '
                    f"optimizers, found automatic_optimization=False in {type(module).__name__}; use "
                    'Trainer(strategy="bucketddp_notebook"), which starts a process per device'
                )
            require_no_collectives(module)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        self._steps = None
        super().teardown()

    # -- steps ---------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", self.precision_plugin.train_step_context(), *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    def _step(self, hook: str, precision: AbstractContextManager[None], batch: Any, *args: Any) -> Any:
        module, devices = self.lightning_module, self.parallel_devices or []
        assert module is not None
        with precision:
            if len(devices) == 1:
                return getattr(module, hook)(batch, *args)
            if self._steps is None:
                self._steps = ReplicaSteps(module, Replicas(module, devices, share=self._share))
            return self._steps.run(hook, divide(batch, devices, self._scatter_batch), *args)
