"""A resumed run goes on where the checkpoint was taken, in the middle of an epoch too: ``exact_resume``.

Lightning saves how many batches have been trained, and begins the epoch's data anew. A checkpoint here also says which
samples are left, and holds what each rank needs to take them as the undisturbed run would have.
"""

import os
import secrets
import warnings
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, move_data_to_device, rank_zero_warn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torchmetrics import Metric

from lightning_bucketddp.trainer.checkpoints import ORDER_KEY
from lightning_bucketddp.trainer.random_state import random_state, seed_generators
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
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.end()

    def end(self) -> None:
        """Forget the run."""
        self._seed: int | None = None  # of data loading workers
        self._found: dict[str, Any] | None = None  # in the checkpoint with which `fit` begins
        self._is_due = self._begun = self._is_over = False
        self._at_window: tuple[list[Any], list[Any]] | None = None  # generators, loaders: before a window's first batch
        self._at_validation: list[Any] | None = None

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    # -- dataloaders ---------------------------------------------------------------------------------

    def take_in(self, loader: Any) -> None:
        """Make a training dataloader's batches resumable, if they can be."""
        strategy, progress = self._strategy, self._trainer.fit_loop.epoch_progress
        if self._seed is None:
            given = os.environ.get("PL_GLOBAL_SEED")
            self._seed = strategy.broadcast(secrets.randbits(32) if given is None else int(given))
        if self._found is not None and callable(set_epoch := getattr(_sampler(loader), "set_epoch", None)):
            set_epoch(self._found["epoch"])  # before Lightning begins to iterate
        if ResumableBatches.fit(loader) and not isinstance(loader.batch_sampler, ResumableBatches):
            ranks = strategy.global_rank, strategy.world_size
            own = ResumableBatches(loader, strategy.root_device, *ranks, lambda: progress.current.processed)
            own.seed = self._seed
            # A DataLoader takes a batch sampler in its constructor only. A subclass may have another constructor.
            object.__setattr__(loader, "batch_sampler", own)
            strategy._until_teardown.callback(object.__setattr__, loader, "batch_sampler", own.batches)

    def _loaders(self) -> list[Any]:
        return CombinedLoader(self._trainer.train_dataloader).flattened

    def _loader_states(self) -> list[Any]:
        return [loader.state_dict() for loader in self._loaders() if has_state(loader)]

    def _name_what_is_not_exact(self) -> None:
        """Warn of what no resume of this run takes up where it was."""
        loop, options, loaders = self._trainer.fit_loop, self._strategy._options, self._loaders()
        found = []
        for loader in loaders:
            sampler, kind = _sampler(loader), type(loader).__name__
            library = type(sampler).__module__.split(".")[0].startswith(("torch", "lightning", "pytorch_lightning"))
            if has_state(loader) and sized_len(loader) is None:
                found.append(f"{kind} has no length, and Lightning fetches a batch ahead")
            elif has_state(loader) and getattr(loader, "num_workers", None):
                found.append(f"the workers of {kind} begin their random numbers anew")
            elif not (has_state(loader) or ResumableBatches.fit(loader)):
                found.append(f"{kind} gives no samples by index in batches, and has no state_dict()")
            elif not (has_state(loader) or library or has_state(sampler) or hasattr(sampler, "set_epoch")):
                why = "has neither state_dict() nor set_epoch(): its order must be fixed"
                found.append(f"{type(sampler).__name__} {why}")
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
        epoch_loop = self._trainer.fit_loop.epoch_loop
        fetch, validate = epoch_loop._on_before_fetch, epoch_loop.val_loop.run

        def before_fetch() -> None:
            if self._is_over:  # a dataloader may have more than the epoch takes
                self._is_over = False
                raise StopIteration
            window = self._window()
            if window > 1 and epoch_loop.batch_progress.current.ready % window == 0:
                self._at_window = random_state(self._strategy.root_device), self._loader_states()
            fetch()

        def run() -> Any:
            self._at_validation = random_state(self._strategy.root_device)
            try:
                return validate()
            finally:
                self._at_validation = None

        self._strategy._until_teardown.callback(replace_members(epoch_loop, _on_before_fetch=before_fetch))
        self._strategy._until_teardown.callback(replace_members(epoch_loop.val_loop, run=run))

    def _window(self) -> int:
        automatic = self._strategy.lightning_module.automatic_optimization
        return self._trainer.accumulate_grad_batches if automatic else 1

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Add where the run is. All ranks must call this, between passes."""
        strategy, trainer = self._strategy, self._trainer
        if not self._begun or "loops" not in checkpoint or strategy.bucket_ddp is None:
            return
        if strategy._interrupted():
            rank_zero_warn("a checkpoint that is saved while an exception is handled does not say where the run is")
            return
        loop, epochs = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
        epoch_loop, progress = loop.epoch_loop, loop.epoch_loop.batch_progress
        now, of_validation = progress.current, epoch_loop.val_loop.batch_progress
        ended = epochs.processed == epochs.ready
        last = progress.is_last_batch or now.processed == trainer.num_training_batches
        whole = now.ready == now.processed and (last or now.processed % self._window() == 0)
        batches = now.processed if whole else now.processed - now.processed % self._window()
        validated = of_validation.is_last_batch and of_validation.current.ready == of_validation.current.completed
        validating = self._at_validation is not None
        before_end = now.completed < now.processed or validating  # of what Lightning does with a batch
        generators, states = random_state(strategy.root_device), self._loader_states()
        if not (ended or whole) and self._at_window is not None:
            generators, states = self._at_window
        elif self._at_validation is not None and not validated:
            generators = self._at_validation
        loaders = self._loaders()
        own = [loader.batch_sampler if ResumableBatches.fit(loader) else None for loader in loaders]
        buffers = strategy.lightning_module.named_buffers()
        buffers_are_own = strategy._options.module_buffers != "broadcast"
        mine = {
            "generators": generators,
            "began": [None if each is None else each.began for each in own],
            "loaders": states,
            "metrics": self._metrics(),
            "callback_metrics": {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()},
            "module_buffers": {name: buffer.cpu() for name, buffer in buffers if buffers_are_own},
        }
        wrapped = strategy.bucket_ddp._passes.wrapped
        checkpoint[ORDER_KEY] = wrapped.context.learner.lessons
        checkpoint[KEY] = {
            "ranks": strategy._ranks().objects(mine, "the states of all ranks"),
            "passes": wrapped.memory(strategy._ranks()),
            "places": [{"batch_size": None, "ordered": False} if each is None else each.place(batches) for each in own],
            "epoch": epochs.processed,
            "ended": ended,
            "schedulers_due": ended and epochs.completed < epochs.processed,
            "batches": batches,
            "is_last": last and whole,
            "validation_due": whole and before_end and not (validating and validated),
            "stepped": epoch_loop._batches_that_stepped + (whole and before_end and not ended),
            "iterated": [getattr(each, "_iterator", None) is not None for each in self._validation_loaders()],
            "seed": self._seed,
            "should_stop": trainer.should_stop,
        }

    def _validation_loaders(self) -> list[Any]:
        return CombinedLoader(self._trainer.val_dataloaders or []).flattened

    def _metrics(self) -> dict[str, Any]:
        """What an epoch's metrics have collected so far on this rank."""
        from lightning_bucketddp.trainer.logged_keys import collected  # needs private names of Lightning

        modules = self._strategy.lightning_module.named_modules()
        metrics = [(name, metric) for name, metric in modules if isinstance(metric, Metric)]
        of_module = {name: [metric.metric_state, metric.update_count] for name, metric in metrics}
        logged = collected(self._trainer.fit_loop.epoch_loop._results)
        return {"logged": logged, "of_module": move_data_to_device(of_module, "cpu")}

    # -- resuming ------------------------------------------------------------------------------------

    def look_into(self, checkpoint: dict[str, Any]) -> None:
        """Let Lightning's progress, in a checkpoint that it is about to load, say where the run was.

        Raises:
            ValueError: If there are other ranks than before, and a dataloader whose rest cannot be divided anew.
        """
        if self._trainer.state.fn != TrainerFn.FITTING or KEY not in checkpoint:
            return
        self._found = found = checkpoint[KEY]
        here, before = self._strategy.world_size, len(found["ranks"])
        states = found["ranks"][0]["loaders"]
        is_ordered = all(place["ordered"] for place in found["places"])
        if here != before and (states or not (is_ordered or found["ended"])):
            raise ValueError(
                f"expected {before} ranks for this checkpoint, as when it was saved, found {here}: only the Trainer's "
                "sampler, or torch's DistributedSampler, can be divided among another number. Resume on as many ranks"
            )
        fit = checkpoint["loops"]["fit_loop"]
        if states:
            fit["state_dict"]["combined_loader"] = found["ranks"][self._strategy.global_rank]["loaders"]
        if found["ended"]:
            for each in (fit["epoch_progress"]["total"], fit["epoch_progress"]["current"]):
                each["completed"] = each["processed"]
            return
        progress, validated = fit["epoch_loop.batch_progress"], fit["epoch_loop.val_loop.batch_progress"]
        again = progress["current"]["ready"] - found["batches"]
        for each in (progress["total"], progress["current"]):
            each.update(dict.fromkeys(("ready", "started", "processed", "completed"), each["ready"] - again))
        progress["is_last_batch"] = found["is_last"]
        # Lightning goes back to a validation if one of its batches was under way.
        total, one = validated["total"], int(found["validation_due"])
        validated["current"] = dict.fromkeys(validated["current"], 0)
        total.update(ready=total["completed"] + one, started=total["completed"] + one, processed=total["completed"])

    def restore(self, checkpoint: Any) -> None:
        """Restore what passes go by, after the order of buckets. Lightning has loaded its progress."""
        if self._found is not None and checkpoint.get(KEY) is self._found:
            self._is_due = True
            as_many = len(self._found["ranks"]) == self._strategy.world_size
            wrapped = self._strategy.bucket_ddp._passes.wrapped
            wrapped.recall(self._found["passes"], self._strategy.global_rank, as_many)

    def begin(self) -> None:
        """Begin to train, or go on. Lightning has loaded its progress and made the dataloaders."""
        trainer, strategy = self._trainer, self._strategy
        loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        first, self._begun = not self._begun, True  # a search for a batch size begins several times
        if first:
            self._watch()
        if not self._is_due or self._found is None:
            if first:
                self._name_what_is_not_exact()
            return
        found, self._found, self._is_due = self._found, None, False
        ranks, loaders = found["ranks"], self._loaders()
        as_many = len(ranks) == strategy.world_size
        mine = ranks[strategy.global_rank if as_many else 0]
        self._seed, trainer.should_stop = found["seed"], found["should_stop"]
        trainer.callback_metrics.update(move_data_to_device(mine["callback_metrics"], strategy.root_device))
        for loader in loaders:
            if ResumableBatches.fit(loader):
                loader.batch_sampler.seed = found["seed"]
        epoch_loop._batches_that_stepped = found["stepped"]
        if found["ended"]:
            begin_next_epoch(trainer, mine["loaders"], found["schedulers_due"])
        else:
            self._go_on(loaders, found, mine["began"])
            if as_many:
                self._restore_metrics(mine["metrics"])
            validates = epoch_loop._should_check_val_fx(loop._data_fetcher)
            epoch_loop._batches_that_stepped -= validates  # Lightning will count it as if the batch had just ended
            self._is_over = not validates and epoch_loop.batch_progress.current.ready >= trainer.num_training_batches
        for loader, iterated in zip(self._validation_loaders(), found["iterated"], strict=False):
            if iterated:
                iter(loader)  # of persistent workers: draws a random number now, as it did then
        if as_many:
            buffers = dict(strategy.lightning_module.named_buffers())
            for name, value in mine["module_buffers"].items():
                buffers[name].copy_(value)
            random_state(strategy.root_device, mine["generators"])
        else:
            seed_generators(hash((found["seed"], trainer.global_step, strategy.global_rank)) % 2**63)
            self._say_what_changes(len(ranks), found)

    def _go_on(self, loaders: list[Any], found: dict[str, Any], began: list[Any]) -> None:
        """Have the dataloaders give what is left of this epoch."""
        loop, progress = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.batch_progress
        # Lightning would not tell schedulers the metrics of this epoch.
        loop._restarting = False
        batches = []
        for loader, place, states in zip(loaders, found["places"], began, strict=True):
            if ResumableBatches.fit(loader):
                batches.append(loader.batch_sampler.resume(place, states, found["batches"]))
        trained = min((batches or [found["batches"]])[0], self._trainer.num_training_batches)
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, trained)
        if trained:
            self._trainer._logger_connector._first_loop_iter = False  # else what is restored would be reset
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        if batches:
            iter(loop._data_fetcher)

    def _restore_metrics(self, found: dict[str, Any]) -> None:
        from lightning_bucketddp.trainer.logged_keys import restore_collected

        modules: dict[str, Any] = dict(self._strategy.lightning_module.named_modules())
        for name, (states, count) in found["of_module"].items():
            modules[name]._update_count = count
            for key, value in states.items():
                setattr(modules[name], key, move_data_to_device(value, modules[name].device))
        restore_collected(self._trainer.fit_loop.epoch_loop._results, found["logged"], modules, self._strategy)

    def _say_what_changes(self, before: int, found: dict[str, Any]) -> None:
        pairs = list(zip(self._loaders(), found["places"], strict=True))
        here, sizes, twice = self._strategy.world_size, "another number of", 0
        if not found["ended"] and all(ResumableBatches.fit(loader) for loader, _ in pairs):
            twice = sum(loader.batch_sampler.count_repeated(place["taken"]) for loader, place in pairs)
            sizes = f"{pairs[0][0].batch_sampler.batch_size * here} instead of {pairs[0][1]['batch_size'] * before}"
        rank_zero_warn(
            f"resumed on {here} ranks a run of {before}: a batch of all ranks has {sizes} samples; {twice} of those "
            "that are left are taken twice, so that ranks have equally many; generators are seeded anew; metrics of "
            "this epoch begin anew, and so does the memory of PowerSGD"
        )


def begin_next_epoch(trainer: Any, states: list[Any], schedulers_due: bool = False) -> None:
    """Begin the next epoch as usual after a resume at the end of one; with ``max_steps`` Lightning would skip it.

    Args:
        trainer: The Trainer.
        states: Those of this rank's dataloaders that have one.
        schedulers_due: Whether those that follow a metric have not been told this epoch's.
    """
    loop, epochs = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    loop.on_iteration_done()
    loop.epoch_loop.on_iteration_done()
    if schedulers_due:
        epochs.completed -= 1
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1
    stateful = [loader for loader in CombinedLoader(trainer.train_dataloader).flattened if has_state(loader)]
    for loader, state in zip(stateful if states else (), states, strict=True):
        loader.load_state_dict(state)
        iter(loader)  # is at its end; the epoch begins another one


def _sampler(loader: Any) -> Any:
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None) or getattr(loader, "sampler", None)
