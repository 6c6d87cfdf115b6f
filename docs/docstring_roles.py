"""Griffe extension: turns Sphinx roles of docstrings, such as ``:meth:`BucketDDP.join```, into Markdown."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|mod):`~?([\w.]+)`")
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites each docstring when it has been read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if not obj.is_alias and obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub(":", text)
