"""A rank does not come: the others say so, and where it is. Training goes on when it comes back."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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

SECONDS = 35.0
"""How long a stuck rank waits for reports at most: collectives have 40 s."""


@contextmanager
def reports(heard: Callable[[str], object] = lambda text: None) -> Iterator[list[str]]:
    with patch.object(roll_call, "ANSWER_SECONDS", 1), logged("lightning_bucketddp.peers", heard) as said:
        yield said


def give_time_to_answer() -> None:
    """From here to the end of :func:`reports`: no rank may be called silent that a busy machine has held up."""
    roll_call.ANSWER_SECONDS = 20


def tells(text: str, patterns: Iterable[str]) -> bool:
    return all(re.search(pattern, text) for pattern in patterns)


def sleep_until(said: list[str], *patterns: str) -> None:
    """Sleeps until a report has all these patterns. A busy machine may be late otherwise, and others be reported."""
    deadline = time.monotonic() + SECONDS
    while not any(tells(text, patterns) for text in said) and time.monotonic() < deadline:
        time.sleep(0.02)


def stop_process(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


WAITS = f"ranks 0, 2{WHERE}: waiting "
IN_PASS = WAITS + r"for the gradients of 'net\.\S+ to 'net\S+ \(bucket 0, \d parameter\(s\)\), in step "
FIRST = rf"^rank [02] has waited for \d+ s: rank 1{WHERE} did not come. Where ranks are"
EXPECTED = [
    (FIRST, rf"rank 1{WHERE}: not waiting, in step 2, pass 1", r"in sleep_until: time.sleep\(0.02\)\n", IN_PASS + "2"),
    (
        FIRST,
        rf"rank 1{WHERE}: silent for \d+ s; its last record, which may be old, says in step \d",
        IN_PASS + "5, pass 4",
    ),
    (
        FIRST,
        rf"rank 1{WHERE}: not waiting, in step 6",
        r"in validation_step: sleep_until",
        WAITS + r"for the keys of self.log\(sync_dist=True\)",
    ),
]
"""What reports say of each of the three places."""


class Stuck(Regression):
    """Rank 1 comes late to three places."""

    def __init__(self, said: list[str], late: bool) -> None:
        super().__init__()
        self.said, self.late = said, late

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.late and batch_idx == 1:
            sleep_until(self.said, *EXPECTED[0])
        if self.late and batch_idx == 4:
            stop_process()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.late:
            sleep_until(self.said, *EXPECTED[2])
        self.log("valid", self.net(batch[0]).mean(), sync_dist=True)


@on_ranks(3)
def test_all_ranks_log_where_a_rank_is_that_does_not_come() -> None:
    pids = everyones(os.getpid())
    undisturbed = Regression()
    trainer(ours()).fit(undisturbed, data())

    def heard(text: str) -> None:
        if dist.get_rank() == 0 and tells(text, EXPECTED[1]):
            os.kill(pids[1], signal.SIGCONT)

    with reports(heard) as said:
        stuck = Stuck(said, late=dist.get_rank() == 1)
        fits = trainer(ours(report_after=1), num_sanity_val_steps=0)
        dist.barrier()  # a rank that comes late to the first agreement would be reported
        fits.fit(stuck, data(), data(1))
        sleep_until(said, *EXPECTED[2])  # each rank hears when its listener looks
        dist.barrier()
    close_to(stuck, undisturbed)
    found = [[at for at, text in enumerate(said) if tells(text, patterns)] for patterns in EXPECTED]
    assert all(found), [text[:300] for text in said]
    assert sorted(positions[0] for positions in found) == [positions[0] for positions in found], "in this order"


@on_ranks(2)
def test_a_second_report_comes_after_ten_times_as_long() -> None:
    store, wraps = group_store(), "waiting for parameters, module buffers and options, in pass 0"
    second = f"rank 0{WHERE}: waiting for the order of gradients", f"for 3 s: rank 1{WHERE} did not come"
    with reports(lambda text: store.add("reported", 1) if wraps in text else None) as said:
        if dist.get_rank() == 1:
            eventually(lambda: store.add("reported", 0))
        model = BucketDDP(Mlp(), report_after=0.3)
        give_time_to_answer()
        loss = model(inputs_of(0)).sum()
        if dist.get_rank() == 1:
            sleep_until(said, *second)
        loss.backward()
        sleep_until(said, *second)
        dist.barrier()
    before = next(text for text in said if wraps in text)
    assert "rank 1: silent" in without_where(before), "it has nothing to answer with yet"
    in_pass = [text for text in said if "waiting for the order of gradients" in text]
    assert all("rank 1: not waiting, in pass 0" in without_where(text) for text in in_pass)
    assert len(in_pass) == 2
    assert "0 has waited for 0 s" in in_pass[0]


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


def again(at: int | Path, timeout: timedelta | None = None) -> list[int]:
    """Makes another process group; the processes of its ranks.

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


def stopped_for_good(folder: Path, place: str) -> str:
    """Rank 1 stops at some place. Return rank 0's error, with its notes."""
    soon = timedelta(seconds=5)
    pids = again(folder / "store", soon)
    model, stop = Regression(), stop_process if dist.get_rank() == 1 else lambda *_: None
    if place == "pass":
        model.on_train_batch_start = stop  # type: ignore[method-assign,assignment]
    elif place == "agreement":
        model.configure_model = stop  # type: ignore[method-assign,assignment]
    model.on_train_epoch_end = lambda: (stop(), model.trainer.strategy.barrier())  # type: ignore
    with reports() as said, pytest.raises(RuntimeError) as caught:
        trainer(ours(report_after=0.3, timeout=soon)).fit(model, data())
    os.kill(pids[1], signal.SIGKILL)
    assert isinstance(caught.value, PeerFailureError) == (place == "pass")
    assert re.match(rf"rank 0 has waited for \d+ s: rank 1{WHERE} did not come", said[0])
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("place", "waits"),
    [
        ("pass", "waiting for the order of gradients, in step 1, pass 0"),
        ("barrier", "waiting for the Trainer's barrier, in step 6"),
        ("agreement", "waiting for parameters, module buffers and options, in pass 0"),
    ],
)
def test_the_error_at_the_timeout_holds_the_report(run_ranks: RunRanks, place: str, waits: str, tmp_path: Path) -> None:
    error, _ = run_ranks(2, stopped_for_good, tmp_path, place, fresh=True, may_exit=[1])
    for words in (
        rf"0 has waited for \d+ s: rank 1{WHERE} did not come",
        rf"1{WHERE}: silent for \d+ s; its last",
        f"0{WHERE}: {waits}",
    ):
        assert re.search(f"rank {words}", error), error
    assert error.count("Where ranks are") == 1
    cause = f"nothing is heard of rank 1{WHERE}: look whether a process was killed or stopped"
    assert re.search(cause, error.splitlines()[-1]), "the cause stands last"


def times_out(folder: Path) -> str:
    """Rank 1 lives, and does not come. Return rank 0's error."""
    again(folder / "store", timedelta(seconds=3))
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


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def store_stops(port: int) -> tuple[list[str], str]:
    """Rank 0 stops twice, and with it the store. Rank 1 wakes it up once. Return its reports, and its error."""
    soon = timedelta(seconds=8)
    pids = again(port, soon)
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
            eventually(lambda: is_stopped(pids[0]))
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
    waited = rf"1 has waited for \d s: {STORE_SILENT}"
    assert re.match(f"rank {waited}", first)
    assert without_where(later[0]).startswith("  rank 1: waiting for the gradients of 'head.bias'")
    assert later[-1].endswith("in stop_and_step: model(inputs_of(1)).sum().backward()")
    for words in (f"1{WHERE}: waiting for the gradients of", f"in pass 2: {STORE_SILENT}", waited):
        assert re.search(words, error), error


def store_ends(port: int, wrapped: bool) -> str:
    """Rank 0 ends before rank 1, and with it the store. Return rank 1's error."""
    pids = again(port)
    if not wrapped:
        os.kill(pids[0], signal.SIGKILL)  # both ranks do; rank 0 does not come back
        time.sleep(1)
    with nullcontext() if wrapped else pytest.raises(PeerFailureError, match="rank 1: the process that serves the st"):
        model = BucketDDP(Mlp())
    if not wrapped:
        return ""
    model(inputs_of(0)).sum().backward()
    if dist.get_rank() == 0:
        listen(Collectives(None)).close()  # as at the end of a script
        os._exit(0)
    with pytest.raises(PeerFailureError) as caught:
        model(inputs_of(1)).sum().backward()
    return str(caught.value)


def test_the_end_of_the_rank_that_serves_the_store_is_told(run_ranks: RunRanks) -> None:
    _, error = run_ranks(2, store_ends, free_port(), False, fresh=True, may_exit=[0])
    _, error = run_ranks(2, store_ends, free_port(), True, fresh=True, may_exit=[0])
    ended = f"failed in pass 1: rank 0{WHERE}, which serves the store, has ended training; look for an exception in its"
    assert re.search(ended, error)


def requests_in_an_agreement(port: int) -> int:
    """Rank 1 comes to an agreement when rank 0 has made some requests meanwhile. Return how many rank 0 made."""
    again(port)
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


@on_ranks(2)
def test_a_rank_waits_while_its_device_does() -> None:
    """The host of an accelerator blocks in code of the user's, where it reads a loss."""
    on_device = f"rank 0{WHERE}: waiting for the gradients of 1 pass.es., on the device, in pass 0"
    with reports() as said:
        give_time_to_answer()
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
