"""Whether the ranks share one machine, and the default buckets that follow from it."""

import os
import socket
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.layout.plan import MIB
from lightning_bucketddp.peers.machines import machine_name
from tests.pool import case, on_ranks

HOST = socket.gethostname()
SHARED, APART = [12], [4, 4, 4]
"""MiB of the default buckets of 12 MiB on one machine and on several."""


@pytest.mark.parametrize(("started_here", "machine"), [(None, HOST), ("4", HOST), ("8", HOST), ("?", HOST), ("2", "")])
def test_a_launcher_of_fewer_ranks_knows_of_other_machines(started_here: str | None, machine: str) -> None:
    assert machine_name(4, {} if started_here is None else {"LOCAL_WORLD_SIZE": started_here}) == machine


@on_ranks(2)
def test_default_buckets_follow_from_all_ranks_sharing_one_machine() -> None:
    """The launcher says it to each rank; else host names do."""
    cases: list[tuple[list[str], str, list[int]]] = [
        (["", ""], "ab", APART),
        (["2", "2"], "aa", SHARED),
        (["1", "1"], "aa", APART),
        (["", "1"], "aa", APART),
    ]
    for started_here, hosts, expected in cases:
        started, host = started_here[dist.get_rank()], hosts[dist.get_rank()]
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
        with patch.dict(os.environ), patch.object(socket, "gethostname", lambda host=host: host):
            os.environ.pop("LOCAL_WORLD_SIZE", None)
            if started:
                os.environ["LOCAL_WORLD_SIZE"] = started
            ours = BucketDDP(module)
            for _ in range(2):
                ours(torch.ones(1, 1024)).sum().backward()
        with case(started_here, hosts):
            assert [ours.layout.bucket_nbytes(bucket) // MIB for bucket in ours.layout.buckets] == expected
        ours.close()
