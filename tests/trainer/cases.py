"""Many cases in one group of ranks: a failure names its case."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(name: object) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"in the case {name!r}: {error}") from error
