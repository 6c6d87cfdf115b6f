"""Other members for an object of Lightning's, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def replace_members(owner: object, **members: Any) -> Callable[[], None]:
    """Give an object other members. Return a function that gives it its own back."""
    before = {name: vars(owner)[name] for name in members if name in vars(owner)}
    vars(owner).update(members)

    def restore() -> None:
        for name in members:
            vars(owner).pop(name, None)
        vars(owner).update(before)

    return restore


@contextmanager
def replaced(owner: object, **members: Any) -> Iterator[None]:
    """Give an object other members in this context."""
    restore = replace_members(owner, **members)
    try:
        yield
    finally:
        restore()
