"""What a step asks of an accelerator and its host: the tables of ``docs/counts.md``; ``--update-traces`` makes them."""

import re
import warnings
from dataclasses import asdict, fields, replace

import pytest

from tests.pool import ROOT, RunRanks
from tests.sampling import some_slow
from tests.simulated.counts import BEST, MODELS, OURS, PEERS, Counts, counts

PAGE = ROOT / "docs" / "counts.md"
HEAD = (
    *("", "buckets", "kernels", "written", "collectives", "events", "waits", "`record_stream`", "allocations", "calls"),
    *("host waits", "store"),
)
ROWS = [
    (model, peer)
    for model, of in MODELS.items()
    for peer in PEERS
    if not (of.options and "contiguous" in peer)  # refused together
]
QUICK = [(next(iter(MODELS)), OURS)]
TABLE = "(## {}\n\n)(?:\\|.*\n)*"


def count(model: str, peer: str) -> Counts:
    with warnings.catch_warnings(action="ignore"):
        return counts(model, peer)


def read(model: str) -> dict[str, Counts]:
    """The rows of a model's table."""
    found = re.search(TABLE.format(re.escape(model)), PAGE.read_text())
    assert found is not None, f"the page has no part on {model!r}"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[4:]]
    types = [float if field.name == "written" else int for field in fields(Counts)]
    return {name: Counts(*(kind(cell) for kind, cell in zip(types, cells, strict=True))) for name, *cells in lines}


def write(model: str, rows: dict[str, Counts]) -> None:
    lines = [HEAD, ["---"] * len(HEAD)]
    lines += [[peer, *map(str, asdict(rows[peer]).values())] for peer in PEERS if peer in rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    PAGE.write_text(re.sub(TABLE.format(re.escape(model)), lambda found: found[1] + table, PAGE.read_text()))


@pytest.mark.parametrize(("model", "peer"), some_slow(ROWS, QUICK))
def test_counts_are_those_of_the_page(
    run_ranks: RunRanks, model: str, peer: str, request: pytest.FixtureRequest
) -> None:
    found = run_ranks(2, count, model, peer)[0]
    if request.config.getoption("--update-traces"):
        write(model, {**read(model), peer: found})
    expected = read(model)[peer]
    assert replace(found, calls=0) == replace(expected, calls=0)
    assert found.calls == pytest.approx(expected.calls, rel=0.1, abs=1)


@pytest.mark.parametrize("model", MODELS)
def test_a_plain_pass_asks_for_no_more_than_torchs_best_flags(model: str) -> None:
    rows, parameters = read(model), int(re.match(r"[\d,]+", model)[0].replace(",", ""))  # type: ignore[index]
    assert [*rows] == [peer for at, peer in ROWS if at == model]
    ours, best = rows[OURS], rows[BEST]
    assert ours.kernels <= best.kernels
    assert ours.written <= best.written
    assert ours.collectives <= ours.buckets, "the control vector travels in the last bucket"
    assert ours.allocations <= best.allocations
    assert ours.host_waits == ours.store == 0
    assert ours.calls <= parameters + 80 * ours.buckets + 200
