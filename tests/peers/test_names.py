"""Ranks in words, and where they run."""

import os
import socket
import traceback
from types import TracebackType

import pytest
import torch
from torch import nn

from lightning_bucketddp.peers.names import Process, in_words, this_process
from lightning_bucketddp.peers.stuck import ends_in_wait, shortened

ON_TWO_HOSTS: dict[int, Process] = {rank: (f"node{rank // 4}", 100 + rank) for rank in range(8)}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "no rank"),
        ([9], "rank 9"),
        ([3], "rank 3 (host node0, pid 103)"),
        ([0, 1, 3], "ranks 0 to 1, 3 (host node0, pids 100, 101, 103)"),
        ([3, 4], "rank 3 (host node0, pid 103), rank 4 (host node1, pid 104)"),
        ([7, 9, 10], "rank 7 (host node1, pid 107), ranks 9 to 10"),
    ],
)
def test_ranks_are_named_with_host_and_process_where_these_are_known(ranks: list[int], words: str) -> None:
    assert in_words(ranks, ON_TWO_HOSTS) == words


def test_ranks_of_many_hosts_are_numbers() -> None:
    assert in_words(range(6), {rank: (f"node{rank}", 1) for rank in range(6)}) == "ranks 0 to 5"


def test_this_process_is_the_one_that_asks() -> None:
    assert this_process() == (socket.gethostname(), os.getpid())


def raised_below(module: nn.Module) -> TracebackType:
    with pytest.raises(RuntimeError) as caught:
        module(torch.zeros(2, 7))
    assert caught.value.__traceback__ is not None
    return caught.value.__traceback__


def test_a_short_traceback_ends_with_the_users_call() -> None:
    whole = raised_below(nn.Sequential(nn.Sequential(nn.Linear(8, 4))))
    names = [frame.name for frame in traceback.extract_tb(shortened(whole))]
    assert names == ["raised_below"]
    assert len(traceback.extract_tb(whole)) > 5
    assert not ends_in_wait(whole)
    assert shortened(None) is None
