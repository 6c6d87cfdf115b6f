"""``python -m lightning_bucketddp``: versions and names, or a check of these machines."""

import platform
import sys
import textwrap
from collections.abc import Iterable, Sequence

import torch

from lightning_bucketddp import __version__, check
from lightning_bucketddp.comm.groups import available_backends
from lightning_bucketddp.layout.registry import DP_NAMES, REGISTERED

USAGE = """\
usage: python -m lightning_bucketddp                                    print versions and the registered names
       python -m lightning_bucketddp check [--output FILE] [--quick]    find out whether training is right on these
                                                                        machines, and how fast
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code: 1 if the check has found something wrong, 2 if the arguments make no sense.
    """
    first = arguments[0] if arguments else ""
    if first == "check":
        return check.main(arguments[1:])
    if first in ("-h", "--help"):
        print(USAGE, end="")
    elif first in ("", "--version"):
        print(f"lightning_bucketddp  {__version__}" if first else describe())
    else:
        return _refuse(
            f"expected check, or no argument, found {first!r}. Scripts and a LightningCLI are not run: put `import "
            "lightning_bucketddp` into your script, which registers the strategies, and start it as `python SCRIPT`"
        )
    return 0


def describe() -> str:
    """Return versions, devices, backends and the registered names as a table."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    lines = {
        "lightning_bucketddp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": check.version_of("lightning") or "not installed",
        "pytorch-lightning": check.version_of("pytorch-lightning") or "not installed",
        "devices": "cpu" if accelerator is None else f"{torch.accelerator.device_count()} x {accelerator.type}",
        "backends": ", ".join(available_backends()),
        "Trainer(strategy=...)": _grouped([*REGISTERED, *DP_NAMES]),
        "Fabric(strategy=...)": _grouped(REGISTERED),
    }
    return "\n".join(
        textwrap.fill(f"{name:21}  {text}", 100, subsequent_indent=" " * 23) for name, text in lines.items()
    )


def _grouped(names: Iterable[str]) -> str:
    """The names, without those for ``find_unused_parameters``, of which a clause tells."""
    shown = [name for name in names if "_find_unused_parameters_" not in name]
    return ", ".join(shown) + "; names with bucketddp may end in _find_unused_parameters_true or _false"


def _refuse(problem: str) -> int:
    print(f"lightning_bucketddp: {problem}\n\n{USAGE}", end="", file=sys.stderr)
    return 2
