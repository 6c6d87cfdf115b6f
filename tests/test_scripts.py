"""Scripts in plain PyTorch, in fresh processes: they print no warnings, and gradients exist once in memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_processes(commands: list[list[str]], **environment: str) -> list[tuple[str, str]]:
    """Runs the commands at once; all must end well. Returns what each wrote to stdout and stderr."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return outputs


def test_a_script_trains_without_warnings(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    outputs = run_processes([["-W", "error", "-m", "tests.plain_script", str(rank), "2", store] for rank in (0, 1)])
    for rank, (printed, errors) in enumerate(outputs):
        assert re.fullmatch(rf"rank {rank} trained [0-9]+ models\n", printed)
        assert errors == ""


def memory(kind: str, tmp_path: Path) -> list[tuple[float, float]]:
    """Per rank, the growth of the process and the storages that can be reached, both in parts of the parameters."""
    store = str(tmp_path / kind)
    # Without this, glibc may keep freed blocks of several MiB, and the growth would not be what is in use.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    commands = [["-m", "tests.memory_script", kind, str(rank), store] for rank in (0, 1)]
    found = [re.search(r"grown ([\d.]+) reachable ([\d.]+)", out) for out, _ in run_processes(commands, **environment)]
    assert all(found)
    return [(float(match[1]), float(match[2])) for match in found if match]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_gradients_exist_once_where_ddp_has_them_twice(tmp_path: Path) -> None:
    for grown, reachable in memory("bucketddp", tmp_path):
        assert 0.95 < grown < 1.1
        assert 0.99 < reachable < 1.01
    for grown, _ in memory("ddp", tmp_path):
        assert 1.9 < grown < 2.2
