"""Writes ``docs/conformance.md`` from the lists; with ``--measure`` runs torch's tests and compares."""

import argparse
import sys
from pathlib import Path

from tests.conformance.lists import EXCLUDED, FAILS_WITH_TORCH, PENDING, TESTS, TORCH
from tests.pool import Nursery, RankError, WorkerPool

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
RANKS = 2
TIMEOUT = 120

HEAD = """# torch's own DDP tests

torch's wheel ships the tests of its `DistributedDataParallel`, in
`torch.testing._internal.distributed.distributed_test`. `tests/conformance/` runs all that use the class, on two CPU
ranks with gloo; what they put on GPUs stays on the CPU. Of the {tests} tests in torch {torch}, torch's own class passes
{torch_passes}. `BucketDDP`, put in its place, passes {passes}{pending}. {excluded} are left out, each for the reason in
the table.

Written by `python -m tests.conformance`; with `--measure` that runs all tests with both classes, and says where the
table is wrong. The test command of the README runs those that `BucketDDP` must pass.

| test | torch's DDP | `BucketDDP` | reason |
|---|---|---|---|
"""


def page() -> str:
    """The page, made of the lists."""
    rows = []
    for name in TESTS:
        reason = FAILS_WITH_TORCH.get(name) or EXCLUDED.get(name) or PENDING.get(name) or ""
        with_torch = "fails" if name in FAILS_WITH_TORCH else "passes"
        ours = "" if name in FAILS_WITH_TORCH else "left out" if name in EXCLUDED else "passes"
        rows.append(f"| `{name}` | {with_torch} | {'fails' if name in PENDING else ours} | {reason} |\n")
    torch_passes = len(TESTS) - len(FAILS_WITH_TORCH)
    head = HEAD.format(
        tests=len(TESTS),
        torch=TORCH,
        torch_passes=torch_passes,
        passes=torch_passes - len(EXCLUDED) - len(PENDING),
        excluded=len(EXCLUDED),
        pending=f" and fails {len(PENDING)}" if PENDING else "",
    )
    return head + "".join(rows)


def failures(pool: WorkerPool, with_bucketddp: bool) -> dict[str, str]:
    """Runs all of torch's tests; the tracebacks of those that fail."""
    from tests.conformance import shim

    found = {}
    for name in TESTS:
        try:
            pool.run(shim.run_test, name, with_bucketddp, timeout=TIMEOUT)
        except RankError as error:
            found[name] = str(error)
    return found


def measure() -> bool:
    """Runs all tests with both classes and prints where the lists are wrong. True if they are right."""
    nursery = Nursery()
    pool = WorkerPool(RANKS, nursery)
    try:
        found = {"torch's class": failures(pool, False), "BucketDDP": failures(pool, True)}
    finally:
        pool.stop()
        nursery.end()
    required = set(TESTS) - FAILS_WITH_TORCH.keys() - EXCLUDED.keys() - PENDING.keys()
    wrong = [(name, "torch's class") for name in found["torch's class"].keys() ^ FAILS_WITH_TORCH.keys()]
    wrong += [(name, "BucketDDP") for name in found["BucketDDP"].keys() & required]
    wrong += [(name, "BucketDDP") for name in PENDING.keys() - found["BucketDDP"].keys()]
    for name, what in sorted(wrong):
        print(f"{name} with {what}: {found[what].get(name, 'passes')}\n")
    return not wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the tests with both classes; takes some minutes")
    if parser.parse_args().measure:
        sys.exit(0 if measure() else "the lists are not what was found")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
