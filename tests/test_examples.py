"""The examples, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(name: str, *arguments: str) -> str:
    return run_python(f"examples/{name}", *arguments)


def run_python(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # the checkout, whatever is installed
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def number_after(text: str, output: str) -> float:
    match = re.search(re.escape(text) + r"\s+([\d.e+-]+)", output)
    assert match, output
    return float(match.group(1))


@pytest.mark.parametrize("strategy", ["bucketddp", "bucketddp_spawn", "bucketddp_fork", "bucketddp_notebook"])
def test_every_registered_name_trains_from_a_script(strategy: str) -> None:
    output = run_python("-m", "tests.launch_script", strategy)
    for rank in (0, 1):
        assert f"rank {rank}: 4 passes, difference 0" in output
    assert "process group open at exit: False" in output
    assert "process group open at exit: True" not in output, "which aborts a gloo process now and then"
    assert "process groups alive at exit: 0" in output
    assert "process groups alive at exit: 1" not in output


def test_finetune_digits() -> None:
    output = run_example("finetune_digits.py", "--devices", "2")
    assert "backbone frozen" in output
    assert output.index("backbone frozen") < output.rindex("backbone training")
    assert number_after("test accuracy", output) >= 0.95
    assert number_after("largest difference of a weight between ranks", output) == 0
    sizes = re.search(r"([\d,]+) bytes of gradients, once in memory, in (\d+) buckets", output)
    assert sizes, output
    assert int(sizes.group(1).replace(",", "")) > 100_000
    assert int(sizes.group(2)) >= 2


def test_finetune_digits_shows_how_ddp_drifts() -> None:
    output = run_example("finetune_digits.py", "--strategy", "ddp", "--devices", "2", "--epochs", "4")
    assert number_after("largest difference of a weight between ranks", output) > 0
    assert "drifted apart" in output


def test_train_bytes_bf16() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run_python(*launch, "examples/train_bytes_bf16.py", "--steps", "50")
    losses = [float(line.split()[4]) for line in output.splitlines() if "held-out loss" in line]
    assert losses[-1] < losses[0] - 1
    for rank in (0, 1):
        assert f"rank {rank}: parameters equal to rank 0's: True" in output
    assert "gradients in torch.float32, 7 of 7 parameters with an fp32 master" in output
