"""``python -m lightning_bucketddp``: runs a script, a module or a LightningCLI with the strategies registered."""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.launchers import subprocess_script as fabric_launcher
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import subprocess_script as trainer_launcher

from lightning_bucketddp import __version__
from lightning_bucketddp.comm.collectives import available_backends
from lightning_bucketddp.trainer.common import REGISTERED
from lightning_bucketddp.trainer.dp.strategy import NAME

USAGE = """\
usage: python -m lightning_bucketddp                            versions, and the names that are registered
       python -m lightning_bucketddp SCRIPT [ARGUMENT ...]      runs a script as `python SCRIPT` does
       python -m lightning_bucketddp -m MODULE [ARGUMENT ...]   runs a module as `python -m MODULE` does
       python -m lightning_bucketddp {fit,validate,test,predict} --model MODULE.CLASS [OPTION ...]
                                                                runs a LightningCLI (`fit --help` for its options)

Scripts and modules need not import lightning_bucketddp to use strategy="bucketddp". The LightningCLI takes any
LightningModule and LightningDataModule by class path, those in the current folder too, and trains with
`--trainer.strategy bucketddp` unless told otherwise.
"""

_SUBCOMMANDS = ("fit", "validate", "test", "predict")


def main(arguments: Sequence[str]) -> int:
    """Does what the command line asks for.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 2 if the arguments make no sense.
    """
    if not arguments:
        print(describe())
        return 0
    first, *rest = arguments
    if first in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if first == "--version":
        print(describe().splitlines()[0])
        return 0
    if first == "-m":
        if not rest:
            return _refuse("expected the name of a module after -m")
        if not _can_be_run(rest[0]):
            return _refuse(f"expected a module after -m, found {rest[0]!r}, which there is not, or cannot be run")
        with _starting_ranks_as_now():
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return 0
    if first in _SUBCOMMANDS or first.startswith("-"):
        return _run_lightning_cli()
    if not os.path.exists(first):
        return _refuse(
            f"expected a script, -m and a module, or one of {', '.join(_SUBCOMMANDS)}; found {first!r}, and there is "
            "no such file"
        )
    with _starting_ranks_as_now():
        sys.argv = [first, *rest]
        if not getattr(sys.flags, "safe_path", False):  # -P, of Python 3.11
            sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")
    return 0


def describe() -> str:
    """Versions of what gradients depend on, what there is to train on, and the registered names."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = "cpu" if accelerator is None else f"{torch.accelerator.device_count()} x {accelerator.type}"
    lines = {
        "lightning_bucketddp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "devices": devices,
        "backends": ", ".join(available_backends()),
        "Trainer(strategy=...)": ", ".join(name for name in [*REGISTERED, NAME] if name in StrategyRegistry),
        "Fabric(strategy=...)": ", ".join(name for name in REGISTERED if name in STRATEGY_REGISTRY),
    }
    width = max(len(name) for name in lines)
    indent = " " * (width + 2)
    return "\n".join(textwrap.fill(f"{name:{width}}  {lines[name]}", 100, subsequent_indent=indent) for name in lines)


def _run_lightning_cli() -> int:
    try:
        from lightning.pytorch.cli import LightningCLI

        LightningCLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_defaults={"strategy": "bucketddp"},
            parser_kwargs={"prog": "python -m lightning_bucketddp"},
        )
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        return _refuse(f"the LightningCLI needs another package: {error}. pip install 'lightning_bucketddp[cli]'")
    return 0


@contextmanager
def _starting_ranks_as_now() -> Iterator[None]:
    """Has Lightning start the other ranks with this process's command rather than with the script's.

    It takes the command from ``sys.argv`` and the module ``__main__``, which are the script's while that runs; started
    so, the other ranks would not know the strategies' names. The method is private: a test notices if it goes.
    """
    command = sys.modules["__main__"], sys.argv
    launchers = [module._SubprocessScriptLauncher for module in (fabric_launcher, trainer_launcher)]
    methods = [launcher._call_children_scripts for launcher in launchers]

    def as_now(start_ranks: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(launcher: Any) -> None:
            of_script = sys.modules["__main__"], sys.argv
            sys.modules["__main__"], sys.argv = command
            try:
                start_ranks(launcher)
            finally:
                sys.modules["__main__"], sys.argv = of_script

        return start

    try:
        for launcher, method in zip(launchers, methods, strict=True):
            launcher._call_children_scripts = as_now(method)
        yield
    finally:
        sys.argv = command[1]
        for launcher, method in zip(launchers, methods, strict=True):
            launcher._call_children_scripts = method


def _can_be_run(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ModuleNotFoundError, ValueError):
        return False
    return spec is not None


def _refuse(problem: str) -> int:
    print(f"lightning_bucketddp: {problem}\n\n{USAGE}", end="", file=sys.stderr)
    return 2
