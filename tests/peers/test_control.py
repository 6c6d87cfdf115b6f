"""The control vector: what its sum says, worked out without a process."""

from typing import cast

import pytest
import torch

from lightning_bucketddp.peers.control import (
    HEADER,
    MAX_RANKS_IN_FP32,
    Control,
    ControlChecks,
    ControlExchange,
    Report,
    write,
)
from lightning_bucketddp.peers.peers import Peers


def summed(reports: list[Report], used: list[set[int]], dtype: torch.dtype) -> torch.Tensor:
    vectors = [torch.empty(HEADER + 3, dtype=dtype) for _ in reports]
    for vector, report, slots in zip(vectors, reports, used, strict=True):
        write(vector, report, slots)
    return torch.stack(vectors).sum(0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_control_vector_tells_what_ranks_reported(dtype: torch.dtype) -> None:
    reports = [Report(7, steps=3, tokens=2**40 + 5), Report(7, steps=3, tokens=4097, failed=True, joined=True)]
    vector = summed(reports, [{0, 1, 2}, {1}], dtype)
    control = Control(vector, 2)
    assert (control.failed_ranks, control.joined_ranks) == (1, 1)
    assert [control.used_somewhere(slot) for slot in range(3)] == [True] * 3
    assert ControlExchange(vector, 2).tokens().item() == 2**40 + 5 + 4097
    assert not Control(summed([Report(7)] * 2, [set(), {1}], dtype), 2).used_somewhere(0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize(("failed", "to_end"), [(0, 1), (1, 0), (1, 4095), (4095, 1), (4096, 0), (0, 4096)])
def test_ranks_that_fail_and_ranks_that_are_to_end_are_counted_apart(
    dtype: torch.dtype, failed: int, to_end: int
) -> None:
    others = MAX_RANKS_IN_FP32 - failed - to_end
    reports = [Report(7, to_end=True)] * to_end + [Report(7, failed=True, to_end=True)] * failed + [Report(7)] * others
    control = Control(summed(reports, [set()] * len(reports), dtype), len(reports))
    assert (control.failed_ranks, control.ranks_to_end) == (failed, to_end)


@pytest.mark.parametrize(("on_cpu", "expected"), [(True, [False, True, True]), (False, [False, False, True])])
def test_ranks_learn_of_the_end_after_a_fixed_number_of_passes(on_cpu: bool, expected: list[bool]) -> None:
    checks = ControlChecks(cast(Peers, None), on_cpu)
    found = [checks.to_end()]
    for to_end in (False, True, True):
        vector = summed([Report(7, to_end=to_end), Report(7)], [set()] * 2, torch.int64)
        checks.last.append(ControlExchange(vector, 2))
        found.append(checks.to_end())
    assert found == [False, *expected]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Report(7, 3, 5), (True, True, True)),
        (Report(8, 3, 5), (False, True, True)),
        (Report(7, 4, 5), (True, False, True)),
        (Report(7, 3, 6), (True, True, False)),
        (Report(7 + 2**23, 3 + 2**12, 5 + 2**18), (False, False, False)),
    ],
)
def test_one_rank_that_differs_is_noticed_among_many(other: Report, expected: tuple[bool, bool, bool]) -> None:
    reports = [Report(7, 3, 5)] * (MAX_RANKS_IN_FP32 - 1) + [other]
    control = Control(summed(reports, [set()] * len(reports), torch.float32), len(reports))
    assert (control.agreed, control.in_step, control.same_forwards) == expected
