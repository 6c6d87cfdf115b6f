"""The benchmarks run; of figures only those that are calculated are looked at."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"benchmarks/{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # the checkout, whatever is installed
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def results() -> set[str]:
    return {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}


def test_simulated_buckets_stay_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results()
    monkeypatch.setattr(sys, "argv", ["scale.py", "--quick"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(ROOT / "benchmarks" / "scale.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert results() == before, "a quick run saves nothing"
    rows = re.findall(r"^(\d+)  +([01]\.\d{4}) +([01]\.\d{4}) +([01]\.\d{4}) ", printed, re.MULTILINE)
    assert len(rows) == 3 * 2 * 2, printed  # clusters, models, numbers of ranks
    for ranks, *efficiencies in rows:
        shipped, default, bound = map(float, efficiencies)
        assert 0 < shipped <= bound <= 1, (ranks, efficiencies)
        assert 0 < default <= bound, (ranks, efficiencies)


def test_the_models_of_the_simulation_have_the_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from model_shapes import gpt2_medium, gpt_1_3b, resnet50

    assert resnet50().numel == 25_557_032
    assert resnet50().forward_flops == pytest.approx(2 * 4.09e9, rel=0.01)
    assert gpt2_medium().numel == 354_823_168
    assert gpt_1_3b().numel == pytest.approx(1.3e9, rel=0.02)


def test_the_bound_of_the_link_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from link_cases import case_of, least_exposed, least_exposed_sharded, reference, wire_seconds

    assert wire_seconds(2.0) == pytest.approx(0.232, rel=0.01)
    assert reference().ratio == pytest.approx(0.83, rel=0.01)
    assert case_of(0.5, 2.0).ratio == pytest.approx(2.0)
    # One layer of 24 has gone by when the wire starts; where compute is slow, one layer's bytes are left.
    assert least_exposed(0.240, 0.192) == pytest.approx(0.008 + 0.240 - 0.192)
    assert least_exposed(0.240, 1.0) == pytest.approx(0.010)
    # A layer's share of the reduce-scatter behind backward; the all-gather is longer than forward.
    assert least_exposed_sharded(0.240, 0.192, 0.096) == pytest.approx(0.005 + 0.004 + 0.120 - 0.096)


@pytest.mark.slow
def test_training_over_a_limited_link() -> None:
    before = results()
    run = run_benchmark("link.py", "--quick")
    if run.returncode != 0 and (reason := re.match(r"link\.py (needs .*)", run.stderr)):
        pytest.skip(reason.group(1))
    assert run.returncode == 0, run.stderr[-4000:]
    assert results() == before, "a quick run saves nothing"
    steps = dict(re.findall(r"^(\S.*?)  +(\d+) +\d\.\d{3}\b", run.stdout, re.MULTILINE))
    expected = {"unsynchronised", "ddp as shipped", "bucketddp", "bucketddp_sharded"}
    expected |= {"bound for an all-reduce", "bound for a sharded optimizer"}
    assert expected <= set(steps), run.stdout
    # 192 ms of sleep in backward and half of that in forward.
    assert all(float(step) > 280 for step in steps.values()), run.stdout
