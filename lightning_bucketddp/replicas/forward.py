"""A forward on several devices of one process: what torch DDP's ``device_ids`` with several entries once meant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_bucketddp.layout.require import require
from lightning_bucketddp.replicas.module_copies import require_no_collectives
from lightning_bucketddp.replicas.nested import tensors_in
from lightning_bucketddp.replicas.replicas import Replicas, gather, parallel_apply, scatter
from lightning_bucketddp.replicas.scatter_gather import Device, accelerators, as_device


class ReplicatedForward:
    """Runs a module on parts of a batch, one per device, and puts the outputs together.

    Devices run at the same time, replicas of one device one after the other, those of the first in the caller's thread.

    The gradients of the replicas come to the module's own parameters in the same backward, as those of one parameter
    that was used several times.

    Args:
        module: The module.
        devices: Where it runs. It is on the first of them.
        output_device: Where the outputs are put together.
        dim: The dimension along which arguments are divided and outputs joined.
        share: Whether replicas on the module's own device share its parameters.

    Attributes:
        parts: How many replicas the last forward took.
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
        self.parts = 0
        self._replicas: Replicas | None = self._made()  # which refuses what it cannot replicate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward."""
        divisible = any(tensor.dim() for tensor in tensors_in((args, kwargs)))
        parts = scatter((args, kwargs), self.devices if divisible else self.devices[:1], self.dim)
        self.parts = len(parts)
        modules: list[nn.Module] = [self._module]  # what forward sets on it stays, as with one device
        if len(parts) > 1:
            self._replicas = self._replicas or self._made()
            modules += self._replicas.refresh(len(parts))[1:]
        devices = self.devices[: len(parts)]
        arguments, kwarguments = [args for args, _ in parts], [kwargs for _, kwargs in parts]
        outputs = parallel_apply(modules, arguments, kwarguments, devices, thread_per_device=True)
        return gather(outputs, self.output_device, self.dim)

    def _made(self) -> Replicas:
        return Replicas(self._module, self.devices, share=self._share)

    def forget(self) -> None:
        """Frees the replicas, which are made anew if they are needed again."""
        self._replicas = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replicas": None}


def replicated_forward(
    module: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | None, dim: int
) -> ReplicatedForward | None:
    """What runs a module on several devices.

    Args:
        module: The module.
        device_ids: The devices. One that is named several times has several replicas.
        output_device: The first of the devices if None.
        dim: The dimension along which batches are divided.

    Returns:
        None if fewer than two devices are named.

    Raises:
        TypeError: If something is no device, or no dimension.
        ValueError: If a device is not there, or the module cannot be run on several.
    """
    if device_ids is None or len(device_ids) < 2:
        return None
    devices = [_device("device_ids", it) for it in device_ids]
    output = devices[0] if output_device is None else _device("output_device", output_device)
    require("dim", dim, "the number of a dimension", int)
    _require_replicable(module, devices[0])
    return ReplicatedForward(module, devices, output, dim)


def warn_of_replicas(count: int, stacklevel: int = 1) -> None:
    """Says once what several devices in one process cost.

    Args:
        count: How many there are.
        stacklevel: As for ``warnings.warn``, of the caller.
    """
    warnings.warn(
        f"device_ids has {count} entries: {count} replicas run in threads of this process, which take turns in Python, "
        "and every forward divides its batch between them and joins what they return. That serves in debuggers, "
        "notebooks and wherever no processes can be started; elsewhere one process per device is faster "
        "(device_ids=[device] in each, as torchrun or a Trainer starts them)",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def _device(argument: str, name: Device) -> torch.device:
    """The device that somebody has named; an accelerator always with its index.

    Raises:
        TypeError: If it is no name of a device.
        ValueError: If there is no such device, or it does not compute.
    """
    if isinstance(name, bool) or not isinstance(name, int | str | torch.device):
        raise TypeError(f"expected {argument} to name devices, found {name!r}")
    try:
        device = as_device(name)
    except (RuntimeError, AssertionError, ValueError) as error:  # the second if torch was built without such devices
        raise ValueError(f"expected {argument} to name devices, found {name!r}: {error}") from None
    here = accelerators()
    if device.type != "cpu" and device not in here:
        raise ValueError(
            f'expected {argument} to name "cpu" or accelerators, of which there are {len(here)}, found {name!r}'
        )
    return device


def _require_replicable(module: nn.Module, home: torch.device) -> None:
    params = [("parameter", name, tensor) for name, tensor in module.named_parameters()]
    buffers = [("module buffer", name, tensor) for name, tensor in module.named_buffers()]
    for kind, name, tensor in (*params, *buffers):
        if tensor.device != home:
            raise ValueError(
                f"expected the whole module on {home}, the first of device_ids, found {kind} {name!r} on "
                f"{tensor.device}; a module that is on several devices itself cannot be replicated"
            )
    require_no_collectives(module)
