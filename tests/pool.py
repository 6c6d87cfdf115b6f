"""Runs functions on several gloo ranks from plain pytest.

Worker processes are started once per world size and kept: importing torch and lightning takes seconds. Each job
gets a process group of its own (file store), so that jobs do not see each other.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COLLECTIVE_TIMEOUT = timedelta(seconds=40)


class RankError(AssertionError):
    """A job failed on some rank; the message holds the tracebacks."""


class WorkerPool:
    """``world_size`` processes that run jobs together."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def _start(self) -> None:
        folder = tempfile.mkdtemp()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        with Listener(str(Path(folder) / "pool"), "AF_UNIX", backlog=self.world_size, authkey=b"pool") as listener:
            for rank in range(self.world_size):
                command = [sys.executable, "-m", "tests.pool", str(rank), str(self.world_size), listener.address]
                self._processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
            connections = [listener.accept() for _ in range(self.world_size)]
        self._connections = [c for _, c in sorted((c.recv(), c) for c in connections)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(timeout=20)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def run(
        self,
        job: Callable[..., Any],
        *args: Any,
        timeout: float = 90,
        fresh: bool = False,
        may_exit: Collection[int] = (),
    ) -> list[Any]:
        """Runs ``job(*args)`` on every rank and returns what it returned, by rank.

        Args:
            job: A function at the top level of a module below the project's root.
            args: Its arguments; picklable.
            timeout: Seconds after which the ranks are killed and the test fails.
            fresh: The job leaves its process group in a state that cannot be cleaned up: end the processes after it.
            may_exit: Ranks whose process may end without an answer; they answer None.
        """
        if not self._processes:
            self._start()
        folder = tempfile.mkdtemp()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((job.__module__, job.__qualname__, args, folder, fresh)))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < self.world_size:
            for rank, connection in enumerate(self._connections):
                if rank in results or rank in errors:
                    continue
                try:
                    if connection.poll(0.01):
                        ok, value = pickle.loads(connection.recv_bytes())
                        (results if ok else errors)[rank] = value
                except (EOFError, OSError):
                    if rank in may_exit:
                        results[rank] = None
                        continue
                    errors[rank] = f"the process ended with exit code {self._processes[rank].wait(timeout=20)}"
                if rank in errors:  # the others may hang for it; they get a little time to say so
                    deadline = min(deadline, time.monotonic() + 15)
            if time.monotonic() > deadline:
                for rank in set(range(self.world_size)) - set(results) - set(errors):
                    errors[rank] = "no answer in time"
        if errors or fresh:
            self.stop()
        if errors:
            raise RankError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(self.world_size)]


def _serve(rank: int, world_size: int, address: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = Client(address, "AF_UNIX", authkey=b"pool")
    connection.send(rank)
    while True:
        try:
            module, name, args, folder, fresh = pickle.loads(connection.recv_bytes())
        except EOFError:  # the parent has gone
            os._exit(0)
        try:
            job: Any = importlib.import_module(module)
            for part in name.split("."):
                job = getattr(job, part)
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            answer = (True, job(*args))
            if not fresh:
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
