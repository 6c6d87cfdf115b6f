"""A resumed run goes on where the checkpoint was taken, in the middle of an epoch too: ``exact_resume``.

Lightning saves how many batches have been trained, and begins the epoch's data anew. A checkpoint here also says which
samples are left, and holds what each rank needs to take them as the undisturbed run would have.
"""

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader, move_data_to_device, rank_zero_warn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.trainer.random_state import random_state
from lightning_bucketddp.trainer.replaced import replace_members
from lightning_bucketddp.trainer.resumable_batches import ResumableBatches, has_state

KEY = "bucketddp_exact_resume"
"""Entry of a checkpoint: where the run is."""


class ExactResume:
    """Adds to checkpoints where a run is, and has a run go on from there.

    A checkpoint is of a place between two optimizer steps. One that is saved within an accumulation window is of the
    window's begin; one that is saved within a validation, of the validation's.

    Args:
        strategy: The strategy.
        saves: Whether each checkpoint says where the run is. If not, :class:`PreemptionCheckpoint`'s does, and data is
            sampled as by Lightning alone.

    Attributes:
        saves: Whether checkpoints say where the run is.
    """

    def __init__(self, strategy: Any, saves: bool) -> None:
        self._strategy, self.saves = strategy, saves
        self.end()

    def end(self) -> None:
        """Forget the run."""
        self._found: dict[str, Any] | None = None  # in the checkpoint with which `fit` begins
        self._begun = False
        self._at_window: tuple[list[Any], list[Any]] | None = None  # generators, loaders: before a window's first batch
        self._at_validation: tuple[list[Any], list[Any]] | None = None

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    # -- dataloaders ---------------------------------------------------------------------------------

    def take_in(self, loader: Any) -> None:
        """Make a training dataloader's batches resumable, if they can be."""
        strategy, progress = self._strategy, self._trainer.fit_loop.epoch_progress
        batches = getattr(loader, "batch_sampler", None)
        by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if self.saves and by_index and not has_state(loader) and not isinstance(batches, ResumableBatches | None):
            ranks = strategy.global_rank, strategy.world_size
            own = ResumableBatches(loader, *ranks, lambda: progress.current.processed)
            # A DataLoader takes a batch sampler in its constructor only. A subclass may have another constructor.
            object.__setattr__(loader, "batch_sampler", own)
            strategy._until_teardown.callback(object.__setattr__, loader, "batch_sampler", batches)

    def _loaders(self) -> list[Any]:
        return CombinedLoader(self._trainer.train_dataloader).flattened

    def _stateful(self) -> list[Any]:
        return [loader for loader in self._loaders() if has_state(loader)]

    def _batches(self) -> list[ResumableBatches]:
        found = [getattr(loader, "batch_sampler", None) for loader in self._loaders()]
        return [batches for batches in found if isinstance(batches, ResumableBatches)]

    def _state(self) -> tuple[list[Any], list[Any]]:
        return random_state(self._strategy.root_device), [loader.state_dict() for loader in self._stateful()]

    def _name_what_is_not_exact(self) -> None:
        """Warn of what no resume of this run takes up where it was."""
        loop, options, loaders = self._trainer.fit_loop, self._strategy._options, self._loaders()
        found = []
        for loader in loaders:
            batches, kind = getattr(loader, "batch_sampler", None), type(loader).__name__
            if has_state(loader):
                if sized_len(loader) is None:
                    found.append(f"{kind} has no length, and Lightning fetches a batch ahead")
                elif getattr(loader, "num_workers", None):
                    found.append(f"the workers of {kind} begin their random numbers anew")
            elif not isinstance(batches, ResumableBatches):
                found.append(f"{kind} gives no samples by index in batches, and has no state_dict()")
            elif not batches.says_its_order:
                why = "has neither state_dict() nor set_epoch(): its order must be fixed"
                found.append(f"{type(batches.sampler).__name__} {why}")
        if len({sized_len(each) for each in loaders}) > 1 and loop._combined_loader._mode == "max_size_cycle":
            found.append("dataloaders of different lengths are combined, and shorter ones begin again")
        if hasattr(loop._data_fetcher, "iterator_wrapper"):
            found.append("training_step takes batches from an iterator, and may fetch ahead")
        if callable(options.comm_hook) and not isinstance(options.comm_hook_state, PowerSGDState | None):
            found.append("the state of the communication hook is not saved")
        if found:
            rank_zero_warn(f"exact_resume: a resumed run will not go on exactly, as {'; '.join(found)}")

    # -- saving --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Note the generators' states where a window and a validation begin."""
        trainer, epoch_loop, device = self._trainer, self._trainer.fit_loop.epoch_loop, self._strategy.root_device
        fetch, reset = epoch_loop._on_before_fetch, epoch_loop.val_loop.reset

        def before_fetch() -> None:
            window = trainer.accumulate_grad_batches
            if epoch_loop.batch_progress.current.ready % window == 0:
                self._at_window = self._state() if window > 1 else None
            fetch()

        def reset_validation() -> None:
            self._at_validation = self._state()
            reset()
            random_state(device, self._at_validation[0])  # dataloaders with persistent workers draw the first time only

        self._strategy._until_teardown.callback(replace_members(epoch_loop, _on_before_fetch=before_fetch))
        self._strategy._until_teardown.callback(replace_members(epoch_loop.val_loop, reset=reset_validation))

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Add where the run is. All ranks must call this, between passes."""
        strategy, trainer, module = self._strategy, self._trainer, self._strategy.lightning_module
        if not (self.saves and self._begun and "optimizer_states" in checkpoint):
            return
        if strategy._interrupted():
            rank_zero_warn("a checkpoint that is saved while an exception is handled does not say where the run is")
            return
        from lightning_bucketddp.trainer.logged_keys import collected  # needs private names of Lightning

        epochs, epoch_loop = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop
        now, of_validation = epoch_loop.batch_progress.current, epoch_loop.val_loop.batch_progress
        ended = epochs.processed == epochs.started
        whole = ended or (now.ready == now.processed and not epoch_loop._should_accumulate())
        batches = now.processed if whole else now.processed - now.processed % trainer.accumulate_grad_batches
        validated = of_validation.is_last_batch and of_validation.current.ready == of_validation.current.completed
        noted = self._at_validation if trainer.validating and not validated else None
        generators, states = (noted if whole else self._at_window) or self._state()
        buffers = module.named_buffers() if strategy._options.module_buffers != "broadcast" else ()
        mine = {
            "generators": generators,
            "loaders": states,
            "batches": [own.state(None if ended else batches) for own in self._batches()],
            "metrics": move_data_to_device(collected(epoch_loop._results, module), "cpu"),
            "callback_metrics": {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()},
            "module_buffers": {name: buffer.cpu() for name, buffer in buffers},
        }
        checkpoint[KEY] = {
            "ranks": strategy._ranks().objects(mine, "the states of all ranks"),
            "passes": strategy.bucket_ddp._passes.wrapped.memory(),
            "ended": ended,
            "schedulers_due": ended and epochs.completed < epochs.processed,
            "batches": batches,
            "is_last": whole and epoch_loop.batch_progress.is_last_batch,
            # What Lightning does at a batch's end: it validates, and tells schedulers the metrics.
            "end_due": whole and not ended and (trainer.validating or now.completed < now.processed),
            "validated": trainer.validating and validated,
            "should_stop": trainer.should_stop,
        }

    # -- resuming ------------------------------------------------------------------------------------

    def restore(self, checkpoint: Any) -> None:
        """Restore what passes go by. Lightning has loaded its progress, and is about to load optimizer state."""
        self._found = found = checkpoint.get(KEY)
        if found is not None:
            # Else Lightning would count the epoch as processed.
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False
            self._strategy.bucket_ddp._passes.wrapped.recall(found["passes"])

    def begin(self) -> None:
        """Begin to train, or go on. Lightning has loaded its progress and made the dataloaders.

        Raises:
            ValueError: If there are other ranks than before, and a dataloader whose rest cannot be divided anew.
        """
        trainer, strategy = self._trainer, self._strategy
        first, self._begun = not self._begun, True  # a search for a batch size begins several times
        found, self._found = self._found, None
        if first and self.saves:
            self._watch()
            if found is None:
                self._name_what_is_not_exact()
        if found is None:
            return
        rank, here, before = strategy.global_rank, strategy.world_size, len(found["ranks"])
        mine = found["ranks"][rank if rank < before else 0]
        if here != before:
            divisible = found["ended"] or all(state["ordered"] for state in mine["batches"])
            if mine["loaders"] or not divisible:
                raise ValueError(
                    f"expected {before} ranks for this checkpoint, as when it was saved, found {here}: only "
                    "the Trainer's sampler, or torch's DistributedSampler, can be divided anew. Resume on as many ranks"
                )
            self._say_what_changes(before, mine["batches"])
        trainer.callback_metrics.update(move_data_to_device(mine["callback_metrics"], strategy.root_device))
        trained = found["batches"]
        for own, state in zip(self._batches(), mine["batches"], strict=False):
            trained = own.resume(state, None if found["ended"] else found["batches"])
        for loader, state in zip(self._stateful(), mine["loaders"], strict=False):
            loader.load_state_dict(state)
        if found["ended"]:
            self._begin_next_epoch(found)
        else:
            self._go_on(found, min(trained, trainer.num_training_batches), mine["metrics"] if here == before else None)
        if here == before:
            for name, value in mine["module_buffers"].items():
                strategy.lightning_module.get_buffer(name).copy_(value)
        if rank < before:
            random_state(strategy.root_device, mine["generators"])

    def _begin_next_epoch(self, found: dict[str, Any]) -> None:
        """Begin the next epoch as usual; with ``max_steps`` Lightning would skip it."""
        loop = self._trainer.fit_loop
        progress = loop.epoch_progress
        loop.on_iteration_done()
        loop.epoch_loop.on_iteration_done()
        self._trainer.should_stop = found["should_stop"]
        if found["schedulers_due"]:  # those that follow a metric of the epoch that has ended
            progress.current.completed = progress.current.processed - 1
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        for counts in (progress.total, progress.current):
            counts.ready = counts.started = counts.completed = counts.processed
        for loader in self._stateful():
            iter(loader)  # is at its end; the epoch begins another one

    def _go_on(self, found: dict[str, Any], trained: int, metrics: dict[str, Any] | None) -> None:
        """Go on after a number of this epoch's batches, with what is due at the end of the last one."""
        trainer, loop, epoch_loop = self._trainer, self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        progress, loop._restarting = epoch_loop.batch_progress, False  # else schedulers would not be told the metrics
        more = trained - progress.current.ready
        for counts in (progress.total, progress.current):
            counts.ready = counts.started = counts.processed = counts.completed = counts.ready + more
        progress.is_last_batch = found["is_last"]
        if metrics is not None:
            from lightning_bucketddp.trainer.logged_keys import restore_collected

            restore_collected(epoch_loop._results, move_data_to_device(metrics, trainer.strategy.root_device), trainer)
        trainer._logger_connector._first_loop_iter = False  # else what is restored would be reset
        iter(loop._data_fetcher)

        def on_run_start(fetcher: Any) -> None:
            restore_members()
            epoch_loop.on_run_start(fetcher)
            epoch_loop._restarting = epoch_loop.val_loop._restarting = False
            trainer.should_stop = found["should_stop"]
            if found["end_due"]:
                epoch_loop._skip_next_val = found["validated"]
                epoch_loop.on_advance_end(fetcher)

        # Lightning's own `reset` would guess what was due.
        restore_members = replace_members(epoch_loop, reset=lambda: None, on_run_start=on_run_start)
        self._strategy._until_teardown.callback(restore_members)

    def _say_what_changes(self, before: int, states: list[dict[str, Any]]) -> None:
        here = self._strategy.world_size
        changes = [
            f"a batch of all ranks has {own.batch_size * here} instead of {state['batch_size'] * before} samples; "
            f"{own.count_repeated(state['taken'])} of those that are left are taken twice, so that ranks have as many"
            for own, state in zip(self._batches(), states, strict=False)
            if own.is_ordered
        ]
        changes.append("metrics of this epoch begin anew, and so does the memory of PowerSGD")
        rank_zero_warn(f"resumed on {here} ranks a run of {before}: {'; '.join(changes)}")
