"""One rank runs a backward more than the other in a manual step, as PPO does that stops early on KL."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_bucketddp import PeerFailureError, RankMismatchError
from tests.lightning_models import Regression, data, ours, trainer

RunRanks = Callable[..., list[Any]]
UNEQUAL_STEP = 2
SECONDS = 6.0
"""How long the ranks may take; they wait for ever otherwise."""


class StopsEarly(Regression):
    """Two backwards in each step; in one step three on one rank."""

    def __init__(self, longer_rank: int | None, sigterm: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.longer_rank, self.sigterm = longer_rank, sigterm
        self.steps = 0
        self.since = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        unequal = self.steps == UNEQUAL_STEP
        if unequal:
            self.since = time.monotonic()
        if unequal and self.sigterm:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        optimizer = self.optimizers()
        for _ in range(3 if unequal and self.global_rank == self.longer_rank else 2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        self.steps += 1


def unequal(longer_rank: int | None, sigterm: bool = False) -> tuple[int, str, float]:
    model = StopsEarly(longer_rank, sigterm)
    message = ""
    try:
        trainer(ours()).fit(model, data())
    except (PeerFailureError, RankMismatchError, SIGTERMException) as error:
        message = " ".join([str(error), *getattr(error, "__notes__", ())])
    assert dist.is_initialized()
    return model.steps, message, time.monotonic() - model.since


def test_as_many_backwards_on_each_rank_train(run_ranks: RunRanks) -> None:
    """Nothing else is wrong with such a step."""
    for steps, message, _ in run_ranks(2, unequal, None):
        assert (steps, message) == (6, "")


def assert_named(message: str) -> None:
    """The message names both ranks, the step, which counts from 1, and both counts."""
    assert {"rank 0", "rank 1", f"step {UNEQUAL_STEP + 1}"} <= set(re.findall(r"(?:rank|step) \d", message)), message
    assert {"2", "3"} <= set(re.findall(r"\b\d\b", re.sub(r"(?:rank|step) \d", "", message))), "both counts"


@pytest.mark.parametrize("longer_rank", [0, 1])
def test_a_backward_more_on_one_rank_is_an_error_on_every_rank(run_ranks: RunRanks, longer_rank: int) -> None:
    for steps, message, seconds in run_ranks(2, unequal, longer_rank, fresh=True):
        assert steps <= UNEQUAL_STEP + 1
        assert seconds < SECONDS
        assert_named(message)


def test_sigterm_does_not_keep_ranks_waiting_for_different_things(run_ranks: RunRanks) -> None:
    for _, message, seconds in run_ranks(2, unequal, 1, True, fresh=True):
        assert seconds < SECONDS
        assert_named(message)
