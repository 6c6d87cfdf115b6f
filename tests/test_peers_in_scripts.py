"""Three ranks in plain PyTorch, without a Trainer: one fails or is killed, and the others say so within seconds."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.peers_script import WORLD_SIZE

ROOT = Path(__file__).parent.parent
SECONDS = 5.0
QUICK = ["killed:0:pass", "raises:2:broadcast", "ends:0:nowhere"]
"""What is tried each time; the rest is marked slow."""
FAILURES = ["killed:1:pass", "killed:0:pass", "raises:0:pass", "raises:2:broadcast"]
HARMLESS = {
    "ends:0:nowhere": "has done its work",
    "ends:1:nowhere": "has done its work",
    "catches:0:pass": "has run 6 passes",
}


def marked(scenarios: Iterable[str]) -> list[Any]:
    return [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in scenarios]


def left_by(scenarios: Iterable[str], folder: Path) -> Path:
    """Run scenarios side by side; each rank leaves its exit code, its output and its errors in the folder."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.peers_script", str(folder), *scenarios],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_by(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_by({*FAILURES, *HARMLESS} - {*QUICK}, tmp_path_factory.mktemp("rest"))


@pytest.fixture
def folder(request: pytest.FixtureRequest, scenario: str) -> Path:
    return request.getfixturevalue("quick" if scenario in QUICK else "rest")


def said(folder: Path, scenario: str) -> list[tuple[int, str, str]]:
    """Of each rank its exit code, its output and its errors."""
    files = [[folder / f"{scenario} {what} of rank {rank}" for what in ("code", "out", "err")] for rank in range(3)]
    return [(int(code.read_text()), out.read_text(), err.read_text()) for code, out, err in files]


def time_of(what: str, output: str) -> float:
    found = re.search(rf"^{what} ([\d.]+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize("scenario", marked(FAILURES))
def test_the_end_of_one_rank_is_an_error_with_its_name_on_the_others(folder: Path, scenario: str) -> None:
    what, which, _ = scenario.split(":")
    results = said(folder, scenario)
    assert len(results) == WORLD_SIZE
    failed_at = time_of("failed", results[int(which)][1])
    for rank, (code, output, errors) in enumerate(results):
        assert code != 0
        if str(rank) != which:
            assert time_of("left", output) - failed_at < SECONDS, errors[-3000:]
            assert f"rank {which}" in errors or f"rank(s) {which}" in errors, errors[-3000:]
            assert what != "raises" or f"rank {which} raised ArithmeticError: no data today" in errors, errors[-3000:]


@pytest.mark.parametrize("scenario", marked(HARMLESS))
def test_a_rank_that_ends_or_catches_its_error_harms_nobody(folder: Path, scenario: str) -> None:
    what, which, _ = scenario.split(":")
    for rank, (code, output, errors) in enumerate(said(folder, scenario)):
        assert code == 0, errors[-3000:]
        assert errors == ""
        assert HARMLESS[scenario] in output or (str(rank) == which and what == "ends")
