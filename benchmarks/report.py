"""Report a benchmark's figures: hardware and versions, a table, a dated file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    """Hardware, versions and the commit."""
    found = {name: _version(name) for name in ("torch", "lightning", "lightning-bucketddp")}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "accelerator": str(torch.cuda.get_device_name() if device is not None and device.type == "cuda" else device),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **found,
        "commit": commit(),
    }


def commit() -> str:
    """The repository's commit, with ``-dirty`` behind it if files have changed since."""
    # safe.directory: link.py runs as root, in a folder of the user's.
    describe = ("git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--exclude=*")
    try:
        found = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"
    return found.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def paired_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """The median, over rounds, of a peer's time divided by the reference's in the same round."""
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows, the first of them the head: the first column aligned to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def plots() -> Any:
    """``matplotlib.pyplot``, set up to draw into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def save(name: str, figures: Mapping[str, Any], text: str, plot: Any = None) -> str:
    """Write figures, hardware, versions and the commit to ``results/<date>-<name>.json``, table and plot beside it.

    Args:
        name: The benchmark's name.
        figures: What was measured.
        text: The table.
        plot: A matplotlib figure, if there is one.

    Returns:
        Their path, without what follows the name.
    """
    RESULTS.mkdir(exist_ok=True)
    stem = f"{RESULTS}/{date.today().isoformat()}-{name}"
    Path(f"{stem}.json").write_text(json.dumps({"environment": environment(), **figures}, indent=1) + "\n")
    Path(f"{stem}.txt").write_text(f"{text}\ncommit {commit()}\n")
    if plot is not None:
        plot.savefig(f"{stem}.png", bbox_inches="tight")
    return stem
