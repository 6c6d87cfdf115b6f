import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pool import Nursery, RunRanks, WorkerPool

# Before torch is imported. Threads of pytest's workers, and of ranks that they start, would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seed", type=int, help="run this one case of tests/reducer/test_fuzz.py")
    parser.addoption("--fuzz-cases", type=int, help="run as many of its cases, on 2 and on 3 ranks")
    parser.addoption("--update-traces", action="store_true", help="write the files of tests/traces/golden anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray mostly waits, and for long: its test starts first, and does not run alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_ray.py")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.end()


@pytest.fixture(scope="session")
def run_ranks(nursery: Nursery) -> Iterator[RunRanks]:
    """``run_ranks(world_size, job, *args)``: the job's results by rank."""
    pools: dict[int, WorkerPool] = {}

    def run(world_size: int, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return pools.setdefault(world_size, WorkerPool(world_size, nursery)).run(job, *args, **options)

    yield run
    for pool in pools.values():
        pool.stop()
