"""Copies of a module inside one process, and a forward that splits a batch over them.

PyTorch's C++ ``torch::nn::parallel`` is the model: replicas have gradient edges to the original, into which their
gradients are summed. Here replicas are kept between steps and only filled anew.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.replicas.apply import parallel_apply
from lightning_bucketddp.replicas.flat_copies import BEFORE_ALL_OTHERS, FlatCopies
from lightning_bucketddp.replicas.module_copies import HELD, ModuleCopy, ModuleTree, require_copyable
from lightning_bucketddp.replicas.nested import move_to
from lightning_bucketddp.replicas.scatter_gather import Device, accelerators, as_device, as_devices, gather, scatter

__all__ = ["Replicas", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"]


class Replicas:
    """A module's replicas on some devices, kept between steps.

    A replica on a device where the original's parameters are (``share=True``) holds the very same Parameter objects:
    it takes no memory, nothing is copied, and the autograd engine adds the gradients up. On other devices it holds
    copies with gradient edges to the originals.

    The first replica on the device of a module buffer shares it with the original, so that running statistics persist;
    the others have copies, fresh at each :meth:`refresh`. Where no replica is on that device, what forward does to
    buffers is lost. Buffers that require grad are treated as parameters are.

    Memory of copies is used again at the next :meth:`refresh`, unless a graph whose backward is still to come, or
    somebody else, holds on to it. Replicas of one device draw random numbers from one generator: call them one after
    the other, or dropout differs from run to run, and a checkpointed layer drops others when it runs again in backward.

    Args:
        module: The original.
        devices: One per replica; the same one may come several times.
        together: Whether values and gradients move in one piece per dtype, gradients when backward has reached all of
            them. Otherwise each gradient comes home as soon as it is there, while backward goes on.
        share: Whether replicas on the original's device share its parameters.

    Attributes:
        module: The original.
        devices: The devices.

    Raises:
        ValueError: If there is no device, or for lazy modules that have seen no batch.
        TypeError: For scripted and compiled modules.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], together: bool = True, share: bool = True) -> None:
        self.module, self.devices = module, as_devices(devices)
        self._together, self._share = together, share
        self._plan()

    def _plan(self) -> None:
        """Looks at the module's structure, and decides which tensors each replica shares or has copies of."""
        require_copyable(self.module)
        tree = self._tree = ModuleTree(self.module)
        self._buffers = [position for position, is_param in enumerate(tree.is_param) if not is_param]
        pieces: dict[tuple[Any, ...], list[int]] = {}
        singles: list[int] = []
        for position, tensor in enumerate(tree.tensors):
            if self._together and _moves_in_pieces(tensor):
                key = (tensor.device, tensor.dtype, self._trains(position))
                pieces.setdefault(key, []).append(position)
            else:
                singles.append(position)
        self._pieces: list[tuple[list[int], list[int], FlatCopies]] = []
        for positions in pieces.values():
            if copied := self._copied(positions[0]):
                tensors = [tree.tensors[position] for position in positions]
                names = [tree.names[position] for position in positions]
                copies = FlatCopies(tensors, names, [self.devices[index] for index in copied])
                self._pieces.append((positions, copied, copies))
        self._singles = [(position, copied) for position in singles if (copied := self._copied(position))]
        self._sets: dict[tuple[bool, bool], list[ModuleCopy]] = {}
        self._kinds = self._present_kinds()

    def _modules_for_now(self) -> list[ModuleCopy]:
        """The replicas' modules. Others without gradients than with them, and in evaluation than in training.

        A layer that is checkpointed runs once more in backward, in the module that ran it before, which must still be
        as it was if another forward of that kind came in between.
        """
        kind = torch.is_grad_enabled(), self.module.training
        if kind not in self._sets:
            self._sets[kind] = [ModuleCopy(self._tree) for _ in self.devices]
        return self._sets[kind]

    def _trains(self, position: int) -> bool:
        return self._tree.is_param[position] or self._tree.tensors[position].requires_grad

    def _copied(self, position: int) -> list[int]:
        """The replicas that have a tensor of their own in the place of one of the original's."""
        home = self._tree.tensors[position].device
        if self._trains(position):
            return [index for index, device in enumerate(self.devices) if device != home or not self._share]
        first = self.devices.index(home) if home in self.devices else None
        return [index for index in range(len(self.devices)) if index != first]

    def _present_kinds(self) -> list[Any]:
        """What the plan depends on besides the structure."""
        tensors = self._tree.tensors
        strides = [tensors[position].stride() for positions, _, _ in self._pieces for position in positions]
        return [*map(_kind, tensors), *strides, *(tensors[position].requires_grad for position in self._buffers)]

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
        if not self._tree.still_holds() or self._present_kinds() != self._kinds:
            self._plan()
        copies = self._modules_for_now()[:count]
        for copy in copies:  # lets go of the last values, so that their memory can serve again
            copy.renew()
        aliases = self._tree.aliases()
        for copy, tensors in zip(copies, self._written(count), strict=True):
            copy.hold(tensors, aliases)
        return [copy.root for copy in copies]

    def _written(self, count: int) -> list[dict[int, Tensor]]:
        """New copies of the original's present tensors for the first replicas, by position."""
        originals = self._tree.tensors
        held: list[dict[int, Tensor]] = [{} for _ in range(count)]
        for positions, copied, flat_copies in self._pieces:
            present = [index for index in copied if index < count]
            if not present:
                continue
            sources = [originals[position] for position in positions]
            written = flat_copies.write(sources, len(present))
            if torch.is_grad_enabled():
                flat_copies.with_edges(sources, written)
            for index, tensors in zip(present, written, strict=True):
                held[index].update(zip(positions, tensors, strict=True))
        for position, copied in self._singles:
            for index in copied:
                if index < count:
                    copy = _copied_alone(originals[position], self.devices[index], self._trains(position))
                    held[index][position] = copy
        return held


_kind = operator.attrgetter("dtype", "device", "shape")


def _moves_in_pieces(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory, which subclasses, sparse and quantized tensors are not."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _copied_alone(tensor: Tensor, device: torch.device, trains: bool) -> Tensor:
    """A copy on a device; with a gradient edge, if gradients are enabled, where it is one to train."""
    source = tensor if trains else tensor.detach()
    copy = source.clone() if source.device == device else source.to(device, non_blocking=device.type != "cpu")
    node: Any = copy.grad_fn
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(BEFORE_ALL_OTHERS)
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
