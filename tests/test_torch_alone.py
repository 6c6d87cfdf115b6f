"""The package works where torch is installed, and neither NumPy nor Lightning."""

import os
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.pool import ROOT


def torch_alone(folder: Path) -> Path:
    """The interpreter of an environment with links to torch and to what it requires."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    names, linked = ["torch"], set[str]()
    while names:
        found = distribution(names.pop())
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"} - linked:
            (site / top).symlink_to(found.locate_file(top))
            linked.add(top)
            names += requirements(found.requires or []) if top.endswith(".dist-info") else []
    return folder / "bin" / "python"


def requirements(lines: list[str]) -> list[str]:
    each = map(Requirement, lines)
    return [one.name for one in each if one.marker is None or one.marker.evaluate({"extra": ""})]


@pytest.mark.slow
def test_two_ranks_train_and_compare_well_with_torch_alone(tmp_path: Path) -> None:
    command = [torch_alone(tmp_path / "environment"), ROOT / "tests" / "torch_alone_script.py", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "All is right." in ran.stdout
    refused = [line for line in ran.stdout.splitlines() if line.endswith("Install it: pip install numpy")]
    assert [line[:15] for line in sorted(refused)] == [
        f"rank {rank}: {what}" for rank in (0, 1) for what in ("loading", "saving ")
    ]
