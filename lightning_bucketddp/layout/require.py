"""One form of error for values that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import Any


def require(
    name: str,
    value: object,
    wanted: str,
    kinds: type | UnionType,
    fits: Callable[[Any], bool] = lambda value: True,
) -> None:
    """Require that an option or argument has a value of the right kind, and one that fits.

    Args:
        name: What the user calls it.
        value: What the user gave.
        wanted: Every value it takes, in words.
        kinds: Types of the values it takes. A bool is no number, a str is no sequence.
        fits: Whether a value of these types, other than None, can be taken.

    Raises:
        TypeError: If the value is of another type.
        ValueError: If it is of the type and does not fit.
    """
    message = f"expected {name} to be {wanted}, found {value!r}"
    only_looks_right = (isinstance(value, bool) and isinstance(0, kinds)) or (
        isinstance(value, str) and isinstance((), kinds)
    )
    if only_looks_right or not isinstance(value, kinds):
        raise TypeError(message)
    if value is not None and not fits(value):
        raise ValueError(message)


def require_choice(name: str, value: object, choices: tuple[str, ...], optional: bool = False) -> None:
    """Require that an option is one of some words, or None where it is optional; raises as :func:`require`."""
    words = ", ".join(f'"{choice}"' for choice in choices[:-1]) + f' or "{choices[-1]}"'
    kinds = str | None if optional else str
    require(name, value, f"{'None, ' if optional else ''}{words}", kinds, lambda word: word in choices)
