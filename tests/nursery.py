"""A process that imports torch and Lightning once, which takes seconds, and forks the ranks of all tests from then on.

There is one for all workers of pytest-xdist. It imports when it is first asked: to start it costs next to nothing.
"""

import functools
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENDING_SIGNALS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT}
IMPORTED = (
    "tests.lightning_models",
    "tests.reference",
    "tests.traces.recorder",
    "tests.pool",
)
"""With all that they import, which each rank would else import by itself."""
COMPILER = "torch._inductor.compile_fx"
"""The same for ranks on the CPU: none on another device compiles with it."""


class Nursery:
    """A nursery as seen from a process that needs ranks.

    Args:
        address: Of the nursery's socket.
    """

    def __init__(self, address: Path) -> None:
        self._address = str(address)

    def ask(self, *words: object) -> int:
        """For ``fork`` the number of a new process, which prints where this one does; else its exit code."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            socket.send_fds(connection, [" ".join(map(str, words)).encode()], [2])
            answer = connection.recv(1024)
        assert answer, "the process that forks ranks has ended; its errors are above"
        return int(answer)


@contextmanager
def nurseries(**kinds: Mapping[str, str]) -> Iterator[Path]:
    """Run a nursery for each kind of ranks. Yields the folder of their sockets, which have the kinds' names.

    Args:
        kinds: Of each, variables of its environment besides this process's.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = [_start(Path(folder, kind), variables) for kind, variables in kinds.items()]
        try:
            yield Path(folder)
        finally:
            for process in running:  # it ends when its input does
                process.communicate(timeout=20)


def _start(address: Path, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **variables}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(64)
        command, handle = [sys.executable, "-m", "tests.nursery", str(server.fileno())], (server.fileno(),)
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, pass_fds=handle)


def _serve(server: socket.socket) -> None:
    exit_codes: dict[int, int] = {}
    while server in select.select([server, sys.stdin], [], [])[0]:
        connection = server.accept()[0]
        with connection:
            line, (output,), *_ = socket.recv_fds(connection, 1024, 1)
            what, *words = line.decode().split()
            if what == "fork":
                _import_once()
                answer = os.fork()
                if answer == 0:
                    _become_rank(server, connection, output, *words)
                exit_codes.pop(answer, None)  # of one that had the same number
            else:
                pid = int(words[0])
                if pid not in exit_codes:
                    if what in ENDING_SIGNALS:
                        os.kill(pid, ENDING_SIGNALS[what])
                        os.kill(pid, signal.SIGCONT)  # a test may have stopped it
                    exit_codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                answer = exit_codes[pid]
            os.close(output)
            connection.send(str(answer).encode())


def _import_once() -> None:
    if "torch" not in sys.modules:
        gc.disable()  # next to nothing of what is imported is garbage
        for name in (*IMPORTED, *([] if "SIM_DEVICES" in os.environ else [COMPILER])):
            importlib.import_module(name)
        importlib.import_module("torch._dynamo").list_backends()  # imports them
        registry = importlib.import_module("lightning.fabric.utilities.registry")
        registry.entry_points = functools.cache(registry.entry_points)  # else each Trainer reads those of all packages
        gc.freeze()  # garbage collections in ranks pass these modules over, and copy none of their memory
        gc.enable()


def _become_rank(
    server: socket.socket, connection: socket.socket, output: int, rank: str, world_size: str, address: str
) -> None:
    from tests import pool

    server.close()
    connection.close()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    pool.serve(int(rank), int(world_size), address)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
