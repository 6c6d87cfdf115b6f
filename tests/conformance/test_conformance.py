"""torch's own tests of its DDP, run with ``BucketDDP`` in its place."""

from collections.abc import Iterator

import pytest
import torch

from tests.conformance import __main__ as table
from tests.conformance import shim
from tests.pool import Nursery, WorkerPool

THIS_TORCH = torch.__version__.split("+")[0]


@pytest.fixture(scope="module")
def ranks(nursery: Nursery) -> Iterator[WorkerPool]:
    """Workers of their own: the shim replaces parts of torch there."""
    pool = WorkerPool(table.RANKS, nursery)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def names(ranks: WorkerPool) -> list[str]:
    return ranks.run(shim.names_of_tests)[0]


SLOW = {
    "test_ddp_uneven_inputs",
    "test_ddp_compile_static_graph",
    *(f"test_ddp_hook_parity_{hook}" for hook in ("allreduce", "allreduce_process_group", "post_localSGD", "powerSGD")),
}
"""Take seconds. ``tests/wrapper`` and ``tests/comm/test_hooks.py`` test the same on small models."""
REQUIRED = [name for name in table.TESTS if name not in table.FAILS_WITH_TORCH | table.EXCLUDED]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in REQUIRED]
)
def test_passes_with_bucketddp(ranks: WorkerPool, names: list[str], name: str, request: pytest.FixtureRequest) -> None:
    if THIS_TORCH != table.TORCH and name not in names:
        pytest.skip(f"torch {THIS_TORCH} has no such test; the table is that of {table.TORCH}")
    if name in table.PENDING:
        request.applymarker(pytest.mark.xfail(strict=True, reason=table.PENDING[name]))
    ranks.run(shim.run_test, name, True, timeout=table.TIMEOUT)


def test_a_failing_test_fails_here_and_harms_no_other(ranks: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="Expected error was not raised"):
        ranks.run(shim.run_test, "test_ddp_multiple_nested_unused_params_error", True, timeout=table.TIMEOUT)
    ranks.run(shim.run_test, "test_ddp_multiple_nested_unused_params_error", False, timeout=table.TIMEOUT)


@pytest.mark.skipif(THIS_TORCH != table.TORCH, reason=f"the table is that of torch {table.TORCH}")
def test_table_holds_each_of_torchs_tests(names: list[str]) -> None:
    assert names == table.TESTS
    tests, left_out = len(table.TESTS), len(table.EXCLUDED)
    torch_passes = tests - len(table.FAILS_WITH_TORCH)
    counts = [tests, torch_passes, torch_passes - left_out - len(table.PENDING), left_out]
    assert [int(count) for count in (table.TOTAL, *table.PASSING)] == counts, "in the page's head"
