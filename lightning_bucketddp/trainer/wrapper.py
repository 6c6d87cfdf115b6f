"""The wrapper that a strategy makes: it runs optimizers' steps, which all ranks may leave out together."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.swap import Swap
from lightning_bucketddp.peers.machines import Node
from lightning_bucketddp.trainer.replaced import replace_members
from lightning_bucketddp.trainer.samples import SampleCount
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP


class StepSkippedError(Exception):
    """Leaves ``optimizer.step(closure)``, as all ranks have dropped the gradients of the closure."""


class BucketDDPInLightning(BucketDDP):
    """A wrapper that a strategy makes. Lightning's ``num_nodes`` says whether there are several machines.

    Its default of 1 says nothing: some clusters have several nodes all the same.

    Args:
        module: The module.
        strategy: The strategy, for Trainer or Fabric, with the options.
    """

    def __init__(self, module: Module, strategy: Any) -> None:
        leave_shared_memory(module, strategy._start_method)
        if strategy.num_nodes > 1:
            self._node = Node(strategy.node_rank, strategy.num_processes)  # before ranks wrap the module
        super().__init__(module, **{name: getattr(strategy._options, name) for name in Options.__match_args__})
        precision = getattr(strategy, "precision_plugin", None) or strategy.precision  # in a Trainer, with Fabric
        self._has_scaler = getattr(precision, "scaler", None) is not None
        if (skips := self._passes.wrapped.context.skips) is not None:
            skips.scaler_skips = self._has_scaler

    def _swap_of(self, optimizer: Optimizer) -> Swap | None:
        """As in :class:`BucketDDP`.

        Raises:
            ValueError: If steps may be skipped in the middle of LBFGS's search.
        """
        if self._options.skips_steps and isinstance(optimizer, LBFGS):
            raise ValueError(
                "expected an optimizer with one backward per step, with skip_step_on or skip_norm_above; found LBFGS, "
                "which moves the parameters between its backwards"
            )
        return super()._swap_of(optimizer)

    def run_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, step: Callable[..., Any]) -> Any:
        """Run an optimizer's step, unless all ranks have dropped the gradients. All ranks must call this.

        A step that raises gives the optimizer its parameters back.

        Args:
            optimizer: The optimizer.
            closure: Runs backward and returns the loss; None if backward has run.
            step: Lightning's step. It gets the closure that it is to call, if there is one.
        """

        def closure_of_all_ranks() -> Any:
            loss = closure()  # type: ignore[misc]  # there is one
            if self._drops_gradients():
                raise StepSkippedError
            if _looks_at_loss(optimizer):  # whether this rank has a loss or not
                loss = self.average_loss(loss)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if self._has_scaler and all(param.grad is None for param in params):
                return None  # no rank had a loss: a scaler would fail without gradients, and skips the step of a None
            return loss

        if closure is None and self._drops_gradients():
            return None
        swap = self._swap_of(optimizer)
        with suppress(StepSkippedError), nullcontext() if swap is None else swap.restored_after():
            return step() if closure is None else step(closure=closure_of_all_ranks)

    def _drops_gradients(self) -> bool:
        """Whether all ranks have dropped the gradients of the last backward, so that optimizers must not step."""
        skips = self._passes.wrapped.context.skips
        return skips is not None and skips.skipped and not skips.left_to_scaler


class BucketDDPInTrainer(BucketDDPInLightning):
    """A wrapper whose module may be frozen entirely when ``fit`` starts, as callbacks may unfreeze it.

    Attributes:
        samples: Counts the samples of batches, with ``gradient_divide_by="samples"``.
    """

    _may_be_frozen = True

    def __init__(self, module: pl.LightningModule, strategy: Any) -> None:
        super().__init__(module, strategy)
        self.samples = SampleCount() if self._options.gradient_divide_by == "samples" else None
        self._warned_of_none = False

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

    def begin_step(self) -> None:
        """Note that a training step begins, and which one, should it be skipped."""
        super().begin_step()
        if (skips := self._passes.wrapped.context.skips) is not None:
            trainer: Any = self.module.trainer
            batch, epoch = trainer.fit_loop.epoch_loop.batch_idx, trainer.current_epoch
            skips.place = f" (batch {batch} of epoch {epoch}, global_step {trainer.global_step})"

    def _in_training(self) -> bool:
        with suppress(RuntimeError):  # the module has no Trainer
            trainer: Any = self.module.trainer
            return not (trainer.validating or trainer.sanity_checking)
        return True

    def loss_of_none(self) -> Tensor:
        """A loss in place of None, which reaches no parameter: this rank takes part, as others may have a real one."""
        if self.samples is not None:
            self.samples.skip()
        if not self._warned_of_none:
            self._warned_of_none = True
            warnings.warn(
                f"rank {self.rank}: `training_step` returned None. This counts as zero in the mean over the ranks. If "
                "all ranks return None, nothing is updated. This warning is not repeated",
                stacklevel=1,
            )
        return torch.zeros((), device=self.device, requires_grad=True)


def hold_schedulers(trainer: pl.Trainer, wrapper: BucketDDP) -> Callable[[], None]:
    """Have a Trainer's schedulers leave out skipped steps, unless they follow epochs.

    Returns:
        A function that lets them go on.
    """
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def update_unless_skipped(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not wrapper.step_skipped():
            update(interval, update_plateau_schedulers)

    return replace_members(loop, update_lr_schedulers=update_unless_skipped)


def leave_shared_memory(module: Module, start_method: str | None) -> None:
    """Give a module memory of its own on this rank, if the ranks were started by ``"forkserver"``.

    torch puts CPU tensors that it passes to started processes into memory that these share. Every rank would change the
    weights of all. Lightning does the same for ``"spawn"``.
    """
    for tensor in (*module.parameters(), *module.buffers()) if start_method == "forkserver" else ():
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def _looks_at_loss(optimizer: Optimizer) -> bool:
    """Whether an optimizer may use the loss: of torch's own only LBFGS does, others are assumed to."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return kind is LBFGS or not kind.__module__.startswith("torch.")
