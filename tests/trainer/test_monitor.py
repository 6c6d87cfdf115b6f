"""``CommunicationMonitor``: what it logs, whom it names, and what it sends."""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bucketddp import CommunicationMonitor
from lightning_bucketddp.peers import status
from lightning_bucketddp.trainer import monitor
from tests.lightning_models import Memory, Regression, data, ddp, ours, trainer
from tests.pool import on_ranks
from tests.reference import eventually, group_store, telling_of_waits, without_where
from tests.traces.recorder import recording

PREFIX = "CommunicationMonitor/"
STEP_MS = 60


class Clock:
    """Stands in for the module ``time``. Its time is made by the test, so that a busy machine does not matter.

    All ranks see the milliseconds that one of them adds, through the store. Each look takes 10 microseconds.
    """

    def __init__(self) -> None:
        self.store = group_store()
        self.own = 0.0

    def perf_counter(self) -> float:
        self.own += 1e-5
        return self.store.add("ms", 0) / 1e3 + self.own


class Slow(Regression):
    """One rank takes longer than the others in its training step: until the other one waits for it in the pass."""

    records = False

    def __init__(self, slow: int, clock: Clock, net: str = "mlp", optimizer: str = "sgd") -> None:
        super().__init__(net, optimizer)
        self.is_slow, self.clock, self.steps = dist.get_rank() == slow, clock, 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.steps += 1
        if self.is_slow:
            eventually(lambda: self.clock.store.add(f"waits in {self.steps}", 0))
            self.clock.store.add("ms", STEP_MS)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.clock.own += 5 * STEP_MS / 1e3

    def waits(self) -> None:
        """This rank waits in a pass."""
        if not self.is_slow:
            self.clock.store.add(f"waits in {self.steps}", 1)


def of_monitor(memory: Memory) -> list[tuple[int | None, dict[str, float]]]:
    return [(step, metrics) for step, metrics in memory.logged if f"{PREFIX}bytes" in metrics]


# rank 0 sends module buffers, for which the others wait in forward
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (-1, {}, {}),
    "module buffers": (0, {"net": "conv"}, {}),
    "sharded": (-1, {"optimizer": "adamw"}, {"shard_optimizer": True}),
    "hook": (-1, {}, {"comm_hook": "fp16"}),
}


@on_ranks(2, cases=CASES, quick=["module buffers", "sharded"], timeout=120)
def test_a_slow_rank_is_logged_and_named_once(slow: int, model: dict[str, Any], options: dict[str, Any]) -> None:
    slow %= dist.get_world_size()
    memory = Memory()
    settings: dict[str, Any] = {"logger": memory, "log_every_n_steps": 5, "limit_val_batches": 1}
    module = Slow(slow, clock := Clock(), **model)
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(monitor, "SLOW_STEPS", 10),
        patch.object(monitor, "time", clock),
        patch.object(status, "time", clock),
        telling_of_waits(module.waits),
    ):
        warnings.simplefilter("always")
        runs = trainer(ours(**options), callbacks=[CommunicationMonitor(5)], max_epochs=2, **settings)
        runs.fit(module, data(10), data(1))
    named = [str(warning.message) for warning in caught if "is slower than the others" in str(warning.message)]
    assert [without_where(text).split(" is slower")[0] for text in named] == [f"rank {slow}"] * (dist.get_rank() == 0)
    assert all("in the last 10 steps it took 60." in text for text in named)
    found = of_monitor(memory)
    assert [step for step, _ in found] == [4, 9, 14, 19]
    assert [step for step, metrics in memory.logged if "loss" in metrics] == [4, 9, 14, 19]
    for _, metrics in found:
        assert {name.partition("/")[0] for name in metrics} == {"CommunicationMonitor"}
        values = {name.partition("/")[2]: value for name, value in metrics.items()}
        assert values["slowest_rank"] == slow
        least, median, most = (values[f"waited_ms_{suffix}"] for suffix in ("min", "median", "max"))
        assert 0 < least <= median < 1
        assert most == pytest.approx(STEP_MS, abs=1), "neither validation nor other waits count"
        assert 0 < values["exposed_ms"] < 1
        assert values["bytes"] > 1000
        assert 0 < values["gigabytes_per_s"] < 10


@on_ranks(2)
def test_metrics_go_to_every_logger_and_accumulation_is_waited_for() -> None:
    memory, other = Memory(), Memory()
    fits: dict[str, Any] = {"logger": [memory, other], "callbacks": [CommunicationMonitor(every_n_steps=3)]}
    trainer(ours(), accumulate_grad_batches=4, **fits).fit(Regression(), data(13))
    assert len(of_monitor(memory)) == 3, "after the batches 4, 8 and 12, which have passes"
    trainer(ours(), **fits).fit(Regression(), data(3))  # once more, with another wrapper
    assert len(of_monitor(memory)) == 4
    assert other.logged == memory.logged


@on_ranks(2, cases={"plain": {}, "sharded": {"shard_optimizer": True}}, quick=["sharded"])
def test_it_sends_one_small_collective_every_n_steps(options: dict[str, Any]) -> None:
    def sent(*monitors: CommunicationMonitor) -> list[str]:
        with recording() as recorder:
            runs = trainer(ours(**options), callbacks=list(monitors), logger=Memory())
            module = Regression(optimizer="adamw")
            module.records = False
            runs.fit(module, data(8))
        return recorder.trace["world"]

    without, seldom, often = sent(), sent(CommunicationMonitor(9)), sent(CommunicationMonitor(3))
    assert without == seldom
    assert len(often) == len(without) + 2
    added = [line for line in often if line.split()[0] == "all_gather_single" and line.split()[2:4] == ["float32", "4"]]
    assert len(added) == 2
    assert [line for line in often if line not in added] == without


@on_ranks(2)
def test_another_strategy_no_logger_and_no_steps_are_refused() -> None:
    for strategy, logger, problem in ((ddp(), Memory(), "found DDPStrategy"), (ours(), False, "Trainer.logger=False")):
        with pytest.raises(MisconfigurationException, match=problem):
            trainer(strategy, logger=logger, callbacks=[CommunicationMonitor()]).fit(Regression(), data())
    with pytest.raises(ValueError, match="every_n_steps to be an int of at least 1, found 0"):
        CommunicationMonitor(0)
