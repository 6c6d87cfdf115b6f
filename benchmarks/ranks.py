"""Start ranks on this machine as fresh processes, and collect their results."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")


def prepare(**environment: str) -> None:
    """Set the environment of all ranks. Call this once, before ranks are started.

    Ranks are forked from a process that has done nothing but import: they are fresh, but quick to start.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment})
    _context.set_forkserver_preload(["wrapped", "models"])


def device_of(device_type: str, rank: int) -> torch.device:
    """The device of a rank; ranks share accelerators if there are fewer accelerators than ranks."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, rank % torch.accelerator.device_count())


def require_device(device_type: str) -> None:
    """End the program with a reason if there is no such device."""
    if device_type == "cpu":
        return
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device_type:
        raise SystemExit(f"--device {device_type} needs one; found {found.type if found else 'no accelerator'}")


def _backend(device: torch.device, size: int) -> str:
    if device.type == "cpu" or torch.accelerator.device_count() < size:
        return "gloo"
    return dist.get_default_backend_for_device(device)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(
    worker: Callable[..., Any], rank: int, size: int, device_type: str, port: int, folder: str, arguments: Any
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    device = device_of(device_type, rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        _backend(device, size),
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=5),
    )
    result = worker(device, *arguments)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's teardown, which takes a second


def run_ranks(worker: Callable[..., Any], *arguments: Any, size: int = 2, device_type: str = "cpu") -> list[Any]:
    """Run ``worker(device, *arguments)`` on ranks in a process group of their own; return each rank's result.

    Args:
        worker: A function of a module; its result is turned into JSON.
        arguments: Passed to it.
        size: Number of ranks.
        device_type: ``"cpu"``, or the accelerator's.

    Raises:
        SystemExit: If a rank failed, whose traceback is on stderr; the others are ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _context.Process(target=_run, args=(worker, rank, size, device_type, store.port, folder, arguments))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            running = list(processes)
            while running:
                wait([process.sentinel for process in running])
                for process in [process for process in running if process.exitcode is not None]:
                    running.remove(process)
                    if process.exitcode != 0:
                        raise SystemExit(f"a rank failed, with exit code {process.exitcode}; see above")
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
