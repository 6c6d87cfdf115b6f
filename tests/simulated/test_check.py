"""``python -m lightning_bucketddp check`` on the simulated accelerator."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_bucketddp import BucketDDP, check
from lightning_bucketddp.comm.collectives import Collectives
from tests.accelerator import DEVICE, sleep
from tests.pool import ROOT, RunRanks, on_ranks
from tests.test_check import SOME, matrix_is_right


@on_ranks(2)
def test_waits_for_events_streams_and_devices_are_counted() -> None:
    with check.counted_waits(DEVICE) as waits:
        sleep()
        event = torch.Event(DEVICE)
        event.record()
        event.synchronize()
        assert waits == ["event"]
        event.synchronize()
        assert waits == ["event"], "it has come"
        torch.accelerator.synchronize()
        assert waits == ["event", "torch.accelerator.synchronize"]


class Waiting(BucketDDP):
    def forward(self, *args: Any) -> Any:
        sleep()
        event = torch.Event(DEVICE)
        event.record()
        event.synchronize()
        return super().forward(*args)


@on_ranks(2)
def test_a_wait_for_an_event_is_found() -> None:
    for wrap, expected in ((BucketDDP, 0), (Waiting, 1)):
        with patch.object(check, "BucketDDP", wrap):
            result = check.run_case(check.CASES[0], check.QUICK, DEVICE, Collectives(None))
        assert result.host_waits == (0, expected)
        assert len(result.wrong) == expected


@on_ranks(2, timeout=280)
def test_cases_of_the_matrix_are_right(tmp_path: Path) -> None:
    matrix_is_right(tmp_path / "check.json", {name for name in SOME if "4 passes" not in name}, DEVICE)


@pytest.mark.slow
def test_the_check_and_the_devices_own_checker_find_nothing_wrong(ranks_on_simulated: RunRanks, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.simulated", "-m", "lightning_bucketddp", "check", "--quick", "--output"]
    file = tmp_path / "check.json"
    ran = subprocess.run([*command, file], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(file.read_text())
    assert report["wrong"] == []
    assert report["environment"]["backend"] == "simccl"
    assert (ran.stdout + ran.stderr).count("0 pair(s) of accesses that nothing orders") == 3, (
        "two ranks, and who started"
    )
