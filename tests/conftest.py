import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import Nursery, nurseries
from tests.pool import DEVICE_BACKEND, RunRanks, WorkerPool
from tests.simulated import build

# Before torch is imported. Threads of pytest's workers, and of ranks that they start, would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seed", type=int, help="run this one case of tests/reducer/test_fuzz.py")
    parser.addoption("--fuzz-cases", type=int, help="run as many of its cases, on 2 and on 3 ranks")
    parser.addoption("--update-traces", action="store_true", help="write the files of tests/traces/golden anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray mostly waits, and for long: its test starts first, and does not run alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_ray.py")


def pytest_collection_finish() -> None:
    gc.freeze()  # from now on, garbage collections pass over what was imported and collected
    gc.enable()


NURSERIES = {
    "cpu": {},
    "accelerator": {DEVICE_BACKEND: "1"},
    "simulated": {DEVICE_BACKEND: "1", "SIM_DEVICES": "4", **build.environment()},
}
"""Of each kind of ranks, variables of its environment."""
FOLDER = "TESTS_NURSERIES"


def pytest_configure(config: pytest.Config) -> None:
    """Start the processes that fork ranks: once, for all workers of pytest-xdist."""
    gc.disable()
    if hasattr(config, "workerinput"):
        return
    running = ExitStack()
    os.environ[FOLDER] = str(running.enter_context(nurseries(**NURSERIES)))
    config.add_cleanup(running.close)


def nursery_of(kind: str) -> Nursery:
    return Nursery(Path(os.environ[FOLDER], kind))


def ranks_of(kind: str) -> Iterator[RunRanks]:
    pools: dict[int, WorkerPool] = {}

    def run(world_size: int, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return pools.setdefault(world_size, WorkerPool(world_size, nursery_of(kind))).run(job, *args, **options)

    yield run
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    return nursery_of("cpu")


@pytest.fixture(scope="session")
def ranks_on_cpu() -> Iterator[RunRanks]:
    yield from ranks_of("cpu")


@pytest.fixture(scope="session")
def ranks_on_accelerator() -> Iterator[RunRanks]:
    yield from ranks_of("accelerator")


@pytest.fixture(scope="session")
def ranks_on_simulated() -> Iterator[RunRanks]:
    """Ranks in processes that have the simulated accelerator, which is built here."""
    if build.why_not():
        pytest.skip(build.why_not())
    build.library()
    yield from ranks_of("simulated")


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    """``run_ranks(world_size, job, *args)``: the job's results by rank.

    Jobs of tests that are marked ``gpu`` find a real accelerator if there is one, else the simulated one; those marked
    ``simulated`` always find the simulated one.
    """
    where = "cpu"
    if request.node.get_closest_marker("simulated"):
        where = "simulated"
    elif request.node.get_closest_marker("gpu"):
        import torch

        where = "accelerator" if torch.accelerator.is_available() else "simulated"
    return request.getfixturevalue(f"ranks_on_{where}")
