"""``python -m lightning_bucketddp check``: it finds nothing wrong here, and each kind of fault that is put in."""

import io
import json
import os
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, __version__, check
from lightning_bucketddp.comm.collectives import Collectives
from tests.pool import RunRanks, on_ranks

CPU = torch.device("cpu")


def run_cases(wrap: Any, *names: str) -> dict[str, check.Result]:
    """The results of some cases, or of all, with another wrapper in the place of this package's."""
    with patch.object(check, "BucketDDP", wrap):
        chosen = [case for case in check.CASES if not names or case.name in names]
        cpu, ranks = torch.device("cpu"), Collectives(None)
        return {case.name: check.run_case(case, check.QUICK, cpu, ranks) for case in chosen}


@on_ranks(2)
def test_all_is_right_here_and_the_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    with redirect_stdout(io.StringIO()) as printed:
        assert check.run_rank(quick=True, output=str(file))
    rows = [line.split() for line in printed.getvalue().splitlines() if line.endswith("right")]
    assert [row[-7:] for row in rows] == [["equal", *"-----", "right"]] * len(check.CASES) * (dist.get_rank() == 0)
    dist.barrier()
    report = json.loads(file.read_text())
    assert report["wrong"] == []
    assert report["environment"]["ranks"] == 2
    assert report["leaves a host"] == {}
    assert report["environment"]["lightning_bucketddp"] == __version__
    assert [found["case"] for found in report["cases"]] == [case.name for case in check.CASES]
    for found, case in zip(report["cases"], check.CASES, strict=True):
        assert found["ranks_differ"] == ""
        assert 0 <= found["gradients"] <= case.within
        assert 0 <= found["weights"] <= max(case.within, 1e-3)
        low = case.dtype is torch.bfloat16 or "wire_dtype" in case.options
        assert (found["gradients"] > 0) == low, "in fp32 two ranks have one order of summation"
        assert found["step_ms"] is found["step_ratio"] is None
        assert found["buckets"] > 2
        assert found["early_launches"] > 0 or case.hook is not None


@on_ranks(2)
def test_steps_are_timed_unless_it_is_to_be_quick() -> None:
    timed = replace(check.QUICK, rounds=2)
    found = check.run_case(check.CASES[0], timed, torch.device("cpu"), Collectives(None))
    theirs, ours = found.step_ms or ()
    assert min(theirs, ours) > 0
    assert check._row(found)[5] == f"{ours:.2f}"
    assert float(check._row(found)[6]) == pytest.approx(found.step_ratio, abs=1e-3)


@on_ranks(2)
def test_it_says_what_leaves_a_host_where_there_are_several(tmp_path: Path) -> None:
    file, rank = tmp_path / "check.json", dist.get_rank()
    names = patch.object(check.platform, "node", lambda: f"host {rank}")
    with names, patch.object(check, "CASES", check.CASES[:1]), redirect_stdout(io.StringIO()) as printed:
        check.run_rank(quick=True, output=str(file))
    assert ("0.50  two levels, `wire_dtype" in printed.getvalue()) == (rank == 0)
    dist.barrier()
    assert json.loads(file.read_text())["leaves a host"]["a ring of all ranks"] == 1.0


class Unaveraged(BucketDDP):
    """Each rank keeps to itself."""

    def __init__(self, module: Any, **options: Any) -> None:
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        super().__init__(module, process_group=self.alone, **options)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        super().register_comm_hook(self.alone, hook)


@on_ranks(2)
def test_gradients_that_are_not_averaged_are_found() -> None:
    found = run_cases(Unaveraged)
    assert len(found) == len(check.CASES)
    for result in found.values():
        assert len(result.wrong) == 3, result
        gradients, weights, ranks = result.wrong
        assert gradients.startswith("expected gradients within")
        assert weights.startswith("expected weights within")
        assert ranks.endswith("first in the gradient of 0.norm.weight in step 1")


@on_ranks(2)
def test_sums_in_place_of_means_are_found() -> None:
    found = run_cases(partial(BucketDDP, gradient_divide_by=1), "plain", "sharded optimizer", "no_sync")
    for result in found.values():
        assert result.gradients > 0.9
        assert [fault.split()[1] for fault in result.wrong] == ["gradients", "weights"]


class Drifting(BucketDDP):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        with torch.no_grad():
            self.module[0].norm.weight.mul_(1 + dist.get_rank() * 2.0**-22)


@on_ranks(2)
def test_the_last_bit_in_which_ranks_differ_is_found() -> None:
    (result,) = run_cases(Drifting, "plain").values()
    assert result.gradients < 1e-4
    assert len(result.wrong) == 1
    assert "to the last bit, found differences, first in the parameter 0.norm.weight" in result.wrong[0]


class Waiting(BucketDDP):
    def forward(self, *args: Any) -> Any:
        warnings.warn("called a synchronizing operation", stacklevel=1)
        return super().forward(*args)


@on_ranks(2)
def test_waits_of_the_host_are_counted() -> None:
    modes: list[str] = []
    with patch.object(torch, "get_device_module", lambda _: SimpleNamespace(set_sync_debug_mode=modes.append)):
        assert run_cases(BucketDDP, "plain")["plain"].host_waits == (0, 0)
        result = run_cases(Waiting, "no_sync")["no_sync"]
    assert modes == ["warn", "default"] * 4
    assert result.host_waits == (0, 3)
    assert "torch DDP's 0, found 3 in the passes of a step" in result.wrong[0]


def test_the_matrix_has_every_combination_and_fits_the_ranks() -> None:
    cases = [*check.matrix(8)]
    assert len(cases) == len({case.name for case in cases}) == 4 * 4 * 2 * 2
    assert {case.options["shard_group_size"] for case in cases if "shard_group_size" in case.options} == {4}
    odd = next(case for case in check.matrix(3) if "groups" in case.name)
    assert odd.options["shard_group_size"] == 1


SOME = {
    *("32, sharded, 4 passes", "bf16-mixed, groups of 1", "16-mixed, bf16 hook, zeros"),
    "bf16-true, plain, 4 passes, zeros",
}
"""Each value occurs."""


def matrix_is_right(file: Path, names: set[str] | None = None, device: torch.device = CPU) -> None:
    given = [case for case in check.matrix(2) if names is None or case.name in names]
    assert len(given) == (64 if names is None else len(names))
    chosen = [case for case in given if check.autocasts(case, device)]
    assert chosen == given or device.type == "sim"
    with redirect_stdout(io.StringIO()) as printed, patch.object(check, "matrix", lambda ranks: given):
        assert check.run_rank(quick=False, output=str(file), everything=True), printed.getvalue()
    dist.barrier()
    report = json.loads(file.read_text())
    assert report["wrong"] == []
    assert [found["case"] for found in report["cases"]] == [case.name for case in chosen]
    if dist.get_rank() == 0:
        lines = [line for line in printed.getvalue().splitlines() if line.endswith("right")]
        assert [line.partition("  ")[0] for line in lines] == [case.name for case in chosen]


@on_ranks(2, timeout=280)
def test_the_matrix_is_right_here(tmp_path: Path) -> None:
    matrix_is_right(tmp_path / "check.json", SOME)


@pytest.mark.slow
@on_ranks(2, timeout=600)
def test_the_whole_matrix_is_right_here(tmp_path: Path) -> None:
    matrix_is_right(tmp_path / "check.json")


@on_ranks(2)
def test_the_default_group_is_bound_to_a_device_where_there_is_an_accelerator() -> None:
    """As Lightning binds it."""
    given: list[Any] = []
    accelerator = torch.device("cuda")
    with (
        patch.object(torch.accelerator, "current_accelerator", lambda check_available: accelerator),
        patch.object(torch.accelerator, "set_device_index", lambda device: None),
        patch.object(dist, "init_process_group", lambda backend, **options: given.append((backend, options))),
        patch.object(dist, "destroy_process_group"),
        patch.object(check, "run_rank", lambda *_: True),
        patch.dict(os.environ, LOCAL_RANK="3"),
    ):
        check._run_started_rank(True, None, False)
    assert [(backend, options["device_id"]) for backend, options in given] == [("nccl", torch.device("cuda:3"))]


def exit_codes() -> list[int]:
    """Of the command, in ranks that it starts itself; then without averaging."""
    codes = [check.main(True, None, start_method="fork")]
    with patch.object(check, "CASES", check.CASES[:1]), patch.object(check, "BucketDDP", Unaveraged):
        return [*codes, check.main(True, None, start_method="fork")]


@pytest.mark.slow
def test_the_exit_code_says_whether_something_is_wrong(run_ranks: RunRanks) -> None:
    assert run_ranks(1, exit_codes, bare=True) == [[0, 1]]


def test_tasks_of_srun_without_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(SystemExit, match=r"found one of 16 tasks of srun.*torchrun"):
        check.main(quick=True, output=None)
