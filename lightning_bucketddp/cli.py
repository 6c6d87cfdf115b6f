"""``python -m lightning_bucketddp``: versions and names, or a check of these machines."""

import argparse
import platform
import textwrap
from collections.abc import Iterable, Sequence

import torch

from lightning_bucketddp import __version__, check
from lightning_bucketddp.comm.groups import available_backends
from lightning_bucketddp.layout.registry import DP_NAMES, REGISTERED

DESCRIPTION = "Print versions and the registered names, or check these machines."
NO_SCRIPTS = (
    "Scripts and a LightningCLI are not run: put `import lightning_bucketddp` into your script, which registers the "
    "strategies, and start it as `python SCRIPT`."
)


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code: 1 if the check has found something wrong.

    Raises:
        SystemExit: With 2 if the arguments make no sense.
    """
    parser = argparse.ArgumentParser("python -m lightning_bucketddp", description=DESCRIPTION, epilog=NO_SCRIPTS)
    parser.add_argument("--version", action="version", version=f"lightning_bucketddp  {__version__}")
    checks = parser.add_subparsers(dest="command").add_parser(
        "check", help=check.DESCRIPTION, description=check.DESCRIPTION
    )
    checks.add_argument(
        "--output", metavar="FILE", help="write what was found as JSON, to keep or to attach to a report"
    )
    checks.add_argument(
        "--all",
        action="store_true",
        help="a matrix of 64 cases instead: precisions, ways to reduce, to accumulate and to clear gradients; a tiny "
        "model, no times, within ten minutes",
    )
    checks.add_argument("--quick", action="store_true", help="a tiny model, a few steps, no times")
    options = parser.parse_args(arguments)
    if options.command == "check":
        return check.main(options.quick, options.output, everything=options.all)
    print(describe())
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
    }
    if any(map(check.version_of, ("lightning", "pytorch-lightning"))):
        lines["Trainer(strategy=...)"] = _grouped([*REGISTERED, *DP_NAMES])
        lines["Fabric(strategy=...)"] = _grouped(REGISTERED)
    return "\n".join(
        textwrap.fill(f"{name:21}  {text}", 100, subsequent_indent=" " * 23) for name, text in lines.items()
    )


def _grouped(names: Iterable[str]) -> str:
    """The names, without those for ``find_unused_parameters``, of which a clause tells."""
    shown = [name for name in names if "_find_unused_parameters_" not in name]
    return ", ".join(shown) + "; names with bucketddp may end in _find_unused_parameters_true or _false"
