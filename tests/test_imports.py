"""Imports point downwards, and one folder calls ``torch.distributed``."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning_bucketddp

PACKAGE = Path(lightning_bucketddp.__file__).parent
FOLDERS = ["layout", "comm", "peers", "grads", "reducer", "optim", "replicas", "wrapper", "trainer"]
"""From the bottom up: a file imports from its own folder and from those below."""


def folder_of(parts: Sequence[str]) -> int:
    """The rank of the folder that a path within the package begins with; the package's root is above all."""
    return FOLDERS.index(parts[0]) if parts and parts[0] in FOLDERS else len(FOLDERS)


def imports_of(path: Path) -> Iterator[list[str]]:
    """The dotted names that a file imports, in parts; those for type checkers alone included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            yield from ([*(node.module or "").split("."), alias.name] for alias in node.names)


def test_imports_point_downwards() -> None:
    files = {"__init__.py", "__main__.py", "check.py", "cli.py", "pytorch_lightning.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == files
    assert sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")) == sorted(FOLDERS)
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE)
        for package, *parts in imports_of(path):
            if package == "lightning_bucketddp":
                assert folder_of(parts) <= folder_of(here.parts), f"{here} imports {'.'.join(parts)}, which is above it"
            elif package in ("lightning", "pytorch_lightning", "lightning_utilities"):
                assert folder_of(here.parts) >= FOLDERS.index("trainer"), f"{here} imports {package}"


def test_the_drawing_shows_these_folders() -> None:
    drawing = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    assert re.findall(r"^ *\| (\w+)/ ", drawing, re.MULTILINE) == FOLDERS[::-1]


def test_only_comm_calls_torch_distributed() -> None:
    for path in PACKAGE.rglob("*.py"):
        nodes = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = [ast.unparse(func).split(".") for func in nodes]
        calls = {name[1] for name in names if name[0] == "dist" and len(name) == 2}
        if path.parent.name == "trainer":  # Lightning owns the process group's life
            calls -= {"is_initialized", "destroy_process_group"}
        if path.name == "check.py":  # a program of its own, which nothing imports but the command line
            calls -= {"get_default_backend_for_device", "init_process_group", "get_backend", "barrier"}
            calls -= {"destroy_process_group"}
        assert path.parent.name == "comm" or not calls, f"{path.name} calls torch.distributed: {calls}"
