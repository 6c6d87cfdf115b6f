"""Checks of options and arguments, with one form of error; names in errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from types import UnionType
from typing import Any

_MOST_NAMES = 3
"""How many names a message lists."""


def listed(names: Iterable[str]) -> str:
    """The first names in quotes, such as ``'a', 'b', 'c', ...``."""
    names = list(names)
    return ", ".join(map(repr, names[:_MOST_NAMES])) + (", ..." if len(names) > _MOST_NAMES else "")


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


def require_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Require that an owner has arguments of these names.

    Raises:
        TypeError: If it lacks one; says which one is like it.
    """
    for name in given:
        if name not in known:
            like = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, known, 1))
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{like}")


def require_choice(name: str, value: object, choices: tuple[str, ...], optional: bool = False) -> None:
    """Require that an option is one of some words, or None if it is optional. Raises as :func:`require`."""
    words = ", ".join(f'"{choice}"' for choice in choices[:-1]) + f' or "{choices[-1]}"'
    kinds = str | None if optional else str
    require(name, value, f"{'None, ' if optional else ''}{words}", kinds, lambda word: word in choices)
