"""The benchmarks of host time run, print what they promise, and leave nothing behind."""

import math
import re
from itertools import product

import pytest
import torch

from tests.faults.test_plain_scripts import ROOT, run_processes

RESULTS = ROOT / "benchmarks" / "results"
WRAPPERS = ("ddp as shipped", "ddp, best flags", "bucketddp")


def rows(lines: list[str], beginning: str) -> list[list[str]]:
    """The cells behind the first one, of every row of a table that begins so."""
    found = [line.removeprefix(beginning).split() for line in lines if line.startswith(f"{beginning}  ")]
    assert found, f"no row begins with {beginning!r}:\n" + "\n".join(lines)
    return found


def check_overhead(lines: list[str]) -> None:
    settings = ("one rank", "2 gloo ranks on loopback")
    assert [line.split(",")[0] for line in lines if line.endswith(" rounds")] == list(settings)
    phases = ("forward", "backward, synchronised", "forward in no_sync", "backward in no_sync, later ones")
    for phase, wrapper in product(phases, WRAPPERS):
        terms = rows(lines, f"{phase}: {wrapper}")
        assert len(terms) == len(settings)
        assert all(math.isfinite(float(cell.rstrip("%"))) for row in terms for cell in row)
    for collectives in rows(lines, "backward, synchronised: the all-reduces alone"):
        assert len(collectives) == 4
    for count, kind in product((100, 300), ("synchronised pass", "later local pass")):
        passes = rows(lines, f"{kind}, {count} parameters")
        assert len(passes) == len(settings)
        for unwrapped, *added, ratio in passes:
            assert 0.1 < float(unwrapped) < 1000, "microseconds per parameter"
            assert len(added) == len(WRAPPERS)
            assert float(ratio) > 0


def check_profile(lines: list[str]) -> None:
    passes, parameters = 10, 50
    backwards = [int(line.split()[0]) for line in lines if "'run_backward'" in line]
    assert backwards == [passes, 2 * passes], "synchronised, then two local ones at once"
    marked = [int(line.split()[0]) for line in lines if "(on_gradient)" in line]
    assert marked == [passes * parameters, 2 * passes * parameters], "one call of one hook per parameter"
    told = [int(line.split()[0]) for line in lines if "(_on_gradient)" in line]
    assert all(calls < passes * parameters / 5 for calls in told), "most hooks only mark"


def check_accelerator(lines: list[str]) -> None:
    models = ["gpt", "resnet", "many small"]
    equal = [line for line in lines if "gradients of two gloo ranks on cpu equal each other" in line]
    assert [line.split(":")[0] for line in equal] == models
    for line in equal:
        early, buckets = map(int, re.findall(r"(\d+) of (\d+) buckets launched early", line)[0])
        assert 1 <= early <= buckets > 2
    tables = [line.split(":")[0] for line in lines if "first losses agree within" in line]
    assert tables == [f"{model}, {precision}" for model, precision in product(models, ("fp32", "bf16"))]
    for peer in ("unwrapped", *WRAPPERS, "bucketddp, sending"):
        found = rows(lines, peer)
        assert len(found) == len(tables)
        for step_ms, ratio, *_ in found:
            assert float(step_ms) > 0
            assert float(ratio) == 1 if peer == "unwrapped" else float(ratio) > 0


def check_replicas(lines: list[str]) -> None:
    models, ways = ("gpt", "resnet", "many small", "wide mlp"), ("per tensor", "in chunks", "kept", "kept, shared")
    for model, count, way in product(models, (2, 3), ways):
        [[replicate_ms, reduce_ms, both_ms, ratio]] = rows(lines, f"{model}, {count}: {way}")
        assert float(replicate_ms) > 0
        assert float(reduce_ms) > 0
        assert float(both_ms) > 0
        assert (float(ratio) == 1) if way == "in chunks" else float(ratio) > 0


@pytest.mark.slow
def test_quick_runs() -> None:
    saved = sorted(RESULTS.iterdir())
    commands = [
        ["benchmarks/overhead.py", "--quick"],
        ["benchmarks/overhead.py", "--quick", "--profile", "--ranks", "1", "--parameters", "50"],
        ["benchmarks/accelerator.py", "--quick"],
        ["benchmarks/replicas.py", "--quick", "--devices", "2", "3"],
    ]
    printed = [out.splitlines() for out, _ in run_processes(commands, PYTHONPATH=str(ROOT))]
    for check, lines in zip((check_overhead, check_profile, check_accelerator, check_replicas), printed, strict=True):
        check(lines)
    assert sorted(RESULTS.iterdir()) == saved, "a quick run saved something"


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_where_there_is_no_accelerator() -> None:
    [(printed, _)] = run_processes([["benchmarks/accelerator.py"]], PYTHONPATH=str(ROOT))
    assert printed == "accelerator.py: no accelerator here\n"
