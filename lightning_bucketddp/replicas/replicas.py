"""Copies of a module inside one process, and a forward that splits a batch over them.

PyTorch's C++ ``torch::nn::parallel`` is the model: replicas have gradient edges to the original, into which their
gradients are summed. Here replicas are kept between steps and only filled anew.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.replicas.apply import parallel_apply
from lightning_bucketddp.replicas.module_copies import HELD, ModuleCopy, ModuleTree, require_copyable
from lightning_bucketddp.replicas.nested import move_to
from lightning_bucketddp.replicas.scatter_gather import Device, accelerators, as_device, as_devices, gather, scatter

__all__ = ["Replicas", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"]

_BEFORE_ALL_OTHERS = 2**63 - 1
"""The engine runs, of the nodes that are ready, the one with the largest number, which otherwise is the youngest. Nodes
that are made before forward would run after all of backward, and no gradient would come home before. Setting the number
is private; without it all is right, and late."""


class Replicas:
    """A module's replicas on some devices, kept between steps.

    A replica on a device where the original's parameters are (``share=True``) holds the very same Parameter objects:
    it takes no memory, nothing is copied, and the autograd engine adds the gradients up. On other devices it holds
    copies with gradient edges to the originals.

    The first replica on the device of a module buffer shares it with the original, so that running statistics persist;
    the others have copies, fresh at each :meth:`refresh`. Where no replica is on that device, what forward does to
    buffers is lost. Buffers that require grad are treated as parameters are.

    Copies are new at each :meth:`refresh`, so that a graph whose backward is still to come keeps its own. Their
    gradients are added up in the original's, each as soon as backward has reached all of them. Replicas of one device
    draw random numbers from one generator: call them one after the other, or dropout differs from run to run, and a
    checkpointed layer drops others when it runs again in backward.

    Args:
        module: The original.
        devices: One per replica; the same one may come several times.
        share: Whether replicas on the original's device share its parameters.

    Attributes:
        module: The original.
        devices: The devices.

    Raises:
        ValueError: If there is no device, or for lazy modules that have seen no batch.
        TypeError: For scripted and compiled modules.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], share: bool = True) -> None:
        self.module, self.devices, self._share = module, as_devices(devices), share
        self._look_up()

    def _look_up(self) -> None:
        """Looks at the module's structure."""
        require_copyable(self.module)
        self._tree = ModuleTree(self.module)
        self._sets: dict[tuple[bool, bool], list[ModuleCopy]] = {}

    def _modules_for_now(self) -> list[ModuleCopy]:
        """The replicas' modules. Others without gradients than with them, and in evaluation than in training.

        A layer that is checkpointed runs once more in backward, in the module that ran it before, which must still be
        as it was if another forward of that kind came in between.
        """
        kind = torch.is_grad_enabled(), self.module.training
        if kind not in self._sets:
            self._sets[kind] = [ModuleCopy(self._tree) for _ in self.devices]
        return self._sets[kind]

    def _copied(self, tensor: Tensor) -> list[int]:
        """The replicas that have a tensor of their own in the place of one of the original's."""
        home = tensor.device
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return [index for index, device in enumerate(self.devices) if device != home or not self._share]
        first = self.devices.index(home) if home in self.devices else None
        return [index for index in range(len(self.devices)) if index != first]

    def refresh(self, count: int | None = None) -> list[nn.Module]:
        """Brings the first ``count`` replicas up to date with the original.

        Attributes, ``train()``/``eval()``, values and ``requires_grad`` are the original's now; what the replicas' last
        forward set on them is gone. With gradients disabled the copies have no gradient edges.

        Returns:
            The replicas; the same objects each time unless the module's structure has changed, but for others without
            gradients, and others in evaluation.

        Raises:
            ValueError: If ``count`` is not between 1 and the number of devices.
        """
        count = len(self.devices) if count is None else count
        if not 1 <= count <= len(self.devices):
            raise ValueError(f"expected between 1 and {len(self.devices)} replicas, found {count}")
        if not self._tree.still_holds():
            self._look_up()
        copies = self._modules_for_now()[:count]
        for copy in copies:  # lets go of the last values, so that their memory is free for the next
            copy.renew()
        aliases = self._tree.aliases()
        for copy, tensors in zip(copies, self._written(count), strict=True):
            copy.hold(tensors, aliases)
        return [copy.root for copy in copies]

    def _written(self, count: int) -> list[dict[int, Tensor]]:
        """New copies of the original's present tensors for the first replicas, by position."""
        held: list[dict[int, Tensor]] = [{} for _ in range(count)]
        for position, original in enumerate(self._tree.tensors):
            for index in self._copied(original):
                if index < count:
                    held[index][position] = _copy_of(original, self.devices[index])
        return held


def _copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; with a gradient edge, if gradients are enabled and the tensor requires one."""
    copy = tensor.clone() if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")
    node: Any = copy.grad_fn
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(_BEFORE_ALL_OTHERS)
    return copy


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Replicas of a module, one per device, whose gradients are summed into the module's; see :class:`Replicas`."""
    return Replicas(module, devices).refresh()


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Calls ``module`` on a batch that is split over devices: scatter, replicate, apply in parallel, gather.

    Devices run at the same time, replicas of one device one after the other, those of the first in the caller's thread.

    Gradients are *summed* into the module's parameters, so a loss that is a mean over the gathered output has the
    gradients that it has on one device. The replicas are kept with the module for the next call, and are dropped with
    it; copies and pickles of the module do not have them. Calls from several threads, or one inside the other, are
    fine: they use replicas of their own.

    With one device the module and the inputs are moved there, and the module is called itself.

    Args:
        module: The module, on any device.
        inputs: A tuple of its arguments, or its only argument. None for none.
        devices: The devices; the same one may come several times. By default all accelerators.
        output_device: Where the output goes. By default the first device.
        dim: The dimension of the batch.
        module_kwargs: Keyword arguments, scattered too.

    Raises:
        RuntimeError: If no devices are given and there is no accelerator.
        BaseException: What the first replica that failed raised, after all have ended.
    """
    if devices is None and not accelerators():
        raise RuntimeError(
            "expected at least one accelerator to be available, as no devices were given, found none; pass devices, "
            "for example devices=['cpu', 'cpu']"
        )
    targets = as_devices(accelerators() if devices is None else devices)
    output_target = targets[0] if output_device is None else as_device(output_device)
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    kwargs = dict(module_kwargs or {})
    if len(targets) == 1:
        module.to(targets[0])
        args, kwargs = move_to((args, kwargs), targets[0])
        return move_to(module(*args, **kwargs), output_target)
    scattered = scatter((args, kwargs), targets, dim) if args or kwargs else [(args, kwargs)]
    count = len(scattered)
    with _replicas_of(module, targets) as replicas:
        modules = replicas.refresh(count)
        args_of, kwargs_of = [args for args, _ in scattered], [kwargs for _, kwargs in scattered]
        outputs = parallel_apply(modules, args_of, kwargs_of, targets[:count], thread_per_device=True)
        if module.training:
            _bring_buffers_home(module, modules[0], targets)
    return gather(outputs, output_target, dim)


@torch.no_grad()
def _bring_buffers_home(module: nn.Module, replica: nn.Module, devices: Sequence[torch.device]) -> None:
    """Copies what a replica has made of module buffers to those that are on none of the devices."""
    first = dict(replica.named_buffers())
    for name, buffer in module.named_buffers():
        if buffer.device not in devices and not buffer.requires_grad and name in first:
            buffer.copy_(first[name])


class _Held:
    """The replicas that a module holds between calls; nothing in the module's copies and pickles."""

    def __init__(self, module: nn.Module, devices: tuple[torch.device, ...]) -> None:
        self.replicas = Replicas(module, devices)
        self.in_use = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextlib.contextmanager
def _replicas_of(module: nn.Module, devices: tuple[torch.device, ...]) -> Iterator[Replicas]:
    held = module.__dict__.get(HELD)
    if held is None or held.replicas.module is not module or held.replicas.devices != devices:
        held = module.__dict__[HELD] = _Held(module, devices)
    if not held.in_use.acquire(blocking=False):
        yield Replicas(module, devices)
        return
    try:
        yield held.replicas
    finally:
        held.in_use.release()
