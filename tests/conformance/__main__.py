"""Counts the rows of ``docs/conformance.md`` into its head; with ``--measure`` runs torch's tests and compares.

The page's table has each of torch's tests that use ``DistributedDataParallel``, in torch's order. It says whether
torch's class passes on CPU ranks, and whether ``BucketDDP`` does. ``left out``: the test's subject is torch's inner
state, words or private interface. ``fails``: it should pass, but does not yet. The last cell says why.
"""

import argparse
import re
import sys
from pathlib import Path

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

"""
TEXT = PAGE.read_text(encoding="utf-8")
TORCH = re.findall(r"tests in torch ([\d.]+),", TEXT)[0]
ROWS = re.findall(r"^\| `(\w+)` \| (passes|fails) \| (passes|fails|left out|) \| (.*) \|$", TEXT, re.MULTILINE)
TESTS = [name for name, *_ in ROWS]
FAILS_WITH_TORCH = {name for name, with_torch, *_ in ROWS if with_torch == "fails"}
EXCLUDED = {name for name, _, ours, _ in ROWS if ours == "left out"}
PENDING = {name: reason for name, _, ours, reason in ROWS if ours == "fails"}


def page() -> str:
    torch_passes = len(TESTS) - len(FAILS_WITH_TORCH)
    head = HEAD.format(
        tests=len(TESTS),
        torch=TORCH,
        torch_passes=torch_passes,
        passes=torch_passes - len(EXCLUDED) - len(PENDING),
        excluded=len(EXCLUDED),
        pending=f" and fails {len(PENDING)}" if PENDING else "",
    )
    return head + TEXT[TEXT.index("| test |") :]


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
    """Runs all tests with both classes and prints where the table is wrong. True if it is right."""
    nursery = Nursery()
    pool = WorkerPool(RANKS, nursery)
    try:
        theirs, ours = failures(pool, False), failures(pool, True)
    finally:
        pool.stop()
        nursery.end()
    wrong = {f"{name} with torch's class: {theirs.get(name, 'passes')}\n" for name in theirs.keys() ^ FAILS_WITH_TORCH}
    not_required = FAILS_WITH_TORCH | EXCLUDED | PENDING.keys()
    differ = (ours.keys() - not_required) | (PENDING.keys() - ours.keys())
    wrong |= {f"{name} with BucketDDP: {ours.get(name, 'passes')}\n" for name in differ}
    print(*sorted(wrong), sep="\n")
    return not wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the tests with both classes; takes some minutes")
    if parser.parse_args().measure:
        sys.exit(0 if measure() else "the table is not what was found")
    PAGE.write_text(page(), encoding="utf-8")
