"""Which cases of a matrix run among the quick tests. The whole matrix runs with the slow ones. The same in each run."""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of the matrix in which each pair of values of two dimensions occurs; for three dimensions and more."""
    places = list(combinations(range(len(dimensions)), 2))
    rows = list(product(*(range(len(values)) for values in dimensions)))
    missing = {(a, b, row[a], row[b]) for row in rows for a, b in places}
    chosen = []
    while missing:
        row = max(rows, key=lambda row: sum((a, b, row[a], row[b]) in missing for a, b in places))
        missing -= {(a, b, row[a], row[b]) for a, b in places}
        chosen.append(tuple(values[at] for values, at in zip(dimensions, row, strict=True)))
    return chosen


def in_turn(rows: Sequence[Any], columns: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Of a matrix of two dimensions: each row with one column, and each column with a row, in turn."""
    return [(rows[at % len(rows)], columns[at % len(columns)]) for at in range(max(len(rows), len(columns)))]


def some_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``: those that are not quick are slow tests. Tuples have several values."""
    cases = list(cases)
    assert set(quick) <= set(cases), f"no such cases: {set(quick) - set(cases)}"
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=[] if case in quick else pytest.mark.slow)
        for case, row in zip(cases, rows, strict=True)
    ]
