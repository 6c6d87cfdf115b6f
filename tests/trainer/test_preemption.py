"""A preempted job ends on all ranks after the same step, with a checkpoint, and goes on bit for bit."""

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDP, PreemptionCheckpoint
from lightning_bucketddp.comm import gloo
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers import abort_listener
from lightning_bucketddp.peers.abort_listener import listen
from lightning_bucketddp.trainer import preemption
from tests.lightning_models import PoolEnvironment, ddp, ours, trainer
from tests.pool import ROOT, RunRanks, on_ranks
from tests.reference import WHERE, eventually, logged
from tests.sampling import some_slow

Options = dict[str, Any]
BATCHES, MANY = 6, 9
STEP, VALIDATION, END = "training_step", "validation_step", "on_train_epoch_end"
HANDLED = (signal.SIGTERM, signal.SIGUSR1)


class Loader:
    """Draws the order of an epoch's batches, another one on each rank. Goes on where it was, even if at the end.

    As torchdata's ``StatefulDataLoader``, it keeps a generator of its own from epoch to epoch.
    """

    def __init__(self) -> None:
        self.batches = [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(BATCHES)]
        self.order: list[int] = []
        self.generator, self.at, self.goes_on = torch.Generator(), 0, False

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            self.generator.manual_seed(int(torch.randint(1000, ())))
        if not self.goes_on:
            self.order, self.at = torch.randperm(BATCHES, generator=self.generator).tolist(), 0
        self.goes_on = False
        return self.rest()

    def rest(self) -> Iterator[Any]:
        while self.at < BATCHES:
            self.at += 1
            yield self.batches[self.order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self.goes_on = state["order"], state["at"], True
        self.generator.set_state(state["generator"])


class Preempted(pl.LightningModule):
    """Draws random numbers of all kinds, and gets signals where it is told to."""

    def __init__(self, place: str = "", batch: int = 0, ranks: tuple[int, ...] = (), number: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.last, self.first, self.dropout = nn.Linear(16, 4), nn.Linear(8, 16), nn.Dropout(0.3)
        self.place, self.batch, self.ranks, self.number = place, batch, ranks, number
        self.losses: list[tuple[int, float]] = []  # with the epoch's number, which samplers go by
        self.validated = self.ended = 0

    def come(self, place: str) -> None:
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if (place, batches) == (self.place, self.batch) and self.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.come(STEP)
        found = self.last(self.dropout(self.first(batch[0]).tanh()))
        loss = nn.functional.mse_loss(found, batch[1]) * (1 + random.random() + np.random.rand())
        self.losses.append((self.current_epoch, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.come(VALIDATION)
        self.validated += 1

    def on_validation_epoch_end(self) -> None:
        assert self.validated % BATCHES == 0, "it ran to its end"

    def on_train_epoch_end(self) -> None:
        self.come(END)
        self.trainer.should_stop |= self.trainer.max_epochs == MANY

    def on_train_end(self) -> None:
        self.ended += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(samples: int = 4 * BATCHES, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randn(samples, 4)), 4, **options)


def run(
    folder: Path, model: Preempted, options: Options, strategy: Options, seed: int, resume: str | None = None
) -> bool:
    """Trains two epochs, as far as the model's signals let it; whether they did."""
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    torch.manual_seed(1 + dist.get_rank())
    workers = {"num_workers": options.pop("num_workers", 0)}
    plain, chooses = options.pop("plain_loader", False), options.pop("chooses", False)
    training, validation = loader(shuffle=True, **workers) if plain else Loader(), loader()
    for seeds in (torch.manual_seed, random.seed, np.random.seed):
        seeds(seed + dist.get_rank())
    before = [signal.getsignal(number) for number in HANDLED]
    try:
        fits = trainer(ours(**strategy), callbacks=PreemptionCheckpoint(folder, resume=chooses), **options)
        fits.fit(model, training, validation, ckpt_path=resume)
    except SIGTERMException:
        return True
    finally:
        assert [signal.getsignal(number) for number in HANDLED] == before
    return False


ACCUMULATED, VALIDATED, PLAIN = {"accumulate_grad_batches": 2}, {"val_check_interval": 2}, {"plain_loader": True}
SAMPLED = {**PLAIN, "num_workers": 1, "use_distributed_sampler": True, "limit_val_batches": 0}
SHARDED = {"shard_optimizer": True, "wire_dtype": "bfloat16"}
# Where the signal comes, after how many batches, to which ranks; the steps that are done; options.
CASES: dict[str, tuple[str, int, tuple[int, ...], int, Options, Options]] = {
    "SIGUSR1": (STEP, 1, (1,), 1, {}, {}),
    "two of three": (STEP, 3, (0, 1), 3, {}, {"bucket_cap_mb": 1}),  # the order of sums depends on that of parameters
    "sharded, three": (STEP, 3, (2,), 3, {}, {**SHARDED, "bucket_cap_mb": 1}),
    "the end of an epoch in an accumulation": (STEP, 5, (0,), 6, {"accumulate_grad_batches": 4}, {}),
    "a validation under way": (VALIDATION, 2, (1,), 3, VALIDATED, {}),
    "a validation that follows": (STEP, 4, (1,), 4, VALIDATED, {}),
    "the epoch's end": (STEP, 6, (1,), 6, PLAIN, {}),
    "the epoch's end, a worker, the Trainer's sampler": (STEP, 3, (1,), 3, SAMPLED, {}),
    "the epoch's end, a loader with a state": (STEP, 6, (1,), 6, {}, {}),
    "the epoch's end, with max_steps": (STEP, 6, (1,), 6, {**PLAIN, "max_epochs": -1, "max_steps": 12}, {}),
    "the epoch after which training stops": (STEP, 6, (0,), 6, {"max_epochs": MANY}, {}),
    "the last validation": (VALIDATION, 12, (1,), 12, {}, {}),
    "after all": (END, 12, (1,), 12, {}, {}),
    "accumulated in shards": (STEP, 3, (1,), 4, ACCUMULATED, {"shard_optimizer": True, "scatter_every_pass": True}),
    "sharded, in parts": (STEP, 3, (1,), 3, {}, {**SHARDED, "state_dict_type": "sharded"}),
}


@patch.object(gloo, "SHORT_BYTES", 0)  # the sums of gloo's own all-reduce depend on where in it values are
def preempted_and_resumed(folder: Path, name: str) -> None:
    *at, steps, options, strategy = CASES[name]
    number = signal.SIGUSR1 if name == "SIGUSR1" else signal.SIGTERM
    undisturbed, first, second = Preempted(), Preempted(*at, number), Preempted()
    assert not run(folder, undisturbed, options, strategy, seed=10)
    assert not list(folder.iterdir())
    assert run(folder, first, options, strategy, seed=10)
    assert len(first.losses) == steps
    assert not run(folder, second, options, strategy, seed=20, resume=str(folder / "preempted.ckpt"))
    assert first.losses + second.losses == undisturbed.losses
    assert first.validated + second.validated == undisturbed.validated
    assert first.ended + second.ended == undisturbed.ended == 1
    assert all(map(torch.equal, undisturbed.parameters(), second.parameters()))
    dist.barrier()  # rank 0 removes
    assert not list(folder.iterdir()), "a run that has ended leaves nothing to resume from"


QUICK = {
    *("the end of an epoch in an accumulation", "a validation under way", "the last validation"),
    "sharded, in parts",
}


@pytest.mark.parametrize("name", some_slow(CASES, QUICK))
def test_a_preempted_run_goes_on_as_if_undisturbed(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    run_ranks(3 if "three" in name else 2, preempted_and_resumed, tmp_path, name)


def resumed_with_a_loader_of_another_kind(folder: Path) -> None:
    assert run(folder, Preempted(STEP, BATCHES, (1,), signal.SIGTERM), {"plain_loader": True}, {}, seed=10)
    model = Preempted()
    assert not run(folder, model, {}, {}, seed=20, resume=str(folder / "preempted.ckpt"))
    assert len(model.losses) == BATCHES


def test_a_run_may_be_resumed_with_a_loader_of_another_kind(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, resumed_with_a_loader_of_another_kind, tmp_path)


def with_the_option_and_without(folder: Path, saved: bool, resumed: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the checkpoint is of the middle|You're resuming from")
        first, second = (Preempted(STEP, 3, (1,), signal.SIGTERM), Preempted())
        assert run(folder, first, {"plain_loader": True}, {"exact_resume": saved}, seed=10)
        path = str(folder / "preempted.ckpt")
        assert not run(folder, second, {"plain_loader": True}, {"exact_resume": resumed}, seed=20, resume=path)
    assert len(second.losses) == 2 * BATCHES - 3


@pytest.mark.parametrize("saved", [False, True])
def test_exact_resume_may_be_chosen_or_left_out_at_a_restart(run_ranks: RunRanks, tmp_path: Path, saved: bool) -> None:
    run_ranks(2, with_the_option_and_without, tmp_path, saved, not saved)


def preempted_with_a_state(folder: Path) -> None:
    assert run(folder, Preempted(STEP, 3, (1,), signal.SIGTERM), {}, {}, seed=10)


def on_one_rank(folder: Path) -> None:
    with pytest.raises(ValueError, match="expected 2 ranks for this checkpoint, as when it was saved, found 1"):
        run(folder, Preempted(), {}, {}, seed=20, resume=str(folder / "preempted.ckpt"))


def test_a_loaders_state_of_a_preempted_run_goes_to_as_many_ranks_alone(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, preempted_with_a_state, tmp_path)
    run_ranks(1, on_one_rank, tmp_path)


class Prefetching(pl.LightningModule):
    """Takes a batch more than it trains on, and gets a signal in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ahead, self.steps = nn.Linear(8, 4), list[Any](), 0

    def training_step(self, dataloader_iter: Any) -> Tensor:
        while len(self.ahead) < 2 and (found := next(dataloader_iter, None)) is not None:
            self.ahead.append(found[0])
        self.steps += 1
        if self.steps == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        inputs, target = self.ahead.pop(0)
        return nn.functional.mse_loss(self.layer(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(2)
def test_batches_that_are_fetched_ahead_are_not_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Prefetching()
    fit = trainer(ours(), callbacks=PreemptionCheckpoint(tmp_path), max_epochs=1, accumulate_grad_batches=4)
    with pytest.raises(SIGTERMException):
        fit.fit(model, Loader())
    assert (model.steps, fit.global_step) == (4, 1)


def fit_for(folder: Path, steps: int, given: str | None, resume: bool, last: bool, preempt: bool) -> tuple[int, str]:
    """Trains up to a step, as a script does that is started again and again; where it began, and what it warned of."""
    callbacks: list[pl.Callback] = [PreemptionCheckpoint(folder, resume=resume)]
    options: Options = {"max_steps": steps, "max_epochs": -1, "num_sanity_val_steps": 0}
    if last:
        callbacks.append(pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=steps))
        options["enable_checkpointing"] = True
    model = Preempted(STEP, steps, (1,), signal.SIGTERM) if preempt else Preempted()
    with warnings.catch_warnings(record=True, action="always") as warned:
        with suppress(SIGTERMException):
            trainer(ours(), callbacks=callbacks, **options).fit(model, Loader(), loader(), ckpt_path=given)
    dist.barrier()
    told = [str(warning.message) for warning in warned]
    return steps - len(model.losses), " ".join(text for text in told if "preempted.ckpt" in text)


@on_ranks(2)
def test_a_script_that_is_started_again_goes_on_with_the_newest_checkpoint(tmp_path: Path) -> None:
    """As a YAML file has it: ``resume: true``, and ``ckpt_path: last`` where a ModelCheckpoint saves as well."""
    again = partial(fit_for, tmp_path, given="last", resume=True)
    assert again(2, last=False, preempt=True)[0] == 0, "there is no checkpoint at the first start"
    assert again(4, last=True, preempt=False)[0] == 2, "the preempted one, as there is no other"
    assert [path.name for path in tmp_path.glob("[lp]*.ckpt")] == ["last.ckpt"]
    assert again(6, last=True, preempt=True)[0] == 4, "the last one, as the preempted one has gone"
    os.utime(tmp_path / "last.ckpt", (1, 1))
    assert again(8, last=False, preempt=True)[0] == 6, "the preempted one, of step 6"
    os.utime(tmp_path / "preempted.ckpt", (1, 1))
    os.utime(tmp_path / "last.ckpt", (2, 2))
    assert again(9, last=True, preempt=False)[0] == 6, "the last one, as it is newer"


class Loaders(pl.LightningDataModule):
    def train_dataloader(self) -> Loader:
        return Loader()


class Cli(LightningCLI):
    made: ClassVar[list[Preempted]] = []

    def before_fit(self) -> None:
        self.made.append(self.model)


def start_by_yaml(*arguments: str) -> tuple[int, bool]:
    """Starts a LightningCLI with the YAML of the page; how many steps it has made, and whether it was preempted."""
    page = (ROOT / "docs" / "preemption.md").read_text()
    yaml = Path(f"run_of_rank_{dist.get_rank()}.yaml")  # one file for both would be read half written
    yaml.write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL).group(1))
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    options: Options = {"plugins": "tests.lightning_models.PoolEnvironment", "accelerator": "cpu", "max_steps": 4}
    options["devices"] = dist.get_world_size()
    given = [f"--trainer.{name}={str(value).lower()}" for name, value in dict.fromkeys(quiet, False).items()]
    given += [f"--trainer.{name}={value}" for name, value in options.items()]
    preempted = False
    try:
        Cli(Preempted, Loaders, args=["fit", f"--config={yaml}", *given, *arguments], save_config_callback=None)
    except SIGTERMException:
        preempted = True
    dist.barrier()
    return len(Cli.made[-1].losses), preempted


@on_ranks(1, fresh=True)
def test_the_yaml_of_the_page_serves_for_each_start(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # Lightning's
    preempted = {"place": STEP, "batch": 3, "ranks": [0], "number": int(signal.SIGTERM)}
    assert start_by_yaml(*(f"--model.{name}={value}" for name, value in preempted.items())) == (3, True)
    assert start_by_yaml() == (1, False)
    assert not Path("checkpoints/preempted.ckpt").exists()


@on_ranks(2)
def test_a_run_that_begins_without_the_checkpoint_says_so_and_leaves_it(tmp_path: Path) -> None:
    assert fit_for(tmp_path, 2, None, resume=False, last=False, preempt=True) == (0, "")
    began, warned = fit_for(tmp_path, 4, None, resume=False, last=False, preempt=False)
    assert began == 0
    told = re.search(r"preempted.ckpt is newer than what this run begins with \(no checkpoint\): it is left", warned)
    assert bool(told) == (dist.get_rank() == 0)
    assert (tmp_path / "preempted.ckpt").exists()
    began, warned = fit_for(tmp_path, 4, str(tmp_path / "preempted.ckpt"), resume=False, last=False, preempt=False)
    assert (began, warned) == (2, "")
    assert not (tmp_path / "preempted.ckpt").exists()


class Slurm(PoolEnvironment, SLURMEnvironment):
    def __init__(self) -> None:
        SLURMEnvironment.__init__(self)


@pytest.mark.parametrize("number", some_slow([signal.SIGUSR1, signal.SIGTERM], {signal.SIGUSR1}))
@on_ranks(2, fresh=True)
def test_a_slurm_job_resumes_and_is_requeued_at_its_signal(tmp_path: Path, number: int) -> None:
    """``scontrol`` is a stand-in, which takes its time. The other rank waits."""
    scontrol, asked = tmp_path / "scontrol", tmp_path / "asked"
    if dist.get_rank() == 0:
        scontrol.write_text(f'#!/bin/sh\nsleep 2\necho "$@" >> {asked}\n')
        scontrol.chmod(0o755)
        (tmp_path / "root").mkdir()
    job = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "JOB_NAME": "job", "JOB_ID": "7"}
    os.environ.update({f"SLURM_{name}": value for name, value in job.items()}, PATH=f"{tmp_path}:{os.environ['PATH']}")
    options: Options = {"default_root_dir": tmp_path / "root", "max_epochs": 1, "limit_val_batches": 0}
    strategy = {"cluster_environment": Slurm()}
    undisturbed, first, second = Preempted(), Preempted(STEP, 3, (1,), number), Preempted()
    assert not run(tmp_path / "saves", undisturbed, options, strategy, seed=10)
    with patch.object(abort_listener, "_log") as log:
        assert run(tmp_path / "saves", first, options, strategy, seed=10)
    assert not log.error.called
    dist.barrier()
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if number == signal.SIGUSR1 else "")
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["hpc_ckpt_1.ckpt"]
    assert not run(tmp_path / "saves", second, options, strategy, seed=20)  # Lightning looks for the checkpoint itself
    assert first.losses + second.losses == undisturbed.losses
    if dist.get_rank() == 0:
        (tmp_path / "last.ckpt").write_text("older")
        os.utime(tmp_path / "last.ckpt", (1, 1))
    dist.barrier()
    third, older = Preempted(), str(tmp_path / "last.ckpt")
    assert not run(tmp_path / "saves", third, {**options, "chooses": True}, strategy, seed=20, resume=older)
    assert third.losses == second.losses, "the newer one of both"


class Ends(Preempted):
    """Ends in the ways that :data:`ENDS` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 2:
            if self.how == "twice" and self.global_rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1.1)
                os.kill(os.getpid(), signal.SIGUSR1)
            if self.how == "absent":
                if self.global_rank == 1:
                    listener = listen(Collectives(None))
                    eventually(lambda: listener.failure)
                os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:  # after the ranks have agreed on the end of fit
        if self.how == "late":
            os.kill(os.getpid(), signal.SIGUSR1)


ENDS: dict[str, dict[int, str]] = {
    "twice": {0: "the process ends", 1: "PeerFailureError"},
    "absent": {0: rf"PeerFailureError: .*a signal asks all ranks to end, and rank 1{WHERE} did not come in 2 s"},
    "late": dict.fromkeys((0, 1), rf"handled \[<Signals.SIGUSR1: {signal.SIGUSR1:d}>\]|handled \[10\]"),
    "warning": {
        0: rf"SIGTERMException.*no state_dict or no length.*preempted after step 2, as rank 1{WHERE} got SIGTERM",
        1: rf"SIGTERMException.*rank 1{WHERE} got SIGTERM: all ranks end after step 2",
    },
    "ddp": dict.fromkeys((0, 1), "MisconfigurationException: expected strategy='bucketddp'.*found DDPStrategy"),
    "thread": dict.fromkeys((0, 1), "ValueError: signal only works in main thread"),
}


@pytest.mark.parametrize("how", ENDS)
@on_ranks(2, fresh=True, may_exit=[0])
def test_other_ends_say_what_happened(how: str, tmp_path: Path) -> None:
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    fits = trainer(ddp() if how == "ddp" else ours(), callbacks=PreemptionCheckpoint(tmp_path, patience=2))
    model = Preempted(STEP, 2, (1,), signal.SIGTERM) if how == "warning" else Ends(how)
    try:
        with (
            warnings.catch_warnings(record=True, action="always") as warned,
            patch.object(preemption, "rank_zero_info", warnings.warn),
            logged(preemption.__name__, warnings.warn),
        ):
            if how == "thread":
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(fits.fit, model, loader()).result()
            fits.fit(model, loader())
        said = f"handled {came}"
    except (Exception, SIGTERMException) as error:
        said = f"{type(error).__name__}: {error} {[str(warning.message) for warning in warned]}"
        if how == "warning":
            fits.fit(Preempted(), loader())  # the same Trainer trains again
    assert re.match(ENDS[how].get(dist.get_rank(), ""), said, re.DOTALL), said


@pytest.mark.parametrize("code", [None, 75])
@on_ranks(2)
def test_all_ranks_end_with_the_exit_code_that_was_asked_for(code: int | None, tmp_path: Path) -> None:
    fits = trainer(ours(), callbacks=PreemptionCheckpoint(tmp_path, exit_code=code))
    with pytest.raises(SIGTERMException) as ended:
        fits.fit(Preempted(STEP, 2, (1,), signal.SIGTERM), Loader())
    assert ended.value.code == code
    assert (tmp_path / "preempted.ckpt").exists()


@on_ranks(2, cases=[(0, 3, False), (1, 3, False), (1, 5, True)])
def test_a_plain_loop_ends_on_all_ranks_after_the_same_step(rank: int, steps: int, asks: bool) -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    net, told = BucketDDP(nn.Linear(8, 4)), dist.get_rank() == rank
    for done in range(1, 6):
        if done == steps and told and not asks:
            os.kill(os.getpid(), signal.SIGTERM)
        net(torch.randn(2, 8)).sum().backward()
        if net.preempted():
            break
    if asks and told:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert done == steps
    assert net.preempted() == (not asks)
    assert net.preempted(no_pass_follows=True)
    assert [signal.getsignal(number) for number in HANDLED] != before
    net.close()
    assert [signal.getsignal(number) for number in HANDLED] == before
