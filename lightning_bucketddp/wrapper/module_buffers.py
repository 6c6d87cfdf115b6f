"""Module buffers made the same on all ranks, outside of backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.broadcast import broadcast_tensors, chunks, stage, write_back
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import ModuleBufferSync


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
            for chunk in chunks([t for t in tensors if t.is_floating_point()]):
                staging = stage(chunk)
                if self._collectives.rank not in active:
                    staging.zero_()
                self._collectives.all_reduce_mean(staging).wait(on_idle)
                if len(active) < world_size:
                    staging.mul_(world_size / len(active))
                write_back(staging, chunk, hidden=True)
            tensors = [t for t in tensors if not t.is_floating_point()]
        broadcast_tensors(tensors, self._collectives, on_idle, source, hidden=True)
