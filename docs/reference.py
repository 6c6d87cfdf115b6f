"""Writes the tables of options and calls into their pages, so that they can be read in the repository.

    python docs/reference.py

The texts are those of the docstrings. ``tests/test_option_listing.py`` says if a page is no longer up to date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import docstring_parser

import lightning_bucketddp
from lightning_bucketddp import BucketDDP, BucketDDPStrategy, Options, replicas

ROLE = re.compile(r":\w+:`~?([\w.]+)`")
TOPIC = re.compile(r"([A-Z][A-Z' ]+)\. ")
"""Begins the text of a topic's first option."""
INTERNAL = re.compile(r"_|join_|average_loss$")
"""Begins the names of calls that only strategies and torch's ``Join`` make."""


def pages() -> dict[Path, str]:
    """Each page with its tables as they should be."""
    folder = Path(__file__).parent
    tables = {"options.md": options(), "api.md": calls()}
    return {folder / name: _between_marks((folder / name).read_text(), text) for name, text in tables.items()}


def _between_marks(page: str, text: str) -> str:
    before, begins, rest = page.partition("<!-- Made by docs/reference.py -->\n")
    _, ends, after = rest.partition("<!-- End -->\n")
    assert begins, "the mark before the tables is gone"
    assert ends, "the mark behind the tables is gone"
    return f"{before}{begins}\n{text}\n{ends}{after}"


def options() -> str:
    """All arguments of the Trainer's strategy by topic, its own first."""
    texts = _texts(Options) | _texts(BucketDDPStrategy)
    lines = list[str]()
    for each in inspect.signature(BucketDDPStrategy).parameters.values():
        text = texts[each.name]
        if topic := TOPIC.match(text):
            title = topic[1].capitalize().replace("Torch ddp", "torch DDP")
            lines += ["", f"### {title}", "", *_head("option", "default", "what it does")]
            text = text[topic.end() :]
        lines.append(_row(f"`{each.name}`", f"`{_shown(each.default)}`", text))
    return "\n".join(lines[1:])


def _texts(documented: Any) -> dict[str, str]:
    parsed = docstring_parser.parse(documented.__doc__, docstring_parser.DocstringStyle.GOOGLE)
    return {each.arg_name: each.description or "" for each in parsed.params}


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def calls() -> str:
    """The public names, and what the wrapper has."""
    names = [name for name in lightning_bucketddp.__all__ if not name.startswith("_")]
    classes = [name for name in names if inspect.isclass(getattr(lightning_bucketddp, name))]
    functions = [name for name in names if name not in classes]
    wrapper = [name for name in vars(BucketDDP) if not INTERNAL.match(name)]
    return "\n".join(
        [
            *_head("class", "what it is"),
            *(_row(f"`{name}`", _first(getattr(lightning_bucketddp, name))) for name in classes),
            "",
            *_head("function", "what it does"),
            *_rows((name, getattr(lightning_bucketddp, name)) for name in functions),
            *_rows((f"replicas.{name}", getattr(replicas, name)) for name in replicas.__all__),
            "",
            *_head("of `BucketDDP`", "what it does, or is"),
            *_rows((name, inspect.getattr_static(BucketDDP, name)) for name in wrapper),
        ]
    )


def _rows(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for name, each in named:
        if _first(each):
            yield _row(f"`{name}{_arguments(each) if callable(each) else ''}`", _first(each))


def _arguments(call: Callable[..., Any]) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    given = [each for name, each in inspect.signature(call).parameters.items() if name != "self"]
    return f"({', '.join(stars.get(each.kind, '') + each.name for each in given)})"


def _first(documented: Any) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n\n")[0]


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]


def _row(*cells: str) -> str:
    plain = (" ".join(ROLE.sub(r"`\1`", cell).replace("``", "`").replace("|", "\\|").split()) for cell in cells)
    return f"| {' | '.join(plain)} |"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
