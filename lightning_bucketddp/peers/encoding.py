"""Records in the store, as JSON. Whoever reaches its port may write there: records are checked, and run nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_hints_of = cache(get_type_hints)
_log = logging.getLogger(__name__)


def encode(value: object) -> str:
    """Dataclasses, numbers, strings, and sequences and dictionaries of them as JSON."""
    return json.dumps(value, default=lambda each: {field.name: getattr(each, field.name) for field in fields(each)})


def decode(text: str | bytes, kind: Any, otherwise: _T) -> _T:
    """Read what :func:`encode` has written of a value of one kind.

    Args:
        text: The JSON.
        kind: A dataclass, a type such as ``int``, or a generic such as ``Sequence[int]``.
        otherwise: Returned, after a warning, if the text is something else.
    """
    try:
        return _checked(json.loads(text), kind)
    except (ValueError, TypeError, RecursionError) as error:
        _log.warning("expected a record of %s in the store, found something else, which is ignored: %s", kind, error)
        return otherwise


def _checked(value: Any, kind: Any) -> Any:
    """A value of JSON as one of ``kind``.

    Raises:
        ValueError: If it is none.
    """
    if type(value) is kind:  # most are numbers and strings
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:  # others of its kinds do not travel
        return _checked(value, args[0])
    if origin is dict and isinstance(value, dict):
        return {_checked(key, args[0]): _checked(each, args[1]) for key, each in value.items()}
    if origin in (Sequence, tuple) and isinstance(value, list):
        kinds = args if origin is tuple else args * len(value)
        return tuple(_checked(each, kind) for each, kind in zip(value, kinds, strict=True))
    if is_dataclass(kind) and isinstance(value, dict):
        record = cast(Any, kind)
        hints = _hints_of(record)
        if value.keys() == hints.keys():
            return record(**{name: _checked(value[name], hint) for name, hint in hints.items()})
    elif isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    raise ValueError(f"{str(value)[:200]!r} is no {kind}")
