"""Broadcasts of many tensors at once, as bytes."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bucketddp.comm import broadcast
from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from tests.pool import on_ranks


def tensors_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(6, generator=generator)
    return [
        values > 0,
        values.to(torch.bfloat16),
        torch.tensor(rank),
        torch.empty(0),
        values.double().view(2, 3).t(),
        values[::2],
        torch.complex(values, -values),
        values.view(1, 2, 3, 1).contiguous(memory_format=torch.channels_last),
        (values * 100).to(torch.int8)[:5],
    ]


@pytest.mark.parametrize(("chunk_bytes", "broadcasts"), [(1 << 20, 1), (40, 5)])
@on_ranks(2)
def test_tensors_of_all_dtypes_travel_together(chunk_bytes: int, broadcasts: int) -> None:
    tensors, expected = tensors_of(dist.get_rank()), tensors_of(1)
    with (
        patch.object(broadcast, "_CHUNK_BYTES", chunk_bytes),
        patch.object(Collectives, "broadcast", autospec=True, side_effect=Collectives.broadcast) as sent,
    ):
        broadcast_tensors(tensors, Collectives(None), source=1)
    assert sent.call_count == broadcasts
    for mine, theirs in zip(tensors, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
