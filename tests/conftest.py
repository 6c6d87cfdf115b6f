import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pool import DEVICE_BACKEND, Nursery, RunRanks, WorkerPool

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


def _ranks(nursery: Nursery) -> Iterator[RunRanks]:
    pools: dict[int, WorkerPool] = {}

    def run(world_size: int, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return pools.setdefault(world_size, WorkerPool(world_size, nursery)).run(job, *args, **options)

    yield run
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def ranks_on_cpu(nursery: Nursery) -> Iterator[RunRanks]:
    yield from _ranks(nursery)


@pytest.fixture(scope="session")
def ranks_on_accelerator() -> Iterator[RunRanks]:
    nursery = Nursery({DEVICE_BACKEND: "1"})
    yield from _ranks(nursery)
    nursery.end()


@pytest.fixture(scope="session")
def ranks_on_simulated() -> Iterator[RunRanks]:
    """Ranks in processes that have the simulated accelerator, which is built here."""
    from tests.simulated import build

    if build.why_not():
        pytest.skip(build.why_not())
    build.library()
    nursery = Nursery({DEVICE_BACKEND: "1", **build.environment()})
    yield from _ranks(nursery)
    nursery.end()


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
