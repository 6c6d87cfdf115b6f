"""``python -m lightning_bucketddp check`` on the simulated accelerator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT, RunRanks


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
