"""Module buffers made the same on all ranks, outside of backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bucketddp.comm.broadcast import broadcast_tensors, chunks, stage, write_back
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.agreement import WrapError
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.wrapper.module_params import ModuleParams


class ModuleBuffers:
    """Synchronises the module buffers of one module, all in one broadcast, or with one all-reduce per dtype.

    Args:
        params: The module's parameters and module buffers.
        ranks: The ranks.
        options: The wrapper's options.

    Attributes:
        due: Whether the next training forward synchronises them.
    """

    def __init__(self, params: ModuleParams, ranks: Ranks, options: Options) -> None:
        self._params, self._ranks, self._collectives = params, ranks, ranks.collectives
        self._mode = options.module_buffers
        self.due = True

    def forward_begins(self, synchronised: bool) -> None:
        """Note a training forward. After a synchronised one the next forward synchronises module buffers again."""
        self.due = synchronised

    def synchronise(self, active: Sequence[int] | None = None) -> None:
        """Make the module buffers the same on all ranks, in place.

        ``"broadcast"`` takes one rank's values. ``"mean"`` averages floating buffers and broadcasts the others.

        Args:
            active: The ranks whose values count; None for all. The last of them is the source of a broadcast, as in
                torch DDP's ``join``; rank 0 is if all count.

        Raises:
            WrapError: If one was replaced by a tensor that cannot be sent.
            PeerFailureError: If that is so on another rank, or it has failed otherwise.
        """
        if self._mode == "off" or self._collectives.world_size == 1:
            return
        try:
            tensors = self._params.buffers_to_write()
        except WrapError as error:
            self._ranks.peers.failed_by(error)
            raise
        if tensors:
            with self._ranks.waiting_for("the module buffers", Phase.EXCHANGE):
                self._send(tensors, active)

    @torch.no_grad()
    def _send(self, tensors: list[Tensor], active: Sequence[int] | None) -> None:
        world_size = self._collectives.world_size
        source = 0 if active is None else active[-1]
        active = range(world_size) if active is None else active
        if self._mode == "mean":
            for chunk in chunks([t for t in tensors if t.is_floating_point()], by_dtype=True):
                staging = stage(chunk).view(chunk[0].dtype)
                if self._collectives.rank not in active:
                    staging.zero_()
                self._collectives.all_reduce_mean(staging).wait()
                if len(active) < world_size:
                    staging.mul_(world_size / len(active))
                write_back(staging.view(torch.uint8), chunk, hidden=True)
            tensors = [t for t in tensors if not t.is_floating_point()]
        broadcast_tensors(tensors, self._collectives, source, hidden=True)
