"""Each scenario's collectives, rank by rank and group by group, against the committed ones.

The order between different groups is not compared. After a change on purpose, write the files anew with
``python -m pytest tests/traces --update-traces`` and say so in the changelog.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.traces import lightning_scenarios  # noqa: F401  # adds its own to the table
from tests.traces.recorder import Trace, recording
from tests.traces.scenarios import SCENARIOS

RunRanks = Callable[..., list[Any]]
GOLDEN = Path(__file__).parent / "golden"
TIMES_WHEN_UPDATING = 3


def record(name: str) -> Trace:
    with recording() as recorder:
        torch.manual_seed(0)
        SCENARIOS[name].run()
    return recorder.trace


def as_text(traces: list[Trace]) -> str:
    """One section for each group and each set of ranks that issue the same."""
    sections: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, trace in enumerate(traces):
        for group, lines in trace.items():
            sections.setdefault((group, tuple(lines)), []).append(rank)
    ordered = sorted(sections.items(), key=lambda item: (item[0][0] != "world", item[0][0], item[1]))
    return "\n".join(
        "\n".join([f"== {group} | issued by {' '.join(map(str, ranks))}", *lines, ""])
        for (group, lines), ranks in ordered
    )


def from_text(text: str, ranks: int) -> list[Trace]:
    traces: list[Trace] = [{} for _ in range(ranks)]
    for section in text.split("== ")[1:]:
        head, *lines = section.strip().splitlines()
        group, _, issuers = head.partition(" | issued by ")
        for rank in map(int, issuers.split()):
            traces[rank][group] = lines
    return traces


def differences(name: str, expected: list[Trace], found: list[Trace]) -> list[str]:
    """For each rank and group where the two differ: where they do first, and all that differs."""
    texts: list[str] = []
    for rank, (golden, trace) in enumerate(zip(expected, found, strict=True)):
        for group in sorted({*golden, *trace}):
            first, second = golden.get(group, []), trace.get(group, [])
            if first == second:
                continue
            at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
            at = min(len(first), len(second)) if at is None else at
            said = [repr(lines[at]) if at < len(lines) else "nothing more" for lines in (first, second)]
            head = f"scenario {name}, rank {rank}, group {group}, line {at + 1}: expected {said[0]}, found {said[1]}"
            texts.append("\n".join([head, *difflib.unified_diff(first, second, "expected", "found", lineterm="")]))
    return texts


@pytest.mark.parametrize("name", SCENARIOS)
def test_collectives_are_the_recorded_ones(run_ranks: RunRanks, name: str, request: pytest.FixtureRequest) -> None:
    ranks, fresh = SCENARIOS[name].ranks, SCENARIOS[name].fresh
    path = GOLDEN / f"{name}.txt"
    found = run_ranks(ranks, record, name, fresh=fresh)
    assert any(found), "nothing was recorded"
    if request.config.getoption("--update-traces"):
        for _ in range(TIMES_WHEN_UPDATING - 1):
            again = run_ranks(ranks, record, name, fresh=fresh)
            assert again == found, "\n\n".join(differences(name, found, again))
        path.write_text(as_text(found))
    problems = differences(name, from_text(path.read_text(), ranks), found)
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)


def test_every_recorded_trace_has_a_scenario() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(SCENARIOS)
