"""Copies of a module inside one process, and ``data_parallel``, which splits a batch over them.

PyTorch's C++ ``torch::nn::parallel`` is the model: replicas have gradient edges to the original, and backward sums
their gradients into it. Here the replicas' module objects are kept between steps and only filled anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.replicas.apply import parallel_apply
from lightning_bucketddp.replicas.module_copies import fill, require_copyable
from lightning_bucketddp.replicas.nested import move_to
from lightning_bucketddp.replicas.scatter_gather import Device, accelerators, as_device, as_devices, gather, scatter

__all__ = ["Replicas", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"]

_HELD = "_bucketddp_replicas"
"""The attribute in which a module keeps its replicas between calls of :func:`data_parallel`."""

_FIRST = 2**63 - 1
"""Sequence number of the nodes that bring gradients to the original.

Of the nodes that are ready, the engine runs the one with the largest number, by default the youngest. Copies are older
than all of forward, so their gradients would come last of all. The setter of the number is private to torch. Without it
gradients are the same, but come late.
"""


class Replicas:
    """A module's replicas on some devices, kept between steps.

    A replica on the original's device has the very same parameters (``share=True``). It takes no memory, nothing is
    copied, and autograd adds the gradients up. On other devices it has copies with gradient edges to the originals.

    The first replica on a module buffer's device shares it with the original, so that running statistics persist. The
    others have copies. Buffers that require grad are treated as parameters are.

    Each :meth:`refresh` makes new copies of tensors, so a graph whose backward is still to come keeps its own. A
    parameter's gradient reaches the original as soon as backward has it from all copies. Replicas of one device share a
    random number generator: call them one after another, or dropout differs from run to run.

    Args:
        module: The original.
        devices: One per replica. The same device may come several times.
        share: Whether replicas on the original's device share its parameters.

    Attributes:
        module: The original.
        devices: The devices.

    Raises:
        ValueError: If there is no device, or for lazy modules that have seen no batch.
        TypeError: For scripted and compiled modules.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], share: bool = True) -> None:
        require_copyable(module)
        self.module, self.devices, self._share = module, as_devices(devices), share
        self._parts: list[nn.Module] = []
        self._structure: list[tuple[Any, ...]] = []
        self._kept: dict[tuple[bool, bool], list[list[nn.Module]]] = {}

    def refresh(self, count: int | None = None) -> list[nn.Module]:
        """Bring the first ``count`` replicas up to date with the original.

        They get its present attributes, mode, values and ``requires_grad``. Attributes that the replicas' last forward
        set are gone. With gradients disabled the copies have no gradient edges.

        Returns:
            The replicas. They are the same objects each time, unless submodules were added, removed or replaced. With
            gradients disabled, and in evaluation, they are other objects.

        Raises:
            ValueError: If ``count`` is not between 1 and the number of devices.
        """
        count = len(self.devices) if count is None else count
        if not 1 <= count <= len(self.devices):
            raise ValueError(f"expected between 1 and {len(self.devices)} replicas, found {count}")
        self._look_for_changes()
        # A checkpointed layer runs again in backward, in the module that ran it before. An evaluation in between must
        # not change that module, so each kind of forward has its own.
        kind = torch.is_grad_enabled(), self.module.training
        if kind not in self._kept:
            self._kept[kind] = [[object.__new__(type(part)) for part in self._parts] for _ in self.devices]
        replicas = self._kept[kind][:count]
        for modules in replicas:
            for module in modules:
                vars(module).clear()  # frees the last copies before new ones are made
        tensors = [tensor for part in self._parts for tensor in (*part._parameters.values(), *part._buffers.values())]
        unique = {id(tensor): tensor for tensor in tensors if tensor is not None}
        own = [
            {at: _copy_of(tensor, device) for at, tensor in unique.items() if self._copies(tensor, index)}
            for index, device in enumerate(self.devices[:count])
        ]
        fill(replicas, self._parts, own)
        return [modules[0] for modules in replicas]

    def _look_for_changes(self) -> None:
        """Forget the replicas' modules if the original is made of other modules than before."""
        parts = list(self.module.modules())
        structure = [(id(part), type(part), part._compiled_call_impl) for part in parts]
        if structure != self._structure:
            require_copyable(self.module)
            self._parts, self._structure, self._kept = parts, structure, {}

    def _copies(self, tensor: Tensor, index: int) -> bool:
        """Whether a replica has a copy of one of the original's tensors."""
        device = self.devices[index]
        if device != tensor.device:
            return True
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return not self._share
        return index != self.devices.index(device)


def _copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; with a gradient edge, if gradients are enabled and the tensor requires one."""
    copy = tensor.clone() if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")
    node: Any = copy.grad_fn
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(_FIRST)
    return copy


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Make one replica of a module per device. Backward sums their gradients into the module's."""
    return Replicas(module, devices).refresh()


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call ``module`` on a batch that is split over devices: scatter, replicate, apply in parallel, gather.

    Devices run at the same time, replicas of one device one after another, the first device's in the caller's thread.

    Gradients are *summed* into the module's parameters. A loss that is a mean over the gathered output therefore has
    the gradients that it has on one device. The module keeps the replicas for the next call; its copies and pickles do
    not have them. Calls from several threads, and calls inside calls, are fine.

    With one device the module and the inputs are moved there, and the module itself is called.

    Args:
        module: The module, on any device.
        inputs: A tuple of its arguments, or its only argument. None for none.
        devices: The devices. The same device may come several times. By default all accelerators.
        output_device: Where the output goes. By default the first device.
        dim: The dimension of the batch.
        module_kwargs: Keyword arguments. They are scattered too.

    Raises:
        ValueError: If no devices are given and there is no accelerator.
        BaseException: The error of the first replica that raised one, when all have ended.
    """
    targets = as_devices(accelerators() if devices is None else devices)
    output_target = targets[0] if output_device is None else as_device(output_device)
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    kwargs = dict(module_kwargs or {})
    if len(targets) == 1:
        module.to(targets[0])
        args, kwargs = move_to((args, kwargs), targets[0])
        return move_to(module(*args, **kwargs), output_target)
    parts = scatter((args, kwargs), targets, dim) if args or kwargs else [(args, kwargs)]
    with _replicas_of(module, targets) as replicas:
        modules = replicas.refresh(len(parts))
        arguments, keywords = zip(*parts, strict=True)
        outputs = parallel_apply(modules, arguments, keywords, targets[: len(parts)], thread_per_device=True)
        if module.training:
            _bring_buffers_home(module, modules[0], targets)
    return gather(outputs, output_target, dim)


@torch.no_grad()
def _bring_buffers_home(module: nn.Module, replica: nn.Module, devices: Sequence[torch.device]) -> None:
    """Copy the module buffers of a replica to the module's, where these are on none of the devices."""
    first = dict(replica.named_buffers())
    for name, buffer in module.named_buffers():
        if buffer.device not in devices and not buffer.requires_grad and name in first:
            buffer.copy_(first[name])


class _Held(dict[tuple[torch.device, ...], Replicas]):
    """The replicas that a module keeps, by devices. Copies and pickles of the module have None in its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextmanager
def _replicas_of(module: nn.Module, devices: tuple[torch.device, ...]) -> Iterator[Replicas]:
    """Take the replicas that the module keeps, or make some. The module keeps them afterwards."""
    held = vars(module).get(_HELD)
    if held is None:
        held = vars(module)[_HELD] = _Held()
    replicas = held.pop(devices, None)  # one of several calls at the same time gets them
    if replicas is None or replicas.module is not module:
        replicas = Replicas(module, devices)
    try:
        yield replicas
    finally:
        held[devices] = replicas
