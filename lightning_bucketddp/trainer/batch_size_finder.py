"""Lightning's batch-size finder on several ranks: all of them find the same size."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder as LightningsFinder
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.memory import is_oom_error
from typing_extensions import override

from lightning_bucketddp.replicas.module_copies import first_sync_batchnorm
from lightning_bucketddp.trainer.replaced import replaced

_CALLS = ("batch_to_device", "training_step", "backward", "validation_step", "test_step", "predict_step")
"""The strategy's calls after which the ranks ask each other whether one has run out of memory."""


class BatchSizeFinder(LightningsFinder):
    """Lightning's ``BatchSizeFinder`` for ``Trainer(strategy="bucketddp")``, on any number of ranks.

    Lightning's own works on one device only. Here all ranks find the same size, the one for the rank with the least
    memory: if one of them runs out of memory in a step or in its backward, all end the trial after that call. Takes
    the arguments of Lightning's. In a trial ``self.log(sync_dist=True)`` and ``self.all_gather`` do not communicate.

    Raises:
        MisconfigurationException: As Lightning's. When the search begins, with manual optimisation or
            ``SyncBatchNorm``, or if batch sizes or datasets are of different sizes on the ranks.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str | None = None) -> None:
        seen: Any = _Undistributed(trainer) if hasattr(trainer.strategy, "bucket_ddp") else trainer
        super().setup(seen, pl_module, stage)

    @override
    def scale_batch_size(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Search for the batch size, on all ranks together."""
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "bucket_ddp"):
            super().scale_batch_size(trainer, pl_module)
            return
        trials = _Trials(trainer, pl_module)
        self._require_possible(trainer, pl_module, trials)
        calls = {name: trials.on_all_ranks(getattr(strategy, name)) for name in _CALLS}
        connector: Any = trainer._checkpoint_connector
        resumed = connector._loaded_checkpoint, connector._ckpt_path
        with replaced(strategy, **calls), replaced(pl_module, backward=trials.watched(pl_module.backward)):
            super().scale_batch_size(trainer, pl_module)
        # Lightning has loaded the state before the search in place of the checkpoint that `fit` resumes.
        connector._loaded_checkpoint, connector._ckpt_path = resumed

    def _require_possible(self, trainer: Any, pl_module: pl.LightningModule, trials: "_Trials") -> None:
        """Require that ranks search alike, and can end a trial together. All ranks call this."""
        if not pl_module.automatic_optimization or first_sync_batchnorm(pl_module) is not None:
            raise MisconfigurationException(
                "expected automatic optimisation and no SyncBatchNorm for BatchSizeFinder, found one of the two "
                "otherwise: a rank that runs out of memory could not take part in what the others wait for. Search "
                "without sync_batchnorm, or set the batch size yourself"
            )
        getattr(trainer, f"{trainer.state.fn.value}_loop").setup_data()
        prefix = trainer.state.stage.dataloader_prefix
        loaders = getattr(trainer, f"{prefix}_dataloader" if prefix == "train" else f"{prefix}_dataloaders")
        each = CombinedLoader(loaders).flattened
        samples = sum(sized_len(getattr(loader, "dataset", None)) or 0 for loader in each)
        found = trials.everyones(samples, sum(sized_len(loader) or 0 for loader in each))
        if any(rank != found[0] for rank in found):
            raise MisconfigurationException(
                f"rank {trainer.global_rank}: expected datasets and dataloaders of one length on all ranks for "
                f"BatchSizeFinder, found {found} samples and batches by rank. Begin with one batch size, and divide "
                "one dataset by a sampler"
            )


class _Trials:
    """Ends a trial on all ranks if one of them runs out of memory.

    Args:
        trainer: The Trainer.
        pl_module: Its module, in the modes in which trials begin.
    """

    def __init__(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.trainer, self.strategy, self._ran_out = trainer, trainer.strategy, False
        self._modes = [(module, module.training) for module in pl_module.modules()]

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that calls ``call``, and notes if memory runs out there."""

        def watching(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if not is_oom_error(error):
                    raise
                self._ran_out = True

        return watching

    def on_all_ranks(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that calls ``call``, and raises on all ranks if memory runs out on one.

        Meanwhile the Trainer's collectives are left out: a rank that runs out of memory does not come to each of them.
        """
        watched = self.watched(call)

        def calling(*args: Any, **kwargs: Any) -> Any:
            with replaced(self.strategy, leaves_out_collectives=True):
                output = watched(*args, **kwargs)
            ran_out, self._ran_out = self._ran_out, False
            ranks = [rank for rank, (failed,) in enumerate(self.everyones(ran_out)) if failed]
            if ranks:
                self._forget_trial()
                raise RuntimeError(f"rank(s) {ranks}: CUDA out of memory, or another device's")  # Lightning's words
            return output

        return calling

    def _forget_trial(self) -> None:
        """Drop gradients. Leave the stage and the modes of a validation in ``fit``, which Lightning would keep."""
        if (wrapper := self.strategy.bucket_ddp) is not None:
            wrapper._passes.wrapped.forget_gradients()
            self.trainer.training = True
        for module, training in self._modes:
            module.training = training

    def everyones(self, *numbers: int) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        mine = torch.tensor(numbers, device=self.strategy.root_device)
        found: list[list[int]] = self.strategy.all_gather(mine).view(-1, len(numbers)).tolist()
        return found


class _Undistributed:
    """A Trainer as the finder's ``setup`` sees it: Lightning's refuses several ranks, and checks the rest."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return (
            SimpleNamespace(is_distributed=False) if name == "_accelerator_connector" else getattr(self.trainer, name)
        )
