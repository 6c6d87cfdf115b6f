"""Each scenario's collectives, rank by rank and group by group, against the committed ones.

The order between different groups is not compared. After a change on purpose, write the files anew with
``python -m pytest tests/traces --update-traces`` and say so in the changelog.
"""

import difflib
from pathlib import Path

import pytest
import torch

from tests.pool import RunRanks
from tests.sampling import some_slow
from tests.traces import lightning_scenarios  # noqa: F401  # adds its own to the table
from tests.traces.recorder import Trace, recording
from tests.traces.scenarios import SCENARIOS

GOLDEN = Path(__file__).parent / "golden"
TIMES_WHEN_UPDATING = 3
LIKE_OTHERS = {
    *("divided_by_tokens", "max_abs_grad", "two_replicas_in_each_process", "module_buffers_with_accumulation"),
    *("parameters_that_no_rank_uses", "gradients_by_autograd_grad"),
    *("plain_three_ranks", "sharded_three_ranks", "wire_fp16_three_ranks", "accumulation_from_the_second_step"),
    *("hook_fp16", "divided_by_an_integer", "sparse_mean_with_accumulation", "sharded_in_groups_of_one"),
    *("sharded_accumulation", "sharded_many_buckets", "unfreezing", "gan_with_two_wrappers", "zero_grad_to_zeros"),
    *(
        "compiled",
        "join_by_initial_world_size",
        "trainer_uneven_inputs_by_world_size",
        "trainer_branch_by_rank",
        "fabric_plain",
    ),
}
"""Scenarios whose collectives are those of another one, with another number, dtype or order: slow tests."""


def record(name: str) -> Trace:
    with recording() as recorder:
        torch.manual_seed(0)
        SCENARIOS[name].run()
    return recorder.trace


def as_text(traces: list[Trace]) -> str:
    sections: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, trace in enumerate(traces):
        for group, lines in trace.items():
            sections.setdefault((group, tuple(lines)), []).append(rank)
    ordered = sorted(sections.items(), key=lambda item: (item[0][0] != "world", item[0][0], item[1]))
    texts = [[f"== {group} | issued by {' '.join(map(str, ranks))}", *lines, ""] for (group, lines), ranks in ordered]
    return "\n".join(map("\n".join, texts))


def compare(name: str, expected: str, found: str) -> None:
    if found != expected:
        lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=99)
        pytest.fail("\n".join([f"scenario {name}", *lines]), pytrace=False)


@pytest.mark.parametrize("name", some_slow(SCENARIOS, SCENARIOS.keys() - LIKE_OTHERS))
def test_collectives_are_the_recorded_ones(run_ranks: RunRanks, name: str, request: pytest.FixtureRequest) -> None:
    ranks, fresh = SCENARIOS[name].ranks, SCENARIOS[name].fresh
    path = GOLDEN / f"{name}.txt"
    found = as_text(run_ranks(ranks, record, name, fresh=fresh))
    assert found, "nothing was recorded"
    if request.config.getoption("--update-traces"):
        for _ in range(TIMES_WHEN_UPDATING - 1):
            compare(name, found, as_text(run_ranks(ranks, record, name, fresh=fresh)))
        path.write_text(found)
    compare(name, path.read_text(), found)


def test_every_recorded_trace_has_a_scenario() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(SCENARIOS)
