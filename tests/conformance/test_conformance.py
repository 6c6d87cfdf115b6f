"""torch's own tests of its DDP, run with ``BucketDDP`` in its place."""

from collections.abc import Iterator

import pytest
import torch

from tests.conformance import shim
from tests.conformance.__main__ import (
    EXCLUDED,
    FAILS_WITH_TORCH,
    PAGE,
    PENDING,
    RANKS,
    TESTS,
    TIMEOUT,
    TORCH,
    failures,
    page,
)
from tests.pool import Nursery, WorkerPool

THIS_TORCH = torch.__version__.split("+")[0]
of_this_torch = pytest.mark.skipif(THIS_TORCH != TORCH, reason=f"the table is that of torch {TORCH}")


@pytest.fixture(scope="module")
def torch_ranks(nursery: Nursery) -> Iterator[WorkerPool]:
    """Workers of their own: the shim replaces parts of torch there."""
    pool = WorkerPool(RANKS, nursery)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def names_here(torch_ranks: WorkerPool) -> list[str]:
    return torch_ranks.run(shim.names_of_tests)[0]


@pytest.mark.parametrize("name", [name for name in TESTS if name not in FAILS_WITH_TORCH | EXCLUDED])
def test_passes_with_bucketddp(
    torch_ranks: WorkerPool, names_here: list[str], name: str, request: pytest.FixtureRequest
) -> None:
    if THIS_TORCH != TORCH and name not in names_here:
        pytest.skip(f"torch {THIS_TORCH} has no such test; the table is that of {TORCH}")
    if name in PENDING:
        request.applymarker(pytest.mark.xfail(strict=True, reason=PENDING[name]))
    torch_ranks.run(shim.run_test, name, True, timeout=TIMEOUT)


def test_a_failing_test_fails_here_and_harms_no_other(torch_ranks: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="Expected error was not raised"):
        torch_ranks.run(shim.run_test, "test_ddp_multiple_nested_unused_params_error", True, timeout=TIMEOUT)
    torch_ranks.run(shim.run_test, "test_ddp_multiple_nested_unused_params_error", False, timeout=TIMEOUT)


@of_this_torch
def test_table_holds_each_of_torchs_tests(names_here: list[str]) -> None:
    assert names_here == TESTS
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.conformance"


@pytest.mark.slow
@of_this_torch
def test_torchs_class_fails_where_the_table_says(torch_ranks: WorkerPool, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--torch-ddp"):
        pytest.skip("runs all tests with torch's class, if asked with --torch-ddp")
    assert failures(torch_ranks, with_bucketddp=False).keys() == FAILS_WITH_TORCH
