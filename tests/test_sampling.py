"""Samples of matrices leave no value and no pair out, and are small."""

from itertools import combinations, product

import pytest

from tests.sampling import in_turn, pairs, some_slow


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4), (2, 3, 2, 3), (5, 4, 3)])
def test_each_pair_of_values_occurs_in_few_rows(sizes: tuple[int, ...]) -> None:
    dimensions = [[(at, value) for value in range(size)] for at, size in enumerate(sizes)]
    rows = pairs(*dimensions)
    assert rows == pairs(*dimensions)
    for first, second in combinations(range(len(sizes)), 2):
        assert {(row[first], row[second]) for row in rows} == set(product(dimensions[first], dimensions[second]))
    largest = sorted(sizes)[-2:]
    assert len(rows) <= largest[0] * largest[1] + 3


def test_each_row_and_each_column_occurs() -> None:
    for rows, columns in ((5, 2), (2, 5), (3, 3)):
        found = in_turn(range(rows), range(columns))
        assert len(found) == max(rows, columns)
        assert {row for row, _ in found} == set(range(rows))
        assert {column for _, column in found} == set(range(columns))


def test_a_quick_case_that_is_not_there_is_told() -> None:
    found = some_slow(["a", ("b", 1)], [("b", 1)])
    assert [(param.values, bool(param.marks)) for param in found] == [(("a",), True), (("b", 1), False)]
    with pytest.raises(AssertionError, match="no such cases"):
        some_slow(["a"], ["b"])
