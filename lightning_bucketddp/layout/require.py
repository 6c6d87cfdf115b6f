"""Checks of options and arguments, with one form of error."""

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
    """Require that an option or argument has an accepted type and value.

    Args:
        name: The option's or argument's name.
        value: Its value.
        wanted: All accepted values, in words.
        kinds: Accepted types. A bool is no number, a str is no sequence.
        fits: Whether a value of these types is accepted; not asked about None.

    Raises:
        TypeError: If the value has another type.
        ValueError: If the value does not fit.
    """
    message = f"expected {name} to be {wanted}, found {value!r}"
    no_number = isinstance(value, bool) and isinstance(0, kinds)
    no_sequence = isinstance(value, str) and isinstance((), kinds)
    if no_number or no_sequence or not isinstance(value, kinds):
        raise TypeError(message)
    if value is not None and not fits(value):
        raise ValueError(message)


def require_choice(name: str, value: object, choices: tuple[str, ...], optional: bool = False) -> None:
    """Require that an option is one of some words, or None if it is optional. Raises as :func:`require`."""
    words = ", ".join(f'"{choice}"' for choice in choices[:-1]) + f' or "{choices[-1]}"'
    kinds = str | None if optional else str
    require(name, value, f"{'None, ' if optional else ''}{words}", kinds, lambda word: word in choices)
