"""The benchmarks of real compute, of memory and of optimizers run, and show what they are to show."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def printed(script: str, *arguments: str) -> str:
    """What a benchmark prints in a smoke run, which must end well."""
    command = [sys.executable, f"benchmarks/{script}", "--quick", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def figures(text: str, table: str, row: str) -> dict[str, float]:
    """One row of the table whose head begins with ``table``, by the heads of its columns."""
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith(table))
    line = next(line for line in lines[head:] if re.match(rf"{re.escape(row)}  ", line))
    names, cells = (re.split(r"  +", one.strip()) for one in (lines[head], line))
    return {name: float(cell.split()[0]) for name, cell in zip(names[1:], cells[1:], strict=True) if cell != "-"}


def test_peers_that_compute_train_alike_and_are_compared_in_pairs() -> None:
    text = printed("compute.py", "--models", "gpt", "--accumulation", "1", "3", "--rounds", "2")
    one_pass, three_passes = text.split("3 passes in a step")
    for part in (one_pass, three_passes):
        assert re.search(r"^losses of peers that synchronise agree within \d", part, re.MULTILINE)
        assert re.search(r"^noise: \d", part, re.MULTILINE)
        best = re.search(r"^ddp, best flags \(\d+ MiB\)", part, re.MULTILINE)
        assert best
        assert figures(part, "peer", best[0])["of ddp's, best flags"] == 1.0
        for peer in ("unwrapped", "ddp as shipped", "ddp, best flags, its twin", "bucketddp", "bucketddp_sharded"):
            assert figures(part, "peer", peer)["step ms"] > 0
    assert "local passes" not in one_pass
    assert figures(three_passes, "local passes", "unwrapped")["of the unwrapped module's"] == 1.0
    assert figures(three_passes, "local passes", "bucketddp")["pass ms"] > 0


def test_a_peer_that_does_not_synchronise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compute

    def rank(others: list[float], unwrapped: list[float]) -> dict[str, Any]:
        losses = {compute.SHIPPED: ([1.0, 1.5], True), "other": (others, True), compute.UNWRAPPED: (unwrapped, False)}
        return {"peers": {name: {"losses": values, "synchronises": flag} for name, (values, flag) in losses.items()}}

    assert compute.agreement_of_losses([rank([1.0, 1.5], [1.0, 2.0])]) == 0.0
    with pytest.raises(AssertionError, match="other: losses differ from torch DDP's by"):
        compute.agreement_of_losses([rank([1.0, 1.5], [1.0, 2.0]), rank([1.0, 1.51], [1.0, 2.0])])
    with pytest.raises(AssertionError, match="the unwrapped module's losses differ by no more than"):
        compute.agreement_of_losses([rank([1.0, 1.5], [1.0, 1.5])])


def test_gradients_take_their_size_and_a_bucket_at_most_where_ddp_takes_two_sizes() -> None:
    text = printed("memory.py", "--models", "mlp", "shuffled", "--peers", "ddp as shipped", "bucketddp")
    for model, part in zip(("mlp", "shuffled"), text.split("shuffled:"), strict=True):
        kinds = figures(part, "gradients and buckets", "ddp as shipped")
        assert kinds["after backward"] == 2.0
        assert kinds["in backward"] > 2.0
        kinds = figures(part, "gradients and buckets", "unwrapped")
        assert (kinds["after backward"], kinds["after zero_grad"]) == (1.0, 0.0)
        kinds = figures(part, "gradients and buckets", "bucketddp")
        assert kinds["after backward"] == pytest.approx(1.0, abs=0.01)
        words = r"at most ([\d.]+) .* ([\d.]+) when settled; the largest bucket is ([\d.]+): (.*)"
        found = re.search(rf"^bucketddp: {words}$", part, re.MULTILINE)
        assert found, part
        most, settled, bucket = (float(found[group]) for group in (1, 2, 3))
        assert most >= settled >= kinds["local passes"] > 1.0
        assert settled <= 1.0 + bucket + 0.01
        assert (found[4] == "the bound holds") == (most <= 1.0 + bucket + 0.01)
        assert found[4] == "the bound holds" or model == "shuffled"  # its order is not known in the first pass
        ours, unwrapped = (figures(part, "everything", peer)["sum"] for peer in ("bucketddp", "unwrapped"))
        assert ours <= unwrapped + bucket + 0.01


def test_fp32_masters_reach_the_loss_of_fp32_and_bf16_alone_does_not() -> None:
    text = printed("bf16_masters.py")
    above = {
        peer: figures(text, "peer", peer)["above fp32's"]
        for peer in ("ddp, bf16-true", "bucketddp_sharded, bf16-true, fp32 masters")
    }
    assert abs(above["bucketddp_sharded, bf16-true, fp32 masters"]) < 0.01
    assert above["ddp, bf16-true"] > 0.05


def test_the_step_of_an_optimizer_is_timed_sharded_and_not() -> None:
    text = printed("optimizer_step.py", "--worlds", "2")
    rows = re.findall(
        r"^(AdamW, .*?)  +2 +0\.500 +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["AdamW, fused", "AdamW, a loop"], text
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_the_state_of_sharded_optimizers_is_divided() -> None:
    text = printed("memory.py", "--models", "mlp", "--peers", "bucketddp_sharded")
    shares = re.findall(r"^bucketddp_sharded: the optimizer's state is ([\d.]+) of the unwrapped", text, re.MULTILINE)
    assert [float(share) for share in shares] == [pytest.approx(0.5, rel=0.02)], text
