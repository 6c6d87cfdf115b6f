"""Three ranks in plain PyTorch, without a Trainer: one fails or is killed, and the others say so within seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 5.0
QUICK = ["killed:0:pass", "raises:2:broadcast", "ends:0:nowhere"]
SLOW = ["raises:0:pass", "sleeps:0:pass"]


def left_by(scenarios: list[str], folder: Path) -> dict[str, list[tuple[int, str, str]]]:
    """Run scenarios one after the other. Of each, every rank's exit code, output and errors."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.peers_script", str(folder), *scenarios],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr

    def read(scenario: str, what: str, rank: int) -> str:
        return (folder / f"{scenario} {what} of rank {rank}").read_text()

    return {
        it: [(int(read(it, "code", rank)), read(it, "out", rank), read(it, "err", rank)) for rank in range(3)]
        for it in scenarios
    }


def time_of(what: str, output: str) -> float:
    found = re.search(rf"^{what} ([\d.]+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize("scenarios", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_a_rank_that_fails_ends_the_others_with_its_name(scenarios: list[str], tmp_path: Path) -> None:
    for scenario, results in left_by(scenarios, tmp_path).items():
        what, which, _ = scenario.split(":")
        for rank, (code, output, errors) in enumerate(results):
            at = f"{scenario}, rank {rank}: {errors[-3000:]}"
            if what in ("ends", "sleeps"):  # which harms nobody
                assert (code, errors) == (0, ""), at
                continue
            assert code != 0, at
            if str(rank) != which:
                assert time_of("left", output) - time_of("failed", results[int(which)][1]) < SECONDS, at
                assert f"rank {which}" in errors or f"rank(s) {which}" in errors, at
                assert what != "raises" or f"rank {which} raised ArithmeticError: no data today" in errors, at
