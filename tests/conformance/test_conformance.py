"""torch's own tests of its DDP, run with ``BucketDDP`` in its place."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conformance import shim
from tests.conformance.__main__ import PAGE, RANKS, TIMEOUT, failures, page
from tests.conformance.lists import EXCLUDED, FAILS_WITH_TORCH, PENDING, TESTS, TORCH
from tests.pool import Nursery, WorkerPool

THIS_TORCH = torch.__version__.split("+")[0]
REQUIRED = [name for name in TESTS if name not in FAILS_WITH_TORCH and name not in EXCLUDED]


def marked(name: str) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason=PENDING[name])] if name in PENDING else []
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="module")
def torch_ranks(nursery: Nursery) -> Iterator[WorkerPool]:
    """Workers of their own: the shim replaces parts of torch there."""
    pool = WorkerPool(RANKS, nursery)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def names_here(torch_ranks: WorkerPool) -> list[str]:
    return torch_ranks.run(shim.names_of_tests)[0]


@pytest.mark.parametrize("name", [marked(name) for name in REQUIRED])
def test_passes_with_bucketddp(torch_ranks: WorkerPool, names_here: list[str], name: str) -> None:
    if THIS_TORCH != TORCH and name not in names_here:
        pytest.skip(f"torch {THIS_TORCH} has no such test; the list is that of {TORCH}")
    torch_ranks.run(shim.run_test, name, True, timeout=TIMEOUT)


def test_a_failing_test_fails_here_and_harms_no_other(torch_ranks: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="Expected error was not raised"):
        torch_ranks.run(shim.run_test, "test_ddp_multiple_nested_unused_params_error", True, timeout=TIMEOUT)
    torch_ranks.run(shim.run_test, "test_ddp_multiple_nested_unused_params_error", False, timeout=TIMEOUT)


@pytest.mark.skipif(THIS_TORCH != TORCH, reason=f"the list is that of torch {TORCH}")
def test_list_holds_each_of_torchs_tests(names_here: list[str]) -> None:
    assert list(TESTS) == names_here


@pytest.mark.slow
@pytest.mark.skipif(THIS_TORCH != TORCH, reason=f"the list is that of torch {TORCH}")
def test_torchs_class_fails_where_the_list_says(torch_ranks: WorkerPool, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--torch-ddp"):
        pytest.skip("runs all tests with torch's class, if asked with --torch-ddp")
    assert failures(torch_ranks, with_bucketddp=False).keys() == FAILS_WITH_TORCH.keys()


def test_table_is_that_of_the_lists() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.conformance"
