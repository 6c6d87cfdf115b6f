"""Runs torch's tests with both classes, and compares with the table in ``docs/conformance.md``. Takes some minutes.

The table has each of torch's tests that use ``DistributedDataParallel``, in torch's order. It says whether
torch's class passes on CPU ranks, and whether ``BucketDDP`` does. ``left out``: the test's subject is torch's inner
state, words or private interface. ``fails``: it should pass, but does not yet. The last cell says why.
"""

import re
import sys
from pathlib import Path

from tests.pool import RankError, WorkerPool, worker_pool

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
RANKS, TIMEOUT = 2, 120

TEXT = PAGE.read_text(encoding="utf-8")
HEAD = (
    r"Of the (\d+) tests in torch ([\d.]+), torch's own class passes (\d+)\. `B.*, passes (\d+) of these \d+\. "
    r"The other (\d+) are left out"
)
TOTAL, TORCH, *PASSING = re.findall(HEAD, " ".join(TEXT.split()))[0]
ROWS = re.findall(r"^\| `(\w+)` \| (passes|fails) \| (passes|fails|left out|) \| (.*) \|$", TEXT, re.MULTILINE)
TESTS = [name for name, *_ in ROWS]
FAILS_WITH_TORCH = {name for name, with_torch, *_ in ROWS if with_torch == "fails"}
EXCLUDED = {name for name, _, ours, _ in ROWS if ours == "left out"}
PENDING = {name: reason for name, _, ours, reason in ROWS if ours == "fails"}


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
    with worker_pool(RANKS) as pool:
        theirs, ours = failures(pool, False), failures(pool, True)
    wrong = {f"{name} with torch's class: {theirs.get(name, 'passes')}\n" for name in theirs.keys() ^ FAILS_WITH_TORCH}
    not_required = FAILS_WITH_TORCH | EXCLUDED | PENDING.keys()
    differ = (ours.keys() - not_required) | (PENDING.keys() - ours.keys())
    wrong |= {f"{name} with BucketDDP: {ours.get(name, 'passes')}\n" for name in differ}
    print(*sorted(wrong), sep="\n")
    return not wrong


if __name__ == "__main__":
    sys.exit(0 if measure() else "the table is not what was found")
