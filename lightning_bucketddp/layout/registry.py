"""The strategies' names in the registries of Lightning's packages.

``import lightning_bucketddp`` imports no Lightning: a program may use one of its two packages, or plain PyTorch. Names
are registered in each package when the program imports it, or at once if it has done so.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import product
from types import ModuleType
from typing import Any

FOLDERS = {"lightning": "lightning_bucketddp.trainer", "pytorch_lightning": "lightning_bucketddp.pytorch_lightning"}
"""By the name of a package of Lightning's: what this package has for it."""

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_SHARDED = {"bucketddp": {}, "bucketddp_sharded": {"shard_optimizer": True}}
_UNUSED = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}
REGISTERED: dict[str, dict[str, Any]] = {
    name + start + unused: {"start_method": _START_METHODS[start], **_SHARDED[name], **_UNUSED[unused]}
    for name, unused, start in product(_SHARDED, _UNUSED, _START_METHODS)
}
"""Names for Trainer and Fabric, and the arguments that each stands for. They are those of ``ddp``, and sharded ones."""

DP_NAMES: dict[str, dict[str, Any]] = {"bucketdp": {}}
"""The Trainer's name for the strategy with several devices in one process."""

_Entry = tuple[str, str, dict[str, dict[str, Any]]]
_TRAINER: list[_Entry] = [("StrategyRegistry", "BucketDDPStrategy", REGISTERED)]
_TRAINER += [("StrategyRegistry", "BucketDPStrategy", DP_NAMES)]
_FABRIC: list[_Entry] = [("STRATEGY_REGISTRY", "BucketDDPFabricStrategy", REGISTERED)]
_MODULES = {
    "lightning.pytorch.strategies": _TRAINER,
    "lightning.fabric.strategies": _FABRIC,
    "pytorch_lightning.strategies": _TRAINER,
    "lightning_fabric.strategies": _FABRIC,
    "lightning.pytorch.cli": [],
    "pytorch_lightning.cli": [],
}
"""By the name of a module with a registry: the registry's name in it, a class, and the names under which it goes.

A LightningCLI has no registry. It knows classes that have been imported by their short names.
"""


def register_everywhere() -> None:
    """Register all names in each of Lightning's packages: now, or once it is imported."""
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None:
            _register(module)
        else:
            sys.meta_path.insert(0, _OnceImported(name))


def _register(module: ModuleType) -> None:
    package = "lightning" if module.__name__.startswith("lightning.") else "pytorch_lightning"
    for registry_name, kind, names in _MODULES[module.__name__]:
        registry, make = getattr(module, registry_name), _maker(FOLDERS[package], kind)
        for name, given in names.items():
            if name not in registry:  # a reload registers them again
                registry.register(name, make, description=f"{kind} with {given}", **given)
    if module.__name__.endswith(".cli"):
        import_module(f"{FOLDERS[package]}.public")


def _maker(folder: str, kind: str) -> Callable[..., Any]:
    """A function that makes a strategy. It imports the class when called: Lightning is complete then."""

    def make(**arguments: Any) -> Any:
        return getattr(import_module(f"{folder}.public"), kind)(**arguments)

    make.__name__ = kind
    return make


class _OnceImported(MetaPathFinder):
    """Registers the names in a module as soon as it has been imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
