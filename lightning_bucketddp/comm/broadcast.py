"""Broadcast many tensors at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives

_CHUNK_BYTES = 32 * 1024 * 1024


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[Tensor],
    collectives: Collectives,
    source: int = 0,
    hidden: bool = False,
) -> None:
    """Give every rank one rank's values of ``tensors``, in place.

    The values travel as bytes in staging tensors per device, one at a time. Each has at most 32 MiB, or one tensor.

    Args:
        tensors: Tensors of any strided layout, dtype and device; the same on every rank.
        collectives: The group.
        source: The rank, in the group, that has the values.
        hidden: Whether to write past autograd's version counters. A graph that saved one of the tensors stays valid
            then, but the counter does not show the change.
    """
    is_source = collectives.rank == source
    for chunk in chunks(tensors):
        nbytes = sum(tensor.nbytes for tensor in chunk)
        staging = stage(chunk) if is_source else chunk[0].new_empty(nbytes, dtype=torch.uint8)
        collectives.broadcast(staging, source).wait()
        if not (is_source and hidden):  # version counters, by which backward raises, must be alike on all ranks
            write_back(staging, chunk, hidden)


def chunks(tensors: Sequence[Tensor], by_dtype: bool = False) -> Iterator[list[Tensor]]:
    """Group tensors by device, and by dtype if asked, into chunks of at most 32 MiB. A larger tensor stands alone.

    Large elements come first: then each tensor's bytes begin where its dtype may begin.
    """
    by_kind = defaultdict[Hashable, list[Tensor]](list)
    for tensor in sorted(tensors, key=lambda tensor: -tensor.itemsize):
        if tensor.numel():
            by_kind[tensor.device, by_dtype and tensor.dtype].append(tensor)
    for kind in by_kind.values():
        chunk: list[Tensor] = []
        nbytes = 0
        for tensor in kind:
            if chunk and nbytes + tensor.nbytes > _CHUNK_BYTES:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(tensor)
            nbytes += tensor.nbytes
        yield chunk


def stage(chunk: list[Tensor]) -> Tensor:
    """Copy all values of a chunk into one flat tensor of bytes."""
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in chunk]  # bytes of such views mean other values
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in plain])


def write_back(staging: Tensor, chunk: list[Tensor], hidden: bool) -> None:
    """Copy the bytes of a staging tensor back into the chunk, past autograd's version counters if ``hidden``."""
    # `.data` shares memory but not the version counter: an in-place write through it does not make autograd
    # reject a backward that saved the tensor.
    targets = [tensor.data if hidden else tensor.detach() for tensor in chunk]
    parts = staging.split([tensor.nbytes for tensor in chunk])
    values = [part.view(t.dtype).view(t.shape) for part, t in zip(parts, targets, strict=True)]
    if any(target.is_conj() or target.is_neg() for target in targets):  # torch has no call for many of these
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    else:
        torch._foreach_copy_(targets, values)
