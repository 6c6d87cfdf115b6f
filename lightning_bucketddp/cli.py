"""``python -m lightning_bucketddp``: versions and names, or a LightningCLI with the strategies registered."""

import platform
import sys
import textwrap
from collections.abc import Iterable, Sequence

import lightning
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bucketddp import __version__
from lightning_bucketddp.comm.groups import available_backends
from lightning_bucketddp.trainer.common import REGISTERED
from lightning_bucketddp.trainer.dp.strategy import NAME

USAGE = """\
usage: python -m lightning_bucketddp                            print versions and the registered names
       python -m lightning_bucketddp {fit,validate,test,predict} --model MODULE.CLASS [OPTION ...]
                                                                run a LightningCLI (`fit --help` lists its options)

The LightningCLI takes any LightningModule and LightningDataModule by class path, from the current folder too. It trains
with `--trainer.strategy bucketddp` unless told otherwise.
"""

_SUBCOMMANDS = ("fit", "validate", "test", "predict")


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code: 2 if the arguments make no sense.
    """
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        print(USAGE, end="")
    elif first in ("", "--version"):
        print(f"lightning_bucketddp  {__version__}" if first else describe())
    elif first in _SUBCOMMANDS or (first.startswith("-") and first != "-m"):
        return _run_lightning_cli()
    else:
        return _refuse(
            f"expected one of {', '.join(_SUBCOMMANDS)}, found {first!r}. Scripts and modules are not run: put `import "
            "lightning_bucketddp` into yours, which registers the strategies, and start it as `python SCRIPT` or "
            "`python -m MODULE`"
        )
    return 0


def describe() -> str:
    """Return versions, devices, backends and the registered names as a table."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    lines = {
        "lightning_bucketddp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "devices": "cpu" if accelerator is None else f"{torch.accelerator.device_count()} x {accelerator.type}",
        "backends": ", ".join(available_backends()),
        "Trainer(strategy=...)": _grouped(name for name in [*REGISTERED, NAME] if name in StrategyRegistry),
        "Fabric(strategy=...)": _grouped(name for name in REGISTERED if name in STRATEGY_REGISTRY),
    }
    return "\n".join(
        textwrap.fill(f"{name:21}  {text}", 100, subsequent_indent=" " * 23) for name, text in lines.items()
    )


def _grouped(names: Iterable[str]) -> str:
    """The names, without those for ``find_unused_parameters``, of which a clause tells."""
    shown = [name for name in names if "_find_unused_parameters_" not in name]
    return ", ".join(shown) + "; names with bucketddp may end in _find_unused_parameters_true or _false"


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
        return _refuse(f"the LightningCLI needs a package: {error}. pip install 'jsonargparse[signatures]>=4.39,<5'")
    return 0


def _refuse(problem: str) -> int:
    print(f"lightning_bucketddp: {problem}\n\n{USAGE}", end="", file=sys.stderr)
    return 2
