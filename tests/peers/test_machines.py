"""Whether the ranks share one machine, and the default buckets that follow from it."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.layout.plan import MIB
from lightning_bucketddp.peers.machines import machine_of_all
from tests.grads.support import RunRanks

HOST = socket.gethostname()
SHARED, APART = [12], [4, 4, 4]
"""MiB of the default buckets of 12 MiB on one machine and on several."""


@pytest.mark.parametrize(("started_here", "machine"), [(None, HOST), ("4", HOST), ("8", HOST), ("?", HOST), ("2", "")])
def test_a_launcher_of_fewer_ranks_knows_of_other_machines(started_here: str | None, machine: str) -> None:
    assert machine_of_all(4, {} if started_here is None else {"LOCAL_WORLD_SIZE": started_here}) == machine


def default_buckets(started_here: list[str | None], hosts: list[str]) -> list[int]:
    """The sizes in MiB of the default buckets, after a pass."""
    rank = dist.get_rank()
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if (started := started_here[rank]) is not None:
        os.environ["LOCAL_WORLD_SIZE"] = started
    socket.gethostname = lambda: hosts[rank]
    torch.manual_seed(0)
    ours = BucketDDP(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))))
    for _ in range(2):
        ours(torch.ones(1, 1024)).sum().backward()
    return [ours.layout.bucket_nbytes(bucket) // MIB for bucket in ours.layout.buckets]


@pytest.mark.parametrize(
    ("started_here", "hosts", "expected"),
    [
        ([None, None], ["a", "b"], APART),
        (["2", "2"], ["a", "a"], SHARED),
        (["1", "1"], ["a", "a"], APART),
        ([None, "1"], ["a", "a"], APART),
    ],
)
def test_default_buckets_follow_from_all_ranks_sharing_one_machine(
    run_ranks: RunRanks, started_here: list[str | None], hosts: list[str], expected: list[int]
) -> None:
    assert run_ranks(2, default_buckets, started_here, hosts, fresh=True) == [expected] * 2
