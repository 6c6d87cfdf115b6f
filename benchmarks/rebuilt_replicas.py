"""Replicas that are made anew in each step, as torch.nn.DataParallel makes them.

This is a plain version for any device; torch's own does not support the CPU. Each step broadcasts the parameters,
tensor by tensor or in flattened chunks. It makes every module object again, with parameters as plain attributes that
are not leaves. Then it adds the gradients, again tensor by tensor or in chunks. The first replica shares the original's
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_BYTES = 10 * 1024 * 1024
"""Size of a chunk; torch's value."""


class RebuiltReplicas:
    """The part of ``lightning_bucketddp.replicas.Replicas`` that the benchmark compares.

    Args:
        module: The original.
        devices: One per replica, the first being the original's.
        coalesced: Whether tensors are moved in chunks.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], coalesced: bool) -> None:
        self.module = module
        self.devices = devices
        self.coalesced = coalesced

    def refresh(self, count: int | None = None) -> list[nn.Module]:
        """New replicas on the first ``count`` devices."""
        devices = self.devices[:count]
        params, buffers = list(self.module.parameters()), list(self.module.buffers())
        outputs = _Broadcast.apply(devices, self.coalesced, *params)
        copies = {id(param): outputs[index :: len(params)] for index, param in enumerate(params)}
        with torch.no_grad():
            moved = _broadcast(buffers, devices, self.coalesced)
        copies |= {id(buffer): [of_device[index] for of_device in moved] for index, buffer in enumerate(buffers)}
        return [_rebuilt(self.module, copies, replica) for replica in range(len(devices))]


def _rebuilt(module: nn.Module, copies: dict[int, Any], replica: int) -> nn.Module:
    made: dict[nn.Module, nn.Module] = {}
    for part in module.modules():
        twin = made[part] = object.__new__(type(part))
        twin.__dict__.update(part.__dict__)
        twin.__dict__.update(_parameters={}, _buffers=dict(part._buffers), _modules=dict(part._modules))
    for part, twin in made.items():
        for name, child in part._modules.items():
            setattr(twin, name, None if child is None else made[child])
        for name, param in part._parameters.items():
            setattr(twin, name, None if param is None else copies[id(param)][replica])
        for name, buffer in part._buffers.items():
            setattr(twin, name, None if buffer is None else copies[id(buffer)][replica])
    return made[module]


def _chunks(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group positions of tensors into chunks of one dtype and at most ``CHUNK_BYTES``. A larger one stands alone."""
    open_chunks: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    full: list[list[int]] = []
    for position, tensor in enumerate(tensors):
        dtype = tensor.dtype
        if sizes.get(dtype, 0) + tensor.nbytes > CHUNK_BYTES and dtype in open_chunks:
            full.append(open_chunks.pop(dtype))
            sizes[dtype] = 0
        open_chunks.setdefault(dtype, []).append(position)
        sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    return [*full, *open_chunks.values()]


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _broadcast(tensors: Sequence[Tensor], devices: Sequence[torch.device], coalesced: bool) -> list[list[Tensor]]:
    """By device: the tensors themselves for the first one, copies for the others."""
    result = [[tensor.detach() for tensor in tensors], *([tensor.detach() for tensor in tensors] for _ in devices[1:])]
    if not coalesced:
        for row, device in zip(result[1:], devices[1:], strict=True):
            row[:] = [tensor.to(device, copy=True) for tensor in row]
        return result
    for chunk in _chunks(tensors):
        like = [tensors[position] for position in chunk]
        flat = _flattened(like)
        for row, device in zip(result[1:], devices[1:], strict=True):
            for position, part in zip(chunk, _unflattened(flat.to(device, copy=True), like), strict=True):
                row[position] = part
    return result


def _summed(rows: Sequence[Sequence[Tensor]], home: torch.device, coalesced: bool) -> list[Tensor]:
    """The sums of the replicas' gradients."""
    if not coalesced:
        totals = [grad.to(home, copy=True) for grad in rows[0]]
        for row in rows[1:]:
            for total, grad in zip(totals, row, strict=True):
                total.add_(grad.to(home))
        return totals
    sums: list[Tensor] = list(rows[0])
    for chunk in _chunks(rows[0]):
        like = [rows[0][position] for position in chunk]
        flat = _flattened(like)
        for row in rows[1:]:
            flat.add_(_flattened([row[position] for position in chunk]).to(home))
        for position, part in zip(chunk, _unflattened(flat, like), strict=True):
            sums[position] = part
    return sums


class _Broadcast(torch.autograd.Function):
    """Copies of tensors on several devices, device by device; the sums of their gradients on the first."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], coalesced: bool, *tensors: Tensor) -> Any:
        ctx.home, ctx.coalesced, ctx.count = devices[0], coalesced, len(tensors)
        return tuple(copy for of_device in _broadcast(tensors, devices, coalesced) for copy in of_device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows = [grads[start : start + ctx.count] for start in range(0, len(grads), ctx.count)]
        return None, None, *_summed(rows, ctx.home, ctx.coalesced)
