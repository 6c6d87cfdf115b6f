"""Forward on several devices of one process, for ``BucketDDP(device_ids=[0, 1])``; torch DDP had it in 2020."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_bucketddp.layout.require import require
from lightning_bucketddp.replicas.module_copies import require_copyable, require_no_collectives
from lightning_bucketddp.replicas.nested import tensors_in
from lightning_bucketddp.replicas.replicas import Replicas, gather, parallel_apply, scatter
from lightning_bucketddp.replicas.scatter_gather import Device, as_device


class ReplicatedForward:
    """Run a module on the parts of a batch, one per device, and join the outputs.

    Devices run at the same time, replicas of one device one after another, the first device's in the caller's thread.
    The first replica is the module itself. Backward brings the gradients of all replicas to the module's parameters.

    Args:
        module: The module. It is on the first device.
        devices: Where it runs.
        output_device: Where the outputs are joined.
        dim: The dimension along which arguments are split and outputs are joined.
        share: Whether replicas on the module's own device share its parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        output_device: torch.device,
        dim: int,
        share: bool = True,
    ) -> None:
        self._module, self._share = module, share
        self.devices, self.output_device, self.dim = tuple(devices), output_device, dim
        self._replicas: Replicas | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on all parts of the arguments; as they are if no tensor can be split."""
        divisible = any(tensor.dim() for tensor in tensors_in((args, kwargs)))
        parts = scatter((args, kwargs), self.devices if divisible else self.devices[:1], self.dim)
        modules = [self._module]  # itself, so that attributes set by forward stay, as with one device
        if len(parts) > 1:
            self._replicas = self._replicas or Replicas(self._module, self.devices, self._share)
            modules += self._replicas.refresh(len(parts))[1:]
        devices = self.devices[: len(parts)]
        arguments, keywords = zip(*parts, strict=True)
        outputs = parallel_apply(modules, arguments, keywords, devices, thread_per_device=True)
        return gather(outputs, self.output_device, self.dim)

    def forget(self) -> None:
        """Free the replicas. The next forward makes them anew."""
        self._replicas = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replicas": None}


def replicated_forward(
    module: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | None, dim: int
) -> ReplicatedForward | None:
    """Make the forward that runs a module on several devices, and warn of its cost in the name of the caller's caller.

    Args:
        module: The module.
        device_ids: The devices. A device that is named several times has several replicas.
        output_device: By default the first of the devices.
        dim: The dimension along which batches are split.

    Returns:
        None if fewer than two devices are named.

    Raises:
        TypeError: If something is not a device, or not a dimension.
        ValueError: If there is no such device, or the module cannot run on several.
    """
    if device_ids is None or len(device_ids) < 2:
        return None
    devices = [as_device(device, "device_ids") for device in device_ids]
    output = devices[0] if output_device is None else as_device(output_device, "output_device")
    require("dim", dim, "the number of a dimension", int)
    require_copyable(module)
    require_no_collectives(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != devices[0]:
            raise ValueError(
                f"expected the whole module on {devices[0]}, the first of device_ids, found {name!r} on "
                f"{tensor.device}; a module that is itself on several devices cannot be replicated"
            )
    warnings.warn(
        f"device_ids has {len(devices)} entries: as many replicas run in threads of this process and take turns in "
        "Python. Use this in debuggers, in notebooks and where no processes can be started; elsewhere one process per "
        "device is faster (device_ids=[device] in each, as torchrun or a Trainer starts them)",
        UserWarning,
        stacklevel=3,
    )
    return ReplicatedForward(module, devices, output, dim)
