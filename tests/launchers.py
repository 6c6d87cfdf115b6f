"""Ways to start programs: scripts in the pool's ranks, elastic agents, and two networks on this machine."""

import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import pytest

from tests.pool import ROOT


def free_port() -> int:
    """Below the ports that the system gives to connections, which other tests make meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_script(path: str, *arguments: str) -> str:
    """Run a script of the project in this process, which has imported what takes long; what it prints."""
    argv, sys.argv = sys.argv, [path, *arguments]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(ROOT / path), run_name="__main__")
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    return printed.getvalue()


def run_notebook(path: str) -> list[str]:
    """Run a notebook's code cells one after the other; what each prints."""
    printed, names = [], {"__name__": "__main__"}
    for cell in code_cells(path):
        with redirect_stdout(io.StringIO()) as output:
            exec(compile("".join(cell["source"]), path, "exec"), names)
        printed.append(output.getvalue())
    return printed


def code_cells(path: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads((ROOT / path).read_text())["cells"] if cell["cell_type"] == "code"]


def run_as_torchrun(port: int, path: str, *arguments: str) -> str:
    """Run a script in a rank of the pool, which then looks as if torchrun had started it."""
    import torch.distributed as dist

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.barrier()  # the other rank may still connect to this one
    dist.destroy_process_group()
    os.environ.update(TORCHELASTIC_RUN_ID="none", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK="0")
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    return run_script(path, *arguments)


def run_elastic(restarts: int, function: Callable[..., Any], *arguments: Any) -> bool:
    """Run a function on two ranks that torchrun's agent forks from this process; whether all ended well at last."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if dist.is_initialized():
        dist.destroy_process_group()
    # A torchrun that restarts must not share the store of its own rendezvous with the ranks: they would find the
    # addresses of the killed ones there.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ranks: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "max_restarts": restarts}
    meets = {"run_id": str(os.getpid()), "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    agent = LaunchConfig(**ranks, **meets, monitor_interval=0.1, start_method="fork")
    try:
        elastic_launch(agent, function)(*arguments)
    except ChildFailedError:
        return False
    return True


def assert_trained(output: str, errors: str = "", lr: float = 0.1, fits: int = 1) -> None:
    """Both ranks have trained ``tests/trainer/cli_models.py`` to the same weights, so many times."""
    found = re.findall(rf"^rank (\d): 4 passes, lr {lr}, weight (\S+)$", output, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == ["0"] * fits + ["1"] * fits, output + errors[-3000:]
    assert len({weight for _, weight in found}) == fits


def run(*command: str, check: bool = True) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
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
