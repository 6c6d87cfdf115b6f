"""Runs functions on several gloo ranks from plain pytest.

Worker processes are kept, for each world size. They are forked from a process that has imported what takes long
(``tests/nursery.py``). Each job gets a process group of its own (file store), and its wrappers are closed at its end.
"""

import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import ROOT as ROOT
from tests.nursery import Nursery, nurseries
from tests.sampling import some_slow

RunRanks = Callable[..., list[Any]]
TIMEOUT = timedelta(seconds=40)  # of collectives
DEVICE_BACKEND = "TESTS_WITH_DEVICE_BACKEND"
"""A variable that is set where process groups send the accelerator's tensors by its own backend."""


class RankError(AssertionError):
    """A job failed on some rank; the message holds the tracebacks."""


class WorkerPool:
    """``world_size`` processes that run jobs together."""

    def __init__(self, world_size: int, nursery: Nursery) -> None:
        self.world_size, self._nursery = world_size, nursery
        self._pids: list[int] = []
        self._connections: list[Connection] = []
        self._folder = ""

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp()
        path = str(Path(self._folder) / "pool")
        with Listener(path, "AF_UNIX", backlog=self.world_size, authkey=b"pool") as listener:
            ranks, address = range(self.world_size), listener.address
            self._pids = [self._nursery.ask("fork", rank, self.world_size, address) for rank in ranks]
            connections = [listener.accept() for _ in ranks]
        self._connections = [c for _, c in sorted((c.recv(), c) for c in connections)]

    def stop(self) -> None:
        for pid in self._pids:
            self._nursery.ask("kill", pid)
        for connection in self._connections:
            connection.close()
        self._pids, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stacks(self, rank: int, folder: str) -> str:
        """Ends a rank that does not answer, and tells where its threads were."""
        self._nursery.ask("abort", self._pids[rank])
        return Path(folder, f"stacks.{rank}").read_text().partition("Extension modules")[0]

    def run(
        self,
        job: Callable[..., Any],
        *args: Any,
        timeout: float = 180,
        fresh: bool = False,
        may_exit: Collection[int] = (),
        bare: bool = False,
    ) -> list[Any]:
        """Runs ``job(*args)`` on every rank and returns what it returned, by rank.

        Args:
            job: A function at the top level of a module below the project's root.
            args: Its arguments; picklable.
            timeout: Seconds after which the ranks are killed and the test fails.
            fresh: The job leaves its process group in a state that cannot be cleaned up: end the processes after it.
            may_exit: Ranks whose process may end without an answer; they answer None.
            bare: The job finds no process group and a fresh process, and may fork.
        """
        if bare:
            self.stop()
        if not self._pids:
            self._start()
        folder = tempfile.mkdtemp(dir=self._folder)
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((job.__module__, job.__qualname__, args, folder, fresh or bare, bare)))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting := set(range(self.world_size)) - results.keys() - errors.keys():
            ready = wait([self._connections[rank] for rank in waiting], timeout=0.5)
            for rank in waiting:
                try:
                    if self._connections[rank] in ready:
                        ok, value = pickle.loads(self._connections[rank].recv_bytes())
                        (results if ok else errors)[rank] = value
                except (EOFError, OSError):
                    if rank in may_exit:
                        results[rank] = None
                    else:
                        errors[rank] = f"the process ended with exit code {self._nursery.ask('wait', self._pids[rank])}"
                if rank in errors:  # the others may hang for it; they get a little time to say so
                    deadline = min(deadline, time.monotonic() + 15)
            if time.monotonic() > deadline:
                for rank in waiting - results.keys() - errors.keys():
                    errors[rank] = "no answer in time\n" + self._stacks(rank, folder)
        if errors or fresh or bare:
            self.stop()
        if errors:
            raise RankError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(self.world_size)]


@contextmanager
def worker_pool(world_size: int) -> Iterator[WorkerPool]:
    """For programs, which have no pytest that keeps pools."""
    with nurseries(cpu={}) as folder:
        pool = WorkerPool(world_size, Nursery(folder / "cpu"))
        try:
            yield pool
        finally:
            pool.stop()


def close_wrappers() -> None:
    from lightning_bucketddp.wrapper import bucket_ddp

    for wrapper in list(bucket_ddp._open_wrappers):
        wrapper.close()


def _backend(rank: int, world_size: int) -> str:
    """The backend of a job's default group. Ranks have a device each if there are enough; they share simulated ones."""
    import torch
    import torch.distributed as dist

    device = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    if device is None or DEVICE_BACKEND not in os.environ or (count < world_size and device.type != "sim"):
        return "gloo"
    torch.accelerator.set_device_index(rank % count)
    return f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}"


def serve(rank: int, world_size: int, address: str) -> None:
    """Do jobs, in a process of a rank, until the pool has gone."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = Client(address, "AF_UNIX", authkey=b"pool")
    connection.send(rank)
    backend, simulated = _backend(rank, world_size), sys.modules.get("tests.simulated.device")
    while True:
        try:
            module, name, args, folder, fresh, bare = pickle.loads(connection.recv_bytes())
        except EOFError:  # the parent has gone
            os._exit(0)
        stacks = open(f"{folder}/stacks.{rank}", "w")  # noqa: SIM115 (the next job's file replaces it)
        faulthandler.enable(stacks)
        tempfile.tempdir = folder  # what the job leaves there goes with the pool
        try:
            job: Any = importlib.import_module(module)
            for part in name.split("."):
                job = getattr(job, part)
            torch.manual_seed(0)
            if simulated:
                simulated.clear()
            if not bare:
                store = f"file://{folder}/store"
                dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
            answer = (True, job(*args))
            if simulated:
                simulated.check_this_rank() if fresh else simulated.check_ranks()
            if not fresh:
                close_wrappers()
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        job = None
        for _ in range(2):  # groups in cycles, each of which has threads; wrappers, whose finalizers let more go
            gc.collect()
        gc.freeze()  # what the job has imported, too, is passed over from now on
        connection.send_bytes(pickle.dumps(answer))


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Names the case of a job that fails."""
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"in the case {values}") from error


def named_cases(cases: Mapping[str, Any] | Iterable[Any]) -> dict[str, list[Any]]:
    """The arguments of each case, by its name. A case without one is named after its arguments, or its place."""
    if isinstance(cases, Mapping):
        return {name: given if isinstance(given, list | tuple) else [given] for name, given in cases.items()}
    named: dict[str, list[Any]] = {}
    for at, case_ in enumerate(cases):
        given = case_ if isinstance(case_, list | tuple) else [case_]
        name = ", ".join(filter(None, map(words_for, given)))
        named[f"{name}, {at}".lstrip(", ") if not name or name in named else name] = given
    return named


def words_for(value: Any) -> str:
    """A value in words fit for a test's name; empty if it has none."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={words_for(option)}" for key, option in value.items())
    if isinstance(value, list | tuple | set):
        return " ".join(filter(None, map(words_for, value)))
    words = str(getattr(value, "__name__", value))
    return words if re.fullmatch(r"[\w. +-]{1,40}", words) else ""


def on_ranks(
    *world_sizes: int,
    cases: Mapping[str, Any] | Iterable[Any] | None = None,
    quick: Iterable[str] | None = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a job a test: its body runs on gloo ranks, and its arguments are the test's parameters and fixtures.

    Args:
        world_sizes: Of several, each case takes one in turn; with the others it is a slow test.
        cases: Each is a test of its own, with these arguments. They may have names.
        quick: Names of cases, if the others are slow tests.
        options: Those of ``WorkerPool.run``.
    """
    named = None if cases is None else named_cases(cases)

    def decorate(job: Callable[..., None]) -> Callable[..., None]:
        def one_case(name: str) -> None:
            assert named is not None
            job(*named[name])

        @functools.wraps(job)
        def test(run_ranks: RunRanks, world_size: int, **arguments: Any) -> None:
            run_ranks(world_size, whole, *(arguments[name] for name in parameters), **options)

        whole = job if named is None else one_case
        whole.__module__, whole.__qualname__ = job.__module__, f"{job.__name__}.job"  # where workers find it
        test.job = whole  # type: ignore[attr-defined]
        parameters = list(inspect.signature(whole).parameters)
        kind = inspect.Parameter.KEYWORD_ONLY
        found = [inspect.Parameter(name, kind) for name in ("run_ranks", "world_size", *parameters)]
        test.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        if named is None:
            return pytest.mark.parametrize("world_size", some_slow(world_sizes, world_sizes[:1]))(test)
        chosen = [
            (world_sizes[at % len(world_sizes)], name) for at, name in enumerate(named if quick is None else quick)
        ]
        rows = [(size, name) for name in named for size in world_sizes]
        return pytest.mark.parametrize(("world_size", "name"), some_slow(rows, chosen))(test)

    return decorate
