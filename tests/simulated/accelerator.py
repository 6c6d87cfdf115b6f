"""``accelerator="sim"`` for Lightning's Trainer and Fabric; ``"auto"`` finds it too.

It registers itself when a program imports Lightning, of either of its packages: this file imports none.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_FABRIC = ("lightning.fabric.connector", "lightning_fabric.connector")
_CONNECTOR = "trainer.connectors.accelerator_connector"
_TRAINER = (f"lightning.pytorch.{_CONNECTOR}", f"pytorch_lightning.{_CONNECTOR}")


class _Simulated:
    """The methods of Lightning's ``Accelerator``."""

    def setup(self, trainer: Any) -> None: ...

    def setup_device(self, device: torch.device) -> None:
        if device.type == "sim":  # Lightning takes one device alone for the CPU
            torch.accelerator.set_device_index(device)

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"allocated_bytes": torch.accelerator.memory_allocated(device)}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        if isinstance(devices, str | int):
            count = int(devices)
            return list(range(torch.accelerator.device_count() if count == -1 else count))
        return [int(index) for index in devices]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("sim", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


def _register(connector: ModuleType) -> None:
    """Register it with the module that chooses a Fabric's or a Trainer's accelerator."""
    fabric = connector.__name__ in _FABRIC
    registry = connector.ACCELERATOR_REGISTRY if fabric else connector.AcceleratorRegistry
    accelerator = type("SimulatedAccelerator", (_Simulated, connector.Accelerator), {})
    registry.register("sim", accelerator, description="a simulated accelerator")
    chooser = connector._Connector if fabric else connector._AcceleratorConnector
    chooser._choose_auto_accelerator = staticmethod(_Simulated.name)  # Lightning knows by name what "auto" may be


class _Finder:
    """Registers the accelerator as soon as Lightning's modules have been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in (*_FABRIC, *_TRAINER):
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        loader.exec_module = execute_and_register
        return spec


def register_with_lightning() -> None:
    """Register the accelerator with Lightning, once a program imports it."""
    sys.meta_path.insert(0, _Finder())
