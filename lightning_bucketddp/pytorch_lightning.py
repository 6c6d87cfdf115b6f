"""What :mod:`lightning_bucketddp` has for Lightning, for ``pytorch_lightning`` and ``lightning_fabric``.

Lightning comes as two packages with classes and registries of their own: a strategy of one is none for the other's
Trainer. The folder ``trainer`` is written for ``lightning``. Here Python imports its files once more, as
``lightning_bucketddp.pytorch_lightning.*``, with the other package's names in the source. File names and line numbers
stay, so that tracebacks and debuggers show that one source.
"""

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

_SOURCE = "lightning_bucketddp.trainer"
_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric", _SOURCE: __name__}
_PATTERN = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in _NAMES))


class _Loader(SourceFileLoader):
    """Compiles a file of ``trainer`` with the other names, each time: its cached bytecode has ``lightning``'s."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = decode_source(self.get_data(path))
        return self.source_to_code(_PATTERN.sub(lambda found: _NAMES[found[0]], source), path)


class _Finder(MetaPathFinder):
    """Finds the modules of this package among the files of ``trainer``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            return None
        folders = found.submodule_search_locations
        loader = _Loader(fullname, found.origin)
        return spec_from_file_location(fullname, loader=loader, submodule_search_locations=folders)


if TYPE_CHECKING:
    from lightning_bucketddp.trainer.public import *  # noqa: F403
else:
    __path__ = [str(Path(__file__).with_name("trainer"))]
    sys.meta_path.insert(0, _Finder())
    from lightning_bucketddp.pytorch_lightning.public import *  # noqa: F403
