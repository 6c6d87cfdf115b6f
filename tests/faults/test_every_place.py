"""Rank 1 fails somewhere in a fit: the other ranks end soon, with its name, and no checkpoint is wrong."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.lightning_models import Regression, data, ours, trainer
from tests.pool import TIMEOUT, RunRanks
from tests.reference import everyones

PLACES = [
    "forward",
    "backward, before the first bucket",
    "backward, after the first bucket",
    "optimizer step",
    "logging",
    "checkpoint",
    "validation",
    "end of fit",
    "teardown",
]
AFTER_THE_LAST_WAIT = ("end of fit", "teardown")
"""The others may have ended by then."""

WAYS = {"raises": None, "killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
"""How rank 1 fails: the signal that it gets."""

SOON = timedelta(seconds=8)
"""The timeout of collectives where a rank is stopped: nothing but that tells."""

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_optimizer": True},
    "wire": {"wire_dtype": "bfloat16"},
    "hook": {"comm_hook": "fp16"},
}
STEP = 2


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Any) -> Tensor:
        ctx.fail = fail
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.fail()
        return grad, None


class Fails(Regression):
    """Fails on rank 1, in its third step if the place is in one.

    Args:
        place: One of PLACES; empty for nowhere.
        how: One of WAYS.
    """

    records = False

    def __init__(self, place: str, how: str) -> None:
        super().__init__()
        self.place, self.how = place, how

    def at(self, place: str) -> None:
        if place == self.place and self.global_rank == 1 and self.trainer.global_step >= STEP:
            if (sent := WAYS[self.how]) is None:
                raise ArithmeticError("no luck today")
            os.kill(os.getpid(), sent)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at("forward")
        first, *others = self.net.layers
        x = InBackward.apply(first(batch[0]), partial(self.at, "backward, after the first bucket"))
        loss = nn.functional.mse_loss(nn.Sequential(*others, self.net.head)(x), batch[1])
        loss = InBackward.apply(loss, partial(self.at, "backward, before the first bucket"))
        self.at("logging")
        self.log("loss", loss.detach(), on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("validation")
        self.log("valid", self.net(batch[0]).mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("optimizer step")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at("checkpoint")

    def on_train_end(self) -> None:
        self.at("end of fit")

    def teardown(self, stage: str) -> None:
        self.at("teardown")


def train(folder: Path, place: str, how: str, kind: str) -> None:
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit = trainer(ours(**KINDS[kind]), callbacks=[saves], enable_checkpointing=True, val_check_interval=STEP + 1)
    fit.fit(Fails(place, how), data(4), data(1))


def fails(folder: str, place: str, how: str, kind: str) -> tuple[str, float]:
    """What this rank's error says, and how long after the beginning of the failing fit it came."""
    fine, failing = Path(folder, "fine"), Path(folder, "failing")
    pids = everyones(os.getpid())
    if how == "stopped":
        rank = dist.get_rank()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store", len(pids))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(pids), timeout=SOON)
    train(fine, "", how, kind)
    began, said = time.monotonic(), ""
    try:
        train(failing, place, how, kind)
    except BaseException as error:
        said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    took = time.monotonic() - began
    if dist.get_rank() == 0:
        if how == "stopped":
            os.kill(pids[1], signal.SIGKILL)
        for path in sorted(failing.glob("*.ckpt")):
            saved, expected = (torch.load(each / path.name)["state_dict"] for each in (failing, fine))
            assert all(torch.equal(value, expected[name]) for name, value in saved.items()), path.name
    return said, took


def check(run_ranks: RunRanks, folder: Path, place: str, how: str, kind: str, world_size: int) -> None:
    answers = run_ranks(world_size, fails, str(folder), place, how, kind, fresh=True, may_exit=[1])
    own = answers.pop(1)
    if how == "raises":
        assert own[0].startswith("ArithmeticError: no luck today")
    for said, took in answers:
        assert took < 0.8 * TIMEOUT.total_seconds()
        assert "rank 1" in said or "rank(s) 1" in said or (not said and place in AFTER_THE_LAST_WAIT), said
    assert len(list((folder / "failing").glob("*.ckpt"))) >= STEP


QUICK = {
    "forward": ("stopped", "plain"),
    "backward, before the first bucket": ("killed", "hook"),
    "optimizer step": ("killed", "sharded"),
    "checkpoint": ("raises", "sharded"),
    "validation": ("SIGTERM", "wire"),
    "end of fit": ("raises", "hook"),
}
"""By place: each way to fail and each kind occurs."""


@pytest.mark.parametrize("place", QUICK)
def test_a_rank_that_fails_ends_the_others_and_spoils_no_checkpoint(
    run_ranks: RunRanks, tmp_path: Path, place: str
) -> None:
    check(run_ranks, tmp_path, place, *QUICK[place], 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("place", "how", "kind"), list(product(PLACES, WAYS, KINDS)))
def test_every_failure_at_every_place(
    run_ranks: RunRanks, tmp_path: Path, place: str, how: str, kind: str, world_size: int
) -> None:
    check(run_ranks, tmp_path, place, how, kind, world_size)
