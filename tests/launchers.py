"""What test_launchers.py starts besides Python processes: two networks, and a Slurm of one machine."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def run(*command: str, check: bool = True) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not check or result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout


@contextmanager
def two_networks() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces with a cable between them: of each its name, address and interface."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces takes root")
    if shutil.which("ip") is None:
        pytest.skip("making network namespaces takes the command `ip`, of iproute2")
    mark = f"bd{os.getpid() % 10**7}"
    ends = [(f"{mark}n{i}", f"10.213.0.{i + 1}", f"{mark}v{i}") for i in (0, 1)]
    try:
        made = subprocess.run(["ip", "netns", "add", ends[0][0]], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"network namespaces are not to be had here: {made.stderr.strip()}")
        run("ip", "netns", "add", ends[1][0])
        (near, _, cable), (far, _, cable_end) = ends
        run("ip", "link", "add", cable, "netns", near, "type", "veth", "peer", "name", cable_end, "netns", far)
        for name, address, interface in ends:
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            for each in (interface, "lo"):
                run("ip", "-n", name, "link", "set", each, "up")
        yield ends
    finally:
        for name, _, _ in ends:  # with its interfaces
            run("ip", "netns", "del", name, check=False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of this machine alone, from the packages slurm-wlm and munge: the environment for its commands."""
    daemons = ["munged", "slurmctld", "slurmd"]
    missing = [name for name in [*daemons, "sbatch", "srun"] if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons start jobs of other users, which takes root")
    key, config, host = folder / "munge.key", folder / "slurm.conf", socket.gethostname().split(".")[0]
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    munge_socket = folder / "munge.socket"
    config.write_text(
        f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge_socket}
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE OverSubscribe=FORCE State=UP
"""
    )
    munge_files = [f"--{name}={folder}/munged.{name[:4]}" for name in ("pid-file", "log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}", *munge_files],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config)],
    ]
    environment = {**os.environ, "SLURM_CONF": str(config)}
    started = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.log").open("w") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            deadline = time.monotonic() + 5
            while not munge_socket.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        deadline = time.monotonic() + 20
        while (
            "idle"
            not in subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=30, check=False
            ).stdout
        ):
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in started):
                logs = "".join((folder / f"{name}.log").read_text()[-600:] for name in daemons if name)
                pytest.skip(f"Slurm is installed and does not start here: {logs}")
            time.sleep(0.2)
        yield environment
    finally:
        for daemon in reversed(started):
            daemon.terminate()
        for daemon in started:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
