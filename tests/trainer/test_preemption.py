"""A preempted job ends on all ranks after the same step, with a checkpoint, and goes on bit for bit."""

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDP, PreemptionCheckpoint
from tests.lightning_models import PoolEnvironment, ddp, ours, trainer
from tests.pool import RunRanks, on_ranks

BATCHES = 6
HANDLED = (signal.SIGTERM, signal.SIGUSR1)


class Loader:
    """Draws the order of an epoch's batches, another one on each rank, and knows where it is."""

    def __init__(self) -> None:
        self.batches = [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(BATCHES)]
        self.order: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        if self.at == len(self.order):
            self.order, self.at = torch.randperm(BATCHES).tolist(), 0
        while self.at < BATCHES:
            self.at += 1
            yield self.batches[self.order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


class Preempted(pl.LightningModule):
    """Draws random numbers of all kinds, and gets signals where it is told to."""

    def __init__(self, place: str = "", batch: int = 0, ranks: tuple[int, ...] = (), number: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.last, self.first, self.dropout = nn.Linear(16, 4), nn.Linear(8, 16), nn.Dropout(0.3)
        self.place, self.batch, self.ranks, self.number = place, batch, ranks, number
        self.losses: list[tuple[int, float]] = []  # with the epoch's number, which samplers go by
        self.validated = 0

    def come(self, place: str) -> None:
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if (place, batches) == (self.place, self.batch) and self.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.come("training_step")
        found = self.last(self.dropout(self.first(batch[0]).tanh()))
        loss = nn.functional.mse_loss(found, batch[1]) * (1 + random.random() + np.random.rand())
        self.losses.append((self.current_epoch, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.come("validation_step")
        self.validated += 1

    def on_validation_epoch_end(self) -> None:
        assert self.validated % BATCHES == 0, "it ran to its end"

    def on_train_epoch_end(self) -> None:
        self.come("on_train_epoch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def run(folder: Path, model: Preempted, case: dict[str, Any], seed: int, resume: str | None = None) -> bool:
    """Trains two epochs, as far as the model's signals let it; whether they did."""
    torch.manual_seed(1 + dist.get_rank())
    loader: Any = Loader()
    if case.get("plain_loader"):
        loader = DataLoader(TensorDataset(torch.randn(24, 8), torch.randn(24, 4)), 4, shuffle=True)
    validation = DataLoader(TensorDataset(torch.randn(24, 8), torch.randn(24, 4)), 4)
    for seeds in (torch.manual_seed, random.seed, np.random.seed):
        seeds(seed + dist.get_rank())
    saves = PreemptionCheckpoint(folder)
    before = [signal.getsignal(number) for number in HANDLED]
    options = {"max_epochs": 2, "callbacks": saves, "num_sanity_val_steps": 0, **case.get("trainer", {})}
    fits = trainer(ours(**case.get("strategy", {})), **options)
    try:
        fits.fit(model, loader, validation, ckpt_path=resume)
    except SIGTERMException:
        return True
    finally:
        assert [signal.getsignal(number) for number in HANDLED] == before
    return False


SHARDED = {"shard_optimizer": True, "wire_dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "rank 0": {"at": ("training_step", 3, (0,), signal.SIGTERM), "steps": 3},
    "rank 1": {"at": ("training_step", 1, (1,), signal.SIGUSR1), "steps": 1},
    "both": {"at": ("training_step", 3, (0, 1), signal.SIGTERM), "steps": 3},
    "rank 2 of three": {"at": ("training_step", 3, (2,), signal.SIGTERM), "steps": 3, "strategy": {"bucket_cap_mb": 1}},
    "sharded, three": {
        "at": ("training_step", 3, (2,), signal.SIGTERM),
        "steps": 3,
        "strategy": {**SHARDED, "bucket_cap_mb": 1},
    },
    "accumulation": {
        "at": ("training_step", 3, (1,), signal.SIGTERM),
        "steps": 4,
        "trainer": {"accumulate_grad_batches": 2},
    },
    "a validation under way": {
        "at": ("validation_step", 2, (1,), signal.SIGTERM),
        "steps": 3,
        "trainer": {"val_check_interval": 2},
    },
    "a validation that follows": {
        "at": ("training_step", 4, (1,), signal.SIGTERM),
        "steps": 4,
        "trainer": {"val_check_interval": 2},
    },
    "the epoch's end": {"at": ("training_step", 6, (1,), signal.SIGTERM), "steps": 6, "plain_loader": True},
    "the epoch's end, with max_steps": {
        "at": ("training_step", 6, (1,), signal.SIGTERM),
        "steps": 6,
        "plain_loader": True,
        "trainer": {"max_epochs": -1, "max_steps": 12},
    },
    "the last validation": {"at": ("validation_step", 12, (1,), signal.SIGTERM), "steps": 12},
    "after all": {"at": ("on_train_epoch_end", 12, (1,), signal.SIGTERM), "steps": 12},
    "sharded": {"at": ("training_step", 3, (1,), signal.SIGTERM), "steps": 3, "strategy": SHARDED},
    "sharded, accumulated in shards": {
        "at": ("training_step", 3, (1,), signal.SIGTERM),
        "steps": 4,
        "strategy": {"shard_optimizer": True, "scatter_every_pass": True},
        "trainer": {"accumulate_grad_batches": 2},
    },
    "sharded, in parts": {
        "at": ("training_step", 3, (1,), signal.SIGTERM),
        "steps": 3,
        "strategy": {**SHARDED, "state_dict_type": "sharded"},
    },
}


def preempted_and_resumed(folder: Path, name: str) -> None:
    case = CASES[name]
    undisturbed, first, second = Preempted(), Preempted(*case["at"]), Preempted()
    assert not run(folder, undisturbed, case, seed=10)
    assert not list(folder.iterdir())
    assert run(folder, first, case, seed=10)
    assert len(first.losses) == case["steps"]
    assert not run(folder, second, case, seed=20, resume=str(folder / "preempted.ckpt"))
    assert first.losses + second.losses == undisturbed.losses
    assert first.validated + second.validated == undisturbed.validated
    for one, other in zip(undisturbed.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_a_preempted_run_goes_on_as_if_undisturbed(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    run_ranks(3 if "three" in name else 2, preempted_and_resumed, tmp_path, name)


# -- Slurm -----------------------------------------------------------------------------------------------


class Slurm(PoolEnvironment, SLURMEnvironment):
    def __init__(self) -> None:
        SLURMEnvironment.__init__(self)


def in_slurm(folder: Path, number: int, requeued: bool) -> None:
    """``scontrol`` is a stand-in."""
    job = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "JOB_NAME": "job", "JOB_ID": "7"}
    os.environ.update({f"SLURM_{name}": value for name, value in job.items()}, PATH=f"{folder}:{os.environ['PATH']}")
    case = {"strategy": {"cluster_environment": Slurm()}, "trainer": {"default_root_dir": folder / "root"}}
    undisturbed, first, second = Preempted(), Preempted("training_step", 3, (1,), number), Preempted()
    assert not run(folder / "saves", undisturbed, case, seed=10)
    assert run(folder / "saves", first, case, seed=10)
    dist.barrier()
    assert (folder / "asked").exists() == requeued
    assert [path.name for path in (folder / "root").iterdir()] == ["hpc_ckpt_1.ckpt"]
    assert not run(folder / "saves", second, case, seed=20)  # Lightning looks for the checkpoint itself
    assert first.losses + second.losses == undisturbed.losses


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_job_resumes_and_is_requeued_at_its_signal(
    run_ranks: RunRanks, tmp_path: Path, number: int, requeued: bool
) -> None:
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "root").mkdir()
    run_ranks(2, in_slurm, tmp_path, number, requeued, fresh=True)
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"


# -- other ends --------------------------------------------------------------------------------------------


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
                time.sleep(6 * self.global_rank)
                os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:  # after the ranks have agreed on the end of fit
        if self.how == "late":
            os.kill(os.getpid(), signal.SIGUSR1)


def ends(how: str, folder: Path) -> str:
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    loader = DataLoader(TensorDataset(torch.randn(24, 8), torch.randn(24, 4)), 4)
    fits = trainer(ddp() if how == "ddp" else ours(), callbacks=PreemptionCheckpoint(folder, patience=2))
    model = Preempted("training_step", 2, (1,), signal.SIGTERM) if how == "warning" else Ends(how)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if how == "thread":
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(fits.fit, model, loader).result()
            fits.fit(model, loader)
    except (Exception, SIGTERMException) as error:
        if how == "warning":
            fits.fit(Preempted(), loader)  # the same Trainer trains again
        return f"{type(error).__name__}: {error} {[str(it.message) for it in warned]}"
    return f"handled {came}"


ENDS: dict[str, dict[int, str]] = {
    "twice": {1: "PeerFailureError"},
    "absent": {0: r"PeerFailureError: .*a signal asks all ranks to end, and rank\(s\) \[1\] did not come in 2 s"},
    "late": dict.fromkeys((0, 1), rf"handled \[<Signals.SIGUSR1: {signal.SIGUSR1:d}>\]|handled \[10\]"),
    "warning": {0: "SIGTERMException.*no state_dict or no length", 1: "SIGTERMException"},
    "ddp": dict.fromkeys((0, 1), "MisconfigurationException: expected strategy='bucketddp'.*found DDPStrategy"),
    "thread": dict.fromkeys((0, 1), "RuntimeError: expected fit.*in the main thread"),
}


@pytest.mark.parametrize("how", ENDS)
def test_other_ends_say_what_happened(run_ranks: RunRanks, tmp_path: Path, how: str) -> None:
    found = run_ranks(2, ends, how, tmp_path, fresh=True, may_exit=[0] if how == "twice" else [])
    for rank, words in ENDS[how].items():
        assert re.match(words, found[rank], re.DOTALL), found
    if how == "twice":
        assert found[0] is None, "the process has ended"


@on_ranks(2)
def test_a_plain_loop_ends_on_all_ranks_after_the_same_step() -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    for rank, steps, asks in ((0, 3, False), (1, 3, False), (1, 5, True)):
        net = BucketDDP(nn.Linear(8, 4))
        done = 0
        for step in range(1, 6):
            if step == steps and dist.get_rank() == rank and not asks:
                os.kill(os.getpid(), signal.SIGTERM)
            net(torch.randn(2, 8)).sum().backward()
            done = step
            if net.preempted():
                break
        if asks and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert done == steps
        assert net.preempted() == (not asks)
        assert net.preempted(no_pass_follows=True)
        assert [signal.getsignal(number) for number in HANDLED] != before
        net.close()
        assert [signal.getsignal(number) for number in HANDLED] == before
