"""Other projects' models: with the strategy's name changed they train as with ``ddp``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT


def checksums(project: str, strategy: str, folder: Path) -> list[str]:
    """What the ranks print, in their order."""
    command = [sys.executable, "-m", "tests.project_script", project, strategy]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return sorted(line for line in ran.stdout.splitlines() if line.startswith("rank "))


@pytest.mark.slow
@pytest.mark.parametrize("project", ["pytorch_forecasting", "gluonts"])
def test_weights_are_those_of_ddp(project: str, tmp_path: Path) -> None:
    pytest.importorskip(project, reason=f"{project} is not installed; the extra `projects` brings it")
    ours, theirs = (checksums(project, strategy, tmp_path) for strategy in ("bucketddp", "ddp"))
    assert ours == theirs
    assert [line.split(":")[0] for line in ours] == ["rank 0", "rank 1"]
    assert ours[0].split(":")[1] == ours[1].split(":")[1], "the ranks hold one model"
    assert " 6 steps, " in ours[0]
