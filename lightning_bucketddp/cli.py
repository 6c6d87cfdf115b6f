"""``python -m lightning_bucketddp``: versions and names, or a LightningCLI with the strategies registered."""

from __future__ import annotations

import platform
import sys
import textwrap
from collections.abc import Sequence

import lightning
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bucketddp import __version__
from lightning_bucketddp.comm.groups import available_backends
from lightning_bucketddp.trainer.common import REGISTERED
from lightning_bucketddp.trainer.dp.strategy import NAME

USAGE = """\
usage: python -m lightning_bucketddp                            versions, and the names that are registered
       python -m lightning_bucketddp {fit,validate,test,predict} --model MODULE.CLASS [OPTION ...]
                                                                runs a LightningCLI (`fit --help` for its options)

The LightningCLI takes any LightningModule and LightningDataModule by class path, those in the current folder too, and
trains with `--trainer.strategy bucketddp` unless told otherwise.
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
    first = arguments[0]
    if first in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if first == "--version":
        print(describe().splitlines()[0])
        return 0
    if first in _SUBCOMMANDS or (first.startswith("-") and first != "-m"):
        return _run_lightning_cli()
    return _refuse(
        f"expected one of {', '.join(_SUBCOMMANDS)}, found {first!r}. Scripts and modules are not run: put `import "
        "lightning_bucketddp` into yours, which registers the strategies, and start it as `python SCRIPT` or "
        "`python -m MODULE`"
    )


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


def _refuse(problem: str) -> int:
    print(f"lightning_bucketddp: {problem}\n\n{USAGE}", end="", file=sys.stderr)
    return 2
