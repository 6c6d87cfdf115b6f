"""A checkpoint when the job is preempted: all ranks finish the step, save, and end."""

import logging
import os
import signal
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_bucketddp.layout.require import require
from lightning_bucketddp.peers.end_signals import PATIENCE_SECONDS, SIGNALS, end_signals
from lightning_bucketddp.trainer.replaced import replaced
from lightning_bucketddp.trainer.resumable_batches import has_state
from lightning_bucketddp.trainer.wrapper import BucketDDPInTrainer

_log = logging.getLogger(__name__)


class PreemptionCheckpoint(Callback):
    """Saves a checkpoint and ends training when any rank gets SIGTERM, or SIGUSR1 (Slurm's ``--signal``).

    All ranks finish the same optimizer step, and a validation that is under way or follows it. They save one
    checkpoint, with every rank's random-number state, and raise Lightning's ``SIGTERMException``. In a Slurm job that
    Lightning requeues, the checkpoint is where the requeued job finds it. There SIGUSR1 (or the environment's
    ``requeue_signal``) requeues the job; SIGTERM, which ``scancel`` sends, does not. Elsewhere it is :attr:`path`::

        trainer = Trainer(strategy="bucketddp", callbacks=PreemptionCheckpoint("checkpoints", resume=True))
        trainer.fit(model, data)  # the same script resumes

    With this callback, and as many ranks, training goes on bit for bit if the epoch had ended, or if the dataloaders
    have a ``state_dict`` (as torchdata's ``StatefulDataLoader``) and a length. Lightning takes up no other loader in
    the middle of an epoch. A warning says so when the checkpoint is saved.

    During ``fit`` it replaces all handlers of these signals, Lightning's too. A second signal, more than a second after
    the first, ends the process.

    A ``fit`` that begins with this checkpoint or a newer one, and ends normally, removes it. One that begins without
    it leaves it, and warns.

    Args:
        dirpath: The directory of the checkpoint.
        patience: Seconds that a rank which is to end waits for another one, before it raises an error.
        resume: Whether ``fit`` begins with the checkpoint, if there is one. If ``fit`` gets a ``ckpt_path`` as well,
            such as ``"last"``, it begins with the newer one of the two files, also under Slurm. Rank 0 decides.
        exit_code: The exit code of the ranks' processes: for schedulers that take 0 for the end of the job, as those of
            Kubernetes do, another number. None: that of Lightning's exception, 0 in Lightning 2.6.

    Attributes:
        path: The checkpoint, except under Slurm: ``preempted.ckpt`` in ``dirpath``. A later one replaces it.

    Raises:
        TypeError, ValueError: If ``patience`` is no number above 0, ``resume`` not True or False, or ``exit_code`` no
            number from 0 to 255.
        MisconfigurationException: When training starts, with another strategy than ``bucketddp``, or with ranks that
            the main process has forked or spawned: a job's signals would end that process.
        ValueError: When training starts, in another thread than the main one, where Python handles no signals.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        patience: float = PATIENCE_SECONDS,
        resume: bool = False,
        exit_code: int | None = None,
    ) -> None:
        require("patience", patience, "a number of seconds, more than 0", int | float, lambda seconds: seconds > 0)
        require("resume", resume, "True or False", bool)
        require("exit_code", exit_code, "None or a number from 0 to 255", int | None, range(256).__contains__)
        self.path = os.path.join(dirpath, "preempted.ckpt")
        self._patience, self._resume, self._exit_code = patience, resume, exit_code
        self._keeps_path = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the checkpoint with which ``fit`` begins, when Lightning is about to load it."""
        connector: Any = trainer._checkpoint_connector
        self._keeps_path = True
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return

        def resume_start(checkpoint_path: str | None = None, weights_only: bool | None = None) -> None:
            del connector.resume_start
            connector.resume_start(self._beginning(trainer, checkpoint_path), weights_only)

        connector.resume_start = resume_start

    def _beginning(self, trainer: Trainer, given: str | None) -> str | None:
        """The checkpoint with which all ranks begin: the given one, or with ``resume`` the newer one of both."""
        own: Any = trainer._checkpoint_connector._hpc_resume_path if _requeue_signal(trainer) else self.path
        paths = {path: get_filesystem(path) for path in (given, own) if path}
        modified = {path: files.modified(path) for path, files in paths.items() if files.exists(path)}
        is_newer = own in modified and (given not in modified or modified[own] > modified[given])
        is_newer, given, own = trainer.strategy.broadcast((is_newer, given, own))
        self._keeps_path = is_newer and not self._resume and given != own
        if self._keeps_path:
            rank_zero_warn(
                f"{own} is newer than what this run begins with ({given or 'no checkpoint'}): it is left as it "
                "is. Give PreemptionCheckpoint resume=True to resume from it, or remove it"
            )
        return own if is_newer and self._resume else given

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the checkpoint, which is outdated: Lightning calls this where ``fit`` has ended normally."""
        if not self._keeps_path:
            trainer.strategy.remove_checkpoint(self.path)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have this callback's handlers registered where Lightning registers its own, after this."""
        BucketDDPInTrainer.of(trainer, self)
        if (method := getattr(trainer.strategy, "_start_method", "")) != "popen":  # signals would end the main process
            raise MisconfigurationException(f"expected start_method='popen' for PreemptionCheckpoint, found {method!r}")
        connector: Any = trainer._signal_connector  # not public, as most of what is used here; tests notice a change

        def register_once() -> None:
            del connector.register_signal_handlers
            connector.received_sigterm = False
            requeue = _requeue_signal(trainer)
            end_signals.watch({signal.SIGTERM, requeue} if requeue else SIGNALS, self._patience)

        connector.register_signal_handlers = register_once

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """End after an optimizer step, on all ranks alike.

        Lightning's loops raise ``SIGTERMException`` after a step and its validation, or after the epoch. They would
        break a validation off.
        """
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        is_last = trainer.is_last_batch or batches >= trainer.num_training_batches
        steps = is_last or batches % trainer.accumulate_grad_batches == 0
        if steps and BucketDDPInTrainer.of(trainer, self).preempted():
            trainer._signal_connector.received_sigterm = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not end in the middle of a validation."""
        trainer._signal_connector.received_sigterm = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End after it, or after an epoch, if the ranks have agreed on that before.

        After the last epoch not before ``on_train_end``: no resumed run would call it.
        """
        epochs: Any = trainer.fit_loop.epoch_progress.current
        # Lightning's `fit_loop.done` would change its counters.
        last = 0 < (trainer.max_epochs or 0) <= epochs.processed or 0 < trainer.max_steps <= trainer.global_step
        trainer._signal_connector.received_sigterm = end_signals.ending and not last

    on_train_epoch_end = on_validation_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask the other ranks, as no pass follows. End when all have done what they do at the end."""
        strategy: Any = trainer.strategy

        def end() -> None:
            del strategy.on_train_end
            strategy.on_train_end()
            raise SIGTERMException

        if BucketDDPInTrainer.of(trainer, self).preempted(no_pass_follows=True):
            strategy.on_train_end = end  # the last that Lightning calls

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save, when everything that belongs to the step or epoch has been done."""
        if not (end_signals.ending and isinstance(exception, SIGTERMException)):
            return
        if self._exit_code is not None:
            exception.code = self._exit_code
        status, trainer.state.status = trainer.state.status, TrainerStatus.RUNNING  # as all ranks are here
        strategy: Any = trainer.strategy
        strategy._end_writer()  # the checkpoint must be there when this job is requeued
        requeue = _requeue_signal(trainer)
        path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir) if requeue else self.path
        wrapper = BucketDDPInTrainer.of(trainer, self)
        got = wrapper._uneven.tell(end_signals.received)
        told = ""
        if end_signals.received or trainer.is_global_zero:
            told = wrapper._passes.peers.in_words([rank for rank, number in enumerate(got) if number])
            told += f" got {' and '.join(signal.Signals(number).name for number in sorted({*got} - {0}))}"
        if told and not trainer.is_global_zero:
            _log.warning("%s: all ranks end after step %d", told, trainer.global_step)
        epochs: Any = trainer.fit_loop.epoch_progress.current
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        resumable = all(has_state(loader) and sized_len(loader) is not None for loader in loaders)
        if not (strategy.exact_resume.saves or resumable or epochs.processed == epochs.ready):
            rank_zero_warn(
                "the checkpoint is of the middle of an epoch, and a training dataloader has no state_dict or no "
                "length: Lightning does not take it up where it was. Use torchdata's StatefulDataLoader, with a length"
            )
        with replaced(strategy.exact_resume, saves=True):
            if requeue in got:
                trainer._signal_connector._slurm_sigusr_handler_fn(requeue, None)  # type: ignore[arg-type]  # saves
            else:
                trainer.save_checkpoint(path)
        rank_zero_info(f"preempted after step {trainer.global_step}, as {told}: saved {path}")
        trainer.strategy.barrier()  # rank 0 may take long to requeue; a rank that ends is a failure to it
        trainer.state.status = status


def _requeue_signal(trainer: Trainer) -> signal.Signals | None:
    """The signal at which Lightning requeues this Slurm job; None if it does not."""
    environment: Any = getattr(trainer.strategy, "cluster_environment", None)
    return environment.requeue_signal if getattr(environment, "auto_requeue", False) else None
