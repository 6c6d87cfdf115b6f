"""``accelerator="sim"`` for Lightning's Trainer and Fabric; ``"auto"`` finds it too."""

from typing import Any

import torch
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry


class SimulatedAccelerator(Accelerator):
    """The simulated accelerator, one device per rank."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"allocated_bytes": torch.accelerator.memory_allocated(device)}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        if isinstance(devices, str):
            devices = int(devices)
        count = torch.accelerator.device_count() if devices == -1 else devices
        return list(range(count)) if isinstance(count, int) else [int(index) for index in count]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("sim", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.device("sim") == torch.accelerator.current_accelerator(check_available=True)

    @staticmethod
    def name() -> str:
        return "sim"


def register() -> None:
    """Register it with Lightning's Trainer and Fabric."""
    from lightning.fabric import connector
    from lightning.pytorch.trainer.connectors import accelerator_connector

    for registry in (AcceleratorRegistry, ACCELERATOR_REGISTRY):
        if "sim" not in registry:
            registry.register("sim", SimulatedAccelerator, description="a simulated accelerator")
    # Lightning knows by name what "auto" may be.
    for owner in (connector._Connector, accelerator_connector._AcceleratorConnector):
        owner._choose_auto_accelerator = staticmethod(SimulatedAccelerator.name)
