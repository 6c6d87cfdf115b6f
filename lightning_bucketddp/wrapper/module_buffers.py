"""Module buffers made the same on all ranks, outside of backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.broadcast import broadcast_tensors, chunks, stage, write_back
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.wrapper.module_params import ModuleParams


class ModuleBuffers:
    """The module buffers of one module, synchronised in one collective per dtype.

    Buffers are looked up by owner and name at each synchronisation, so that one which a module replaced by
    another tensor is not missed.

    Args:
        params: The module and its parameters. When others are taken in, the module is looked over again.
        collectives: The group.
        peers: The other ranks.
        options: What was asked for.

    Attributes:
        due: Whether the next training forward synchronises them.
    """

    def __init__(self, params: ModuleParams, collectives: Collectives, peers: Peers, options: Options) -> None:
        self._params, self._collectives, self._peers = params, collectives, peers
        self._mode = options.module_buffers
        self.due = True
        self._look_up()

    def _look_up(self) -> None:
        self._changes = self._params.changes
        self._owners: list[tuple[nn.Module, str]] = [
            (owner, name)
            for prefix, owner in self._params.module.named_modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if isinstance(buffer, Tensor) and f"{prefix}.{name}".lstrip(".") not in self._params.ignored
        ]

    def tensors(self) -> list[Tensor]:
        """The module buffers as they are now, each once."""
        if self._changes != self._params.changes:
            self._look_up()
        found = {id(t): t for owner, name in self._owners if (t := owner._buffers.get(name)) is not None}
        return list(found.values())

    def forward_begins(self, synchronised: bool) -> None:
        """A training forward has synchronised what was due; the next one does so again after a synchronised one."""
        self.due = synchronised

    def synchronise(self, active: Sequence[int] | None = None) -> None:
        """Makes the module buffers the same on all ranks, in place, as the mode says.

        With ``"mean"`` floating buffers are averaged; the others (counters) are one rank's.

        Args:
            active: The ranks whose values count, where that may change. The last one's are broadcast then, as torch
                DDP does inside ``join``; rank 0's otherwise.
        """
        if self._mode == "off" or self._collectives.world_size == 1:
            return
        if tensors := self.tensors():
            self._peers.here.begin_exchange()
            with self._peers.waiting_for("the module buffers", Phase.EXCHANGE):
                self._send(tensors, self._collectives.world_size, active)

    @torch.no_grad()
    def _send(self, tensors: list[Tensor], world_size: int, active: Sequence[int] | None) -> None:
        on_idle = self._peers.poll
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
