"""Two hosts on one machine: network namespaces joined by a virtual cable of limited rate. Needs root and Linux."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2)"
    try:  # a container may forbid it even to root, and a kernel may lack the queue that limits the rate
        with two_hosts(own_prefix("try")) as names:
            limit(names, 1.0)
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces with a limited rate: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def own_prefix(purpose: str = "b") -> str:
    """A prefix for :func:`two_hosts` that no other process uses; with the digit behind it at most 15 characters."""
    return f"{purpose}{os.getpid()}n"


@contextmanager
def two_hosts(prefix: str = "bench") -> Iterator[tuple[str, str]]:
    """Make two namespaces with one interface each, and remove them in the end.

    Addresses and ports inside them are their own: they collide with nothing outside, nor with another pair.

    Args:
        prefix: Prefix of the namespaces' and interfaces' names; see :func:`own_prefix`.
    """
    names = (f"{prefix}0", f"{prefix}1")
    _remove(names)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "link", "set", name, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            _run("ip", "-n", name, "link", "set", name, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        _remove(names)


def limit(names: tuple[str, str], gbit: float) -> None:
    """Limit both directions to a rate in Gbit/s."""
    for name in names:
        rate = f"{int(gbit * 1000)}mbit"
        command = ["tc", "-n", name, "qdisc", "replace", "dev", name, "root", "tbf"]
        _run(*command, "rate", rate, "burst", "512kb", "latency", "100ms")


def _remove(names: tuple[str, str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
