"""One rank runs a backward more than the other in a manual step, as PPO does that stops early on KL."""

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_bucketddp import PeerFailureError, RankMismatchError
from tests.lightning_models import Regression, data, ours, trainer
from tests.pool import RunRanks

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


def unequal(longer_rank: int | None, sigterm: bool) -> tuple[int, str, float]:
    model = StopsEarly(longer_rank, sigterm)
    message = ""
    try:
        trainer(ours()).fit(model, data())
    except (PeerFailureError, RankMismatchError, SIGTERMException) as error:
        message = " ".join([str(error), *getattr(error, "__notes__", ())])
    assert dist.is_initialized()
    return model.steps, message, time.monotonic() - model.since


@pytest.mark.parametrize(("longer_rank", "sigterm"), [(None, False), (0, False), (1, True)])
def test_one_backward_more_is_an_error_on_all_ranks(
    run_ranks: RunRanks, longer_rank: int | None, sigterm: bool
) -> None:
    for steps, message, seconds in run_ranks(2, unequal, longer_rank, sigterm, fresh=longer_rank is not None):
        if longer_rank is None:
            assert (steps, message) == (6, ""), "nothing else is wrong with such a step"
            continue
        assert steps <= UNEQUAL_STEP + 1
        assert seconds < SECONDS
        for words in ("rank 0", "rank 1", f"step {UNEQUAL_STEP + 1}", " 2 ", " 3 "):
            assert words in message
