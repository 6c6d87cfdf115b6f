"""The control vector: what its sum says, worked out without a process."""

from unittest.mock import Mock

import pytest
import torch

from lightning_bucketddp.peers.control import HEADER, Control, ControlChannel, ControlExchange, Report, write
from lightning_bucketddp.peers.control import MAX_RANKS_IN_FP32 as MOST
from lightning_bucketddp.peers.end_signals import end_signals

both_dtypes = pytest.mark.parametrize("dtype", [torch.int64, torch.float32])


def summed(reports: list[Report], dtype: torch.dtype, used: list[set[int]] | None = None) -> torch.Tensor:
    vectors = torch.empty(len(reports), HEADER + 3, dtype=dtype)
    for vector, report, slots in zip(vectors, reports, used or [set()] * len(reports), strict=True):
        write(vector, report, slots)
    return vectors.sum(0, dtype=dtype)


@both_dtypes
def test_a_control_vector_tells_what_ranks_reported(dtype: torch.dtype) -> None:
    reports = [Report(7, steps=3, tokens=2**40 + 5), Report(7, steps=3, tokens=4097, joined=True, to_end=True)]
    vector = summed(reports, dtype, [{0, 1}, {1}])
    control = Control(vector, 2)
    assert (control.ranks_to_end, control.joined_ranks) == (1, 1)
    assert [control.used_somewhere(slot) for slot in range(3)] == [True, True, False]
    assert ControlExchange(vector, 2).tokens().item() == 2**40 + 5 + 4097


@both_dtypes
def test_joined_ranks_and_ranks_that_ask_to_drop_the_pass_are_counted_apart(dtype: torch.dtype) -> None:
    for joined, drop in [(0, 1), (1, 0), (1, 4095), (4095, 1), (4096, 0), (0, 4096)]:
        reports = [Report(7, drop=True)] * drop + [Report(7, joined=True, drop=True)] * joined
        control = Control(summed(reports + [Report(7)] * (MOST - joined - drop), dtype), MOST)
        assert (control.joined_ranks, control.dropping_ranks) == (joined, drop)


@pytest.mark.parametrize(("device", "expected"), [("cpu", [False, True, True]), ("cuda", [False, False, True])])
def test_ranks_learn_of_the_end_after_a_fixed_number_of_passes(device: str, expected: list[bool]) -> None:
    channel = ControlChannel(Mock(), torch.device(device))
    found = [channel.to_end(no_pass_follows=False)]
    for to_end in (False, True, True):
        channel.last.append(ControlExchange(summed([Report(7, to_end=to_end), Report(7)], torch.int64), 2))
        found.append(channel.to_end(no_pass_follows=False))
    end_signals.release()
    assert found == [False, *expected]


def test_one_rank_that_differs_is_noticed_among_many() -> None:
    for other, expected in [
        (Report(7, 3, 5), (True, True, True)),
        (Report(8, 3, 5), (False, True, True)),
        (Report(7, 4, 5), (True, False, True)),
        (Report(7, 3, 6), (True, True, False)),
        (Report(7 + 2**23, 3 + 2**12, 5 + 2**18), (False, False, False)),
    ]:
        control = Control(summed([Report(7, 3, 5)] * (MOST - 1) + [other], torch.float32), MOST)
        assert (control.agreed, control.in_step, control.same_forwards) == expected
