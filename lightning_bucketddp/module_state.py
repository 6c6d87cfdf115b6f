"""Parameters and module buffers made the same on all ranks, outside of backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_bucketddp.collectives import Collectives, Pending

ModuleBufferSync = Literal["broadcast", "mean", "off"]
"""What happens to module buffers: rank 0's for all, the mean of the floating ones, or nothing."""

_CHUNK_BYTES = 32 * 1024 * 1024


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[Tensor],
    collectives: Collectives,
    on_idle: Callable[[], None] | None = None,
    source: int = 0,
    hidden: bool = False,
) -> None:
    """Gives every rank one rank's values of ``tensors``, in place.

    The values travel in staging tensors of at most 32 MiB (or one tensor's size) per dtype and device, two at a time.

    Args:
        tensors: Tensors of any strided layout, dtype and device; the same on every rank.
        collectives: The group.
        on_idle: Called now and then while the host waits; an exception it raises ends the wait.
        source: The rank, in the group, whose values it is.
        hidden: Whether the values are written back past autograd's version counters: a graph that saved one of the
            tensors stays valid then, but nobody can notice the change by the counter.
    """
    has_values = collectives.rank == source
    under_way: deque[tuple[Pending, Tensor, list[Tensor]]] = deque()

    def end_first() -> None:
        pending, staging, chunk = under_way.popleft()
        pending.wait(on_idle)
        if not (has_values and hidden):  # else version counters, by which backward raises, would differ between ranks
            _write_back(staging, chunk, hidden)

    for chunk in _chunks(tensors):
        staging = _stage(chunk) if has_values else _room_for(chunk)
        under_way.append((collectives.broadcast(staging, source), staging, chunk))
        if len(under_way) > 1:
            end_first()
    while under_way:
        end_first()


class ModuleBuffers:
    """The module buffers of one module, synchronised in one collective per dtype.

    Buffers are looked up by owner and name at each synchronisation, so that one which a module replaced by
    another tensor is not missed.

    Args:
        module: The module.
        collectives: The group.
        mode: ``"broadcast"``, ``"mean"`` or ``"off"``.
        ignored: Qualified names of module buffers that are nobody's business but the rank's.
    """

    def __init__(
        self, module: nn.Module, collectives: Collectives, mode: ModuleBufferSync, ignored: Container[str] = ()
    ) -> None:
        self._collectives = collectives
        self._mode = mode
        self._owners: list[tuple[nn.Module, str]] = [
            (owner, name)
            for prefix, owner in module.named_modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if isinstance(buffer, Tensor) and f"{prefix}.{name}".lstrip(".") not in ignored
        ]

    def tensors(self) -> list[Tensor]:
        """The module buffers as they are now, each once."""
        found = {id(t): t for owner, name in self._owners if (t := owner._buffers.get(name)) is not None}
        return list(found.values())

    @torch.no_grad()
    def synchronise(self, on_idle: Callable[[], None] | None = None, active: Sequence[int] | None = None) -> None:
        """Makes the module buffers the same on all ranks, in place, as the mode says.

        With ``"mean"`` floating buffers are averaged; the others (counters) are one rank's.

        Args:
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.
            active: The ranks whose values count, where that may change. The last one's are broadcast then, as torch
                DDP does inside ``join``; rank 0's otherwise.
        """
        if self._mode == "off" or not self._owners or self._collectives.world_size == 1:
            return
        tensors = self.tensors()
        world_size = self._collectives.world_size
        source = 0 if active is None else active[-1]
        active = range(world_size) if active is None else active
        if self._mode == "mean":
            for chunk in _chunks([t for t in tensors if t.is_floating_point()]):
                staging = _stage(chunk)
                if self._collectives.rank not in active:
                    staging.zero_()
                self._collectives.all_reduce_mean(staging).wait(on_idle)
                if len(active) < world_size:
                    staging.mul_(world_size / len(active))
                _write_back(staging, chunk, hidden=True)
            tensors = [t for t in tensors if not t.is_floating_point()]
        broadcast_tensors(tensors, self._collectives, on_idle, source, hidden=True)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors by dtype and device into chunks of at most ``_CHUNK_BYTES``; a larger one stands alone."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in by_kind.values():
        chunk: list[Tensor] = []
        held = 0
        for tensor in kind:
            nbytes = tensor.numel() * tensor.element_size()
            if chunk and held + nbytes > _CHUNK_BYTES:
                yield chunk
                chunk, held = [], 0
            chunk.append(tensor)
            held += nbytes
        yield chunk


def _stage(chunk: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in chunk])


def _room_for(chunk: list[Tensor]) -> Tensor:
    numel = sum(tensor.numel() for tensor in chunk)
    return torch.empty(numel, dtype=chunk[0].dtype, device=chunk[0].device)


def _write_back(staging: Tensor, chunk: list[Tensor], hidden: bool) -> None:
    parts = staging.split([tensor.numel() for tensor in chunk])
    # `.data` shares memory but not the version counter: an in-place write through it does not make autograd
    # reject a backward that saved the tensor.
    targets = [tensor.data if hidden else tensor.detach() for tensor in chunk]
    torch._foreach_copy_(targets, [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])
