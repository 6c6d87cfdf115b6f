"""A rank does not come: the others report it, with where each rank is.

Rank 1 sleeps, is stopped (SIGSTOP) or is killed at some point, while the others wait for it. Reports are read where
users find them: in the log of ``lightning_bucketddp.peers``, and in the error at the timeout.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers import abort_listener, roll_call
from lightning_bucketddp.peers.abort_listener import listen
from lightning_bucketddp.peers.control import ControlChannel
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.timed_store import STORE_SILENT
from tests.launchers import free_port
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Mlp
from tests.pool import RunRanks, on_ranks
from tests.reference import WHERE, eventually, everyones, group_store, inputs_of, logged, without_where


def tells(text: str, patterns: Iterable[str]) -> bool:
    return all(re.search(pattern, text) for pattern in patterns)


def sleep_until(said: list[str], *patterns: str) -> None:
    """Sleep until a report has all these patterns; at most 35 s, as collectives have 40.

    A busy machine may report other waits before.
    """
    deadline = time.monotonic() + 35
    while not any(tells(text, patterns) for text in said) and time.monotonic() < deadline:
        time.sleep(0.02)


def stop_process(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def state_of(pid: int) -> str:
    """A process's state: T if it is stopped, Z if it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def reports(heard: Callable[[str], object] = lambda text: None, answer_seconds: float = 1) -> Iterator[list[str]]:
    """The reports that this rank logs. A rank that does not answer in time is reported as silent."""
    with (
        patch.object(roll_call, "ANSWER_SECONDS", answer_seconds),
        logged("lightning_bucketddp.peers", heard) as said,
    ):
        yield said


# -- reports in the log ------------------------------------------------------------------------------------------------

BEGIN = rf"^rank [02] has waited for \d+ s: rank 1{WHERE} did not come. Where ranks are"
OTHERS = f"ranks 0, 2{WHERE}: waiting for "
GRADIENTS = OTHERS + r"the gradients of 'net\.\S+ to 'net\S+ \(bucket 0, \d parameter\(s\)\), in step "
LATE_IN_STEP_2 = (
    BEGIN,
    rf"rank 1{WHERE}: not waiting, in step 2, pass 1",
    r"in sleep_until: time.sleep\(0.02\)\n",
    GRADIENTS + "2",
)
STOPPED_IN_STEP_3 = (
    BEGIN,
    rf"rank 1{WHERE}: silent for \d+ s; its last record, which may be old, says in step \d",
    GRADIENTS + "3, pass 2",
)
LATE_IN_VALIDATION = (
    BEGIN,
    rf"rank 1{WHERE}: not waiting, in step 3",
    r"in validation_step: sleep_until",
    OTHERS + r"the keys of self.log\(sync_dist=True\)",
)


class LateThreeTimes(Regression):
    """Rank 1 goes on when its reports are there; where it is stopped, rank 0 wakes it up."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said, self.late = said, dist.get_rank() == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.late and batch_idx == 1:
            sleep_until(self.said, *LATE_IN_STEP_2)
        if self.late and batch_idx == 2:
            stop_process()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.late:
            sleep_until(self.said, *LATE_IN_VALIDATION)
        self.log("valid", self.net(batch[0]).mean(), sync_dist=True)


@on_ranks(3)
def test_all_ranks_log_where_a_rank_is_that_does_not_come_and_training_goes_on() -> None:
    pids = everyones(os.getpid())

    def wake(text: str) -> None:
        if dist.get_rank() == 0 and tells(text, STOPPED_IN_STEP_3):
            os.kill(pids[1], signal.SIGCONT)

    with reports(wake) as said:
        model = LateThreeTimes(said)
        fits = trainer(ours(report_after=1), num_sanity_val_steps=0)
        dist.barrier()  # a rank that comes late to the first agreement would be reported
        fits.fit(model, data(3), data(1))
        sleep_until(said, *LATE_IN_VALIDATION)  # each rank hears when its listener looks
        dist.barrier()
    expected = LATE_IN_STEP_2, STOPPED_IN_STEP_3, LATE_IN_VALIDATION
    found = [[at for at, text in enumerate(said) if tells(text, patterns)] for patterns in expected]
    assert all(found), [text[:300] for text in said]
    first = [places[0] for places in found]
    assert first == sorted(first), "in this order"
    undisturbed = Regression()
    trainer(ours()).fit(undisturbed, data(3))
    close_to(model, undisturbed)


@on_ranks(2)
def test_a_second_report_comes_after_ten_times_as_long() -> None:
    """Rank 1 wraps its module late, which is reported; then it is late in the first pass, which is reported twice."""
    store, wraps = group_store(), "waiting for parameters, module buffers and options, in pass 0"
    second = f"rank 0{WHERE}: waiting for the order of gradients", f"for 2 s: rank 1{WHERE} did not come"
    with reports(lambda text: store.add("reported", 1) if wraps in text else None) as said:
        if dist.get_rank() == 1:
            eventually(lambda: store.add("reported", 0))
        model = BucketDDP(Mlp(), report_after=0.2)
        with patch.object(roll_call, "ANSWER_SECONDS", 20):  # a busy machine may hold an answer up
            loss = model(inputs_of(0)).sum()
            if dist.get_rank() == 1:
                sleep_until(said, *second)
            loss.backward()
            sleep_until(said, *second)
            dist.barrier()
    before = next(text for text in said if wraps in text)
    assert "rank 1: silent" in without_where(before), "it has nothing to answer with yet"
    first_text, second_text = (without_where(text) for text in said if "waiting for the order of gradients" in text)
    assert "0 has waited for 0 s" in first_text
    assert "0 has waited for 2 s" in second_text
    assert all("rank 1: not waiting, in pass 0" in text for text in (first_text, second_text))


@on_ranks(3)
def test_busy_ranks_are_not_reported() -> None:
    """Nobody waits; then each wait is short, though rank 0 is found waiting at almost every look."""
    with reports() as said:
        dist.barrier()  # ranks may come late to the agreement of wrapping
        model = BucketDDP(Mlp(), report_after=2)
        time.sleep(3)
        for _ in range(15):  # together longer than 2 s
            time.sleep(0.1 * dist.get_rank())
            dist.barrier()
    assert said == []
    model.close()


@on_ranks(2)
def test_a_rank_is_reported_as_waiting_while_its_device_does() -> None:
    """The host of an accelerator blocks in code of the user's, where it reads a loss."""
    on_device = f"rank 0{WHERE}: waiting for the gradients of 1 pass.es., on the device, in pass 0"
    with reports(answer_seconds=20) as said:  # a busy machine may hold an answer up
        collectives = Collectives(None)
        peers = Peers(collectives, report_after=0.4)

        def has_said() -> bool:
            return re.search(on_device, "".join(said)) is not None

        exchange: Any = SimpleNamespace(arrived=has_said, landed=has_said)  # as of a control vector
        dist.barrier()
        if dist.get_rank() == 0:
            ControlChannel(Ranks(collectives, peers), torch.device("cuda")).read(exchange, needed=False)
        sleep_until(said, on_device)
        dist.barrier()
        time.sleep(0.8)
    (text,) = (text for text in said if re.search(on_device, text))
    assert "rank 1: not waiting" in without_where(text)


# -- the error at the timeout ------------------------------------------------------------------------------------------


def new_group(at: int | Path, timeout: timedelta | None = None) -> list[int]:
    """Make another process group of two ranks; return their processes.

    Args:
        at: Of its store, the port or the file.
        timeout: The group's. Ranks find the store without it.
    """
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(at), 2) if isinstance(at, Path) else dist.TCPStore("127.0.0.1", at, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    return everyones(os.getpid())


class Barrier(Regression):
    def on_train_epoch_end(self) -> None:
        self.trainer.strategy.barrier()


def stops_for_good(folder: Path, hook: str) -> tuple[bool, str]:
    """Rank 1 stops in a hook. Return whether rank 0's error is a PeerFailureError, and its text with its notes."""
    soon, model = timedelta(seconds=5), Barrier()
    pids = new_group(folder / "store", soon)
    if dist.get_rank() == 1:
        setattr(model, hook, stop_process)
    with reports() as said, pytest.raises(RuntimeError) as caught:
        trainer(ours(report_after=0.3, timeout=soon)).fit(model, data(1))
    os.kill(pids[1], signal.SIGKILL)
    begin = rf"rank 0 has waited for \d+ s: rank 1{WHERE} did not come"
    assert any(re.match(begin, text) for text in said), "the log has it, too"
    error = caught.value
    return isinstance(error, PeerFailureError), "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize(
    ("hook", "waits", "in_a_pass"),
    [
        ("on_train_batch_start", "waiting for the order of gradients, in step 1, pass 0", True),
        ("on_train_epoch_end", "waiting for the Trainer's barrier, in step 1", False),
        pytest.param(
            "configure_model",
            "waiting for parameters, module buffers and options, in pass 0",
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_error_at_the_timeout_holds_the_report_above_the_cause(
    run_ranks: RunRanks, hook: str, waits: str, in_a_pass: bool, tmp_path: Path
) -> None:
    (is_peer_failure, error), _ = run_ranks(2, stops_for_good, tmp_path, hook, fresh=True, may_exit=[1])
    assert is_peer_failure == in_a_pass
    assert re.search(rf"rank 0 has waited for \d+ s: rank 1{WHERE} did not come", error), error
    assert re.search(rf"rank 1{WHERE}: silent for \d+ s; its last", error), error
    assert re.search(f"rank 0{WHERE}: {waits}", error), error
    assert error.count("Where ranks are") == 1
    cause = f"nothing is heard of rank 1{WHERE}: look whether a process was killed or stopped"
    assert re.search(cause, error.splitlines()[-1]), "the cause stands last"


def times_out(folder: Path) -> str:
    """Rank 1 lives, and does not come. Return rank 0's error."""
    new_group(folder / "store", timedelta(seconds=3))
    model, store = BucketDDP(Mlp()), group_store()
    if dist.get_rank() == 1:
        eventually(lambda: store.check(["raised"]))
        return ""
    with pytest.raises(PeerFailureError) as caught:
        model(inputs_of(0)).sum().backward()
    store.set("raised", "")
    return str(caught.value)


def test_the_error_at_the_timeout_names_the_rank_that_did_not_come(run_ranks: RunRanks, tmp_path: Path) -> None:
    error, _ = run_ranks(2, times_out, tmp_path, fresh=True, may_exit=[1])
    assert re.search(rf"failed in pass 0: rank 1{WHERE} did not come \(", error), error


# -- the rank that serves the store ------------------------------------------------------------------------------------


def store_stops(port: int) -> tuple[list[str], str]:
    """Rank 0 stops twice, and with it the store. Rank 1 wakes it up once. Return its reports, and its error."""
    soon = timedelta(seconds=8)
    pids = new_group(port, soon)
    alone: list[str] = []  # reports without answers

    def wake(text: str) -> None:
        if STORE_SILENT in text:
            alone.append(text)
            if len(alone) == 1:
                os.kill(pids[0], signal.SIGCONT)

    def stop_and_step() -> None:
        if dist.get_rank() == 0:
            stop_process()
        else:
            eventually(lambda: state_of(pids[0]) == "T")
        model(inputs_of(1)).sum().backward()

    with patch.object(abort_listener, "STORE_SECONDS", 1), reports(wake):
        model = BucketDDP(Mlp(), report_after=0.5, timeout=soon)
        model(inputs_of(0)).sum().backward()
        stop_and_step()
        with pytest.raises(PeerFailureError) as caught:
            stop_and_step()
        os.kill(pids[0], signal.SIGKILL)
    return alone, str(caught.value)


def test_a_rank_reports_alone_when_the_store_is_silent_and_raises_at_the_timeout(run_ranks: RunRanks) -> None:
    _, ((report, *_), error) = run_ranks(2, store_stops, free_port(), fresh=True, may_exit=[0])
    first, *later = report.splitlines()
    waited = rf"rank 1 has waited for \d s: {STORE_SILENT}"
    assert re.match(waited, first)
    assert without_where(later[0]).startswith("  rank 1: waiting for the gradients of 'head.bias'")
    assert later[-1].endswith("in stop_and_step: model(inputs_of(1)).sum().backward()")
    assert re.search(f"in pass 2: {STORE_SILENT}", error), error
    assert re.search(waited, error), error
    assert re.search(f"rank 1{WHERE}: waiting for the gradients of", error), error


def killed_before_wrapping(port: int) -> None:
    pids = new_group(port)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    eventually(lambda: state_of(pids[0]) == "Z")
    with pytest.raises(PeerFailureError, match="rank 1: the process that serves the st"):
        BucketDDP(Mlp())


def test_the_death_of_the_rank_that_serves_the_store_is_told_at_wrapping(run_ranks: RunRanks) -> None:
    run_ranks(2, killed_before_wrapping, free_port(), fresh=True, may_exit=[0])


def ends_first(port: int) -> str:
    """Rank 0 ends its script a pass before rank 1. Return rank 1's error."""
    new_group(port)
    model = BucketDDP(Mlp())
    model(inputs_of(0)).sum().backward()
    if dist.get_rank() == 0:
        listen(Collectives(None)).close()  # as at the end of a script
        os._exit(0)
    with pytest.raises(PeerFailureError) as caught:
        model(inputs_of(1)).sum().backward()
    return str(caught.value)


def test_the_end_of_the_rank_that_serves_the_store_is_told_in_a_pass(run_ranks: RunRanks) -> None:
    _, error = run_ranks(2, ends_first, free_port(), fresh=True, may_exit=[0])
    ended = f"failed in pass 1: rank 0{WHERE}, which serves the store, has ended training; look for an exception in its"
    assert re.search(ended, error), error


def requests_in_an_agreement(port: int) -> int:
    """Rank 1 comes to an agreement when rank 0 has made some requests meanwhile. Return how many rank 0 made."""
    new_group(port)
    collectives = Collectives(None)
    peers, store, requests = Peers(collectives), listen(collectives).store, 0
    with ThreadPoolExecutor(1) as pool:
        if dist.get_rank() == 1:
            eventually(lambda: store.check(["enough"]))
        agreed = pool.submit(peers.exchange, "weather", "fine")
        while not agreed.done():
            store.check(["key"])
            requests += 1
            if requests == 20:
                store.set("enough", "")
            time.sleep(0.01)
    assert agreed.result() == ["fine", "fine"]
    return requests


def test_an_agreement_does_not_keep_the_store_from_the_thread_that_reports(run_ranks: RunRanks) -> None:
    assert run_ranks(2, requests_in_an_agreement, free_port(), fresh=True)[0] >= 20
