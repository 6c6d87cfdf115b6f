"""``CommunicationMonitor``: what communication costs, and which rank the others wait for."""

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.layout.require import require
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.trainer.wrapper import BucketDDPInTrainer

SLOW_FACTOR = 1.2
SLOW_STEPS = 50
"""A rank is slow if its own time over SLOW_STEPS steps is more than SLOW_FACTOR times the median of the ranks."""


class PassTimes(Participant):
    """Adds up the times of this rank's passes and steps, and exchanges the sums with the other ranks.

    On the CPU a rank waits wherever this package waits for a collective. On accelerators the host waits for nothing:
    events in the current stream take the times of passes, and a rank waits from the end of backward until gradients
    are published.

    Args:
        wrapper: The wrapper whose passes are measured from now on.

    Attributes:
        peers: The other ranks.
        passes: The synchronised passes since the last exchange: when the first bucket was launched, when backward
            ended, when gradients were published. Their number is the same on every rank.
    """

    def __init__(self, wrapper: BucketDDPInTrainer) -> None:
        self._ranks, self.peers = wrapper._runtime.ranks, wrapper._passes.peers
        self._device = wrapper.device
        self._launched: Any = None  # times: events on accelerators, else seconds
        self._backward_ended: Any = None
        self.passes: list[tuple[Any, Any, Any]] = []
        self._own = self._waited = 0.0
        self.skip()
        wrapper._passes.wrapped.add(self)

    # -- passes --------------------------------------------------------------------------------------

    def before_launch(self, bucket: object) -> None:
        """Take the time of the first launch."""
        self._launched = self._launched or self._now()

    def backward_ended(self, raised: bool) -> None:
        """Take the time."""
        self._backward_ended = self._now()

    def ended(self) -> None:
        """Keep the times of the pass."""
        self.passes.append((self._launched or self._backward_ended, self._backward_ended, self._now()))
        self._launched = None

    def _now(self) -> float | torch.Event:
        if not is_accelerator(self._device):
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    # -- steps ---------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Begin a step now; what came before belongs to none."""
        self._step_began, self._waited_before = time.perf_counter(), self.peers.here.waited

    def step_ended(self) -> None:
        """Add up a step. The next one begins."""
        own, waited = self._own - self._step_began, self._waited - self._waited_before
        self.skip()
        self._own, self._waited = own + self._step_began, waited + self._waited_before

    def exchange(self) -> Tensor:
        """Exchange the sums since the last exchange. All ranks must call this, after a pass.

        Returns:
            On the CPU, in seconds, of shape ``(world size, 4)``. The columns: steps with waiting; waiting; from the end
            of backward, and from the first launch, until gradients were published.

        Raises:
            PeerFailureError: If another rank has failed.
        """
        exposed = sum(_seconds(began, ended) for _, began, ended in self.passes)
        under_way = sum(_seconds(launched, ended) for launched, _, ended in self.passes)
        self.step_ended()  # once more: an accelerator has caught up only now
        waited = exposed if is_accelerator(self._device) else self._waited
        mine = torch.tensor([self._own, waited, exposed, under_way], device=self._device)
        gathered = self._ranks.gather(mine, "the times of all ranks")
        self.passes.clear()
        self._own = self._waited = 0.0
        return gathered.cpu()


def _seconds(began: Any, ended: Any) -> float:
    if not isinstance(began, torch.Event):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


class CommunicationMonitor(Callback):
    """Logs what communication costs, and how long ranks wait for each other, with ``Trainer(strategy="bucketddp")``.

    Every n training batches the ranks exchange their times in one small collective; in between nothing is sent. These
    are logged to the Trainer's loggers as ``CommunicationMonitor/<name>``, means over the passes since the last time:

    - ``exposed_ms``: milliseconds from the end of backward until gradients were published: nothing hid the reduction.
      The least of any rank, so that waiting for a slow rank does not count.
    - ``bytes``: in the last pass, of gradients in buckets, padding included.
    - ``gigabytes_per_s``: these bytes, by the time from the first bucket's launch until gradients were published. The
      most of any rank.
    - ``waited_ms_min``, ``waited_ms_median``, ``waited_ms_max``: milliseconds that a rank waited in collectives of this
      package and of the Trainer, for others and for the wire; over the ranks.
    - ``slowest_rank``: the rank that waited least. No clocks are compared.

    A rank's own time is its step time less the time that it waited. A rank whose own time over 50 steps is more than
    20 % longer than the median (of two ranks, the lower one) is named in a warning, once. Validation does not count.

    On accelerators events in the stream measure passes; other waits count as own time there.

    Args:
        every_n_steps: How many training batches lie between two measurements; at least 1. If none of them had a
            synchronised pass, because gradients are accumulated, the next one that has is waited for.

    Raises:
        TypeError: If ``every_n_steps`` is no int.
        ValueError: If it is less than 1.
        MisconfigurationException: In ``fit``, if the strategy is another one or the Trainer has no logger.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        require("every_n_steps", every_n_steps, "an int of at least 1", int, lambda steps: steps >= 1)
        self._every_n_steps = every_n_steps
        self._times: PassTimes | None = None
        self._named: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the times belong to this process and its wrapper."""
        return {**self.__dict__, "_times": None}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Require the strategy and a logger, and begin to measure."""
        self._times = PassTimes(BucketDDPInTrainer.of(trainer, self))
        if not trainer.loggers:
            raise MisconfigurationException("expected a logger for CommunicationMonitor, found Trainer(logger=False)")
        self._steps, self._own_steps = 0, 0
        self._own = torch.zeros(())  # the ranks' own times in the last SLOW_STEPS steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Measure; exchange and log what is due."""
        assert self._times is not None
        self._times.step_ended()
        self._steps += 1
        passes = len(self._times.passes)
        if self._steps >= self._every_n_steps and passes:
            own, *times = self._times.exchange().unbind(1)
            self._log(trainer, *(1e3 * seconds / passes for seconds in times))
            self._look_for_slow_ranks(own - times[0])
            self._steps = 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave validation out, and what comes before training."""
        if self._times is not None:
            self._times.skip()

    on_train_start = on_validation_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the wrapper, which ends with fit."""
        self._times = None

    def _log(self, trainer: pl.Trainer, waited: Tensor, exposed: Tensor, under_way: Tensor) -> None:
        record = trainer.strategy.last_pass()  # type: ignore[attr-defined]
        metrics = {
            "exposed_ms": exposed.min().item(),
            "bytes": record.grad_nbytes,
            "gigabytes_per_s": record.grad_nbytes / 1e6 / under_way.min().item(),
            "waited_ms_min": waited.min().item(),
            "waited_ms_median": waited.median().item(),
            "waited_ms_max": waited.max().item(),
            "slowest_rank": waited.argmin().item(),
        }
        # The step of the batch's other metrics; private, but DeviceStatsMonitor's too.
        step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        for logger in trainer.loggers:
            prefix = f"CommunicationMonitor{logger.group_separator}"
            logger.log_metrics({prefix + name: value for name, value in metrics.items()}, step=step)

    def _look_for_slow_ranks(self, own: Tensor) -> None:
        """Warn of slow ranks, if the last look is 50 steps ago."""
        self._own, self._own_steps = self._own + own, self._own_steps + self._steps
        if self._own_steps < SLOW_STEPS:
            return
        each, median = (1e3 * seconds / self._own_steps for seconds in (self._own, self._own.median()))
        assert self._times is not None
        for rank in (each > SLOW_FACTOR * median).nonzero().flatten().tolist():
            if rank not in self._named:
                self._named.add(rank)
                rank_zero_warn(
                    f"{self._times.peers.in_words([rank])} is slower than the others, which wait for it: in the last "
                    f"{self._own_steps} steps it took {each[rank]:.1f} ms a step without waiting, the median of the "
                    f"ranks is {median:.1f} ms. Compare its device, its other processes and its data with theirs. This "
                    "is not repeated for it"
                )
        self._own, self._own_steps = torch.zeros(()), 0
