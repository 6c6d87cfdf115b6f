"""The examples run from end to end and show what they promise, on ranks that look as torchrun starts them."""

import re
import runpy
import sys

import pytest

from tests.launchers import ROOT, free_port, run_as_torchrun
from tests.pool import RunRanks

DIFFERENCE = "largest difference of a weight between ranks"


def printed(run_ranks: RunRanks, example: str, *arguments: str, ranks: int = 2) -> str:
    job = (run_as_torchrun, free_port(), f"examples/{example}", *arguments)
    return "".join(run_ranks(ranks, *job, fresh=True, timeout=200))


def number_after(text: str, output: str) -> float:
    match = re.search(re.escape(text) + r"\s+([\d.e+-]+)", output)
    assert match, output
    return float(match.group(1))


@pytest.mark.slow
def test_finetune_digits_where_ddp_drifts(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "finetune_digits.py", "--epochs", "4")
    assert output.index("backbone frozen") < output.rindex("backbone training")
    assert number_after("test accuracy", output) >= 0.9
    assert number_after(DIFFERENCE, output) == 0
    sizes = re.search(r"([\d,]+) bytes of gradients, once in memory, in (\d+) buckets", output)
    assert sizes, output
    assert int(sizes[1].replace(",", "")) > 100_000
    assert int(sizes[2]) >= 2
    output = printed(run_ranks, "finetune_digits.py", "--strategy", "ddp", "--epochs", "2")
    assert number_after(DIFFERENCE, output) > 0
    assert "drifted apart" in output


@pytest.mark.slow
def test_train_bytes_bf16(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "train_bytes_bf16.py", "--steps", "50")
    losses = [float(line.split()[4]) for line in output.splitlines() if "held-out loss" in line]
    assert losses[-1] < losses[0] - 1
    for rank in (0, 1):
        assert f"rank {rank}: parameters equal to rank 0's: True" in output
    assert "gradients in torch.float32, 7 of 7 parameters with an fp32 master" in output


@pytest.mark.slow
def test_fabric(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "fabric.py")
    assert output.index("first layer frozen") < output.rindex("first layer training")
    assert number_after(DIFFERENCE, output) == 0
    assert number_after("loaded without Fabric", output) > 340
    assert "1 local passes before" in output


@pytest.mark.slow
def test_notebook_two_devices(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "notebook_two_devices.py", "--devices", "2", "--epochs", "2", ranks=1)
    assert "BucketDPStrategy: 2 x" in output
    epochs = [line for line in output.splitlines() if "validation accuracy" in line]
    assert len(epochs) == 4
    assert epochs[:2] == epochs[2:], "the second Trainer has one device"
    assert number_after("validation accuracy", epochs[-1]) >= 0.8
    assert 0 < number_after("largest difference of a weight", output) < 1e-9


@pytest.mark.slow
def test_cli(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "cli.py", "fit", "--config", "examples/cli.yaml", "--trainer.max_epochs", "5")
    assert "BucketDDPStrategy on 2 ranks, parameters in torch.bfloat16, gradients in torch.float32" in output
    accuracies = [float(line.split()[-1]) for line in output.splitlines() if "held-out accuracy" in line]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.85
    assert "in 2 buckets" in output


@pytest.mark.slow
def test_gan(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "gan.py", "--epochs", "6")
    assert number_after(DIFFERENCE, output) == 0
    reductions = re.findall(r"reductions that held gradients of (.*?)  +(\d+)", output)
    assert reductions == [("critic", "90"), ("generator", "90")], "never both networks' in one"
    assert number_after("generated", output) < number_after("noise", output) - 1, "of the distance to real digits"


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "strategy"), [(True, "bucketddp"), (False, "bucketddp_sharded")])
def test_finetune_language_model(run_ranks: RunRanks, lora: bool, strategy: str) -> None:
    steps = ["--base-steps", "40", "--steps", "25", "--strategy", strategy, *(["--lora"] if lora else [])]
    output = printed(run_ranks, "finetune_language_model.py", *steps)
    base, tuned = (
        [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", part)] for part in output.split("fine-tuning")
    )
    assert base[-1] < base[0] - 2
    assert tuned[-1] < tuned[0] - 0.1
    assert re.findall(rf"{DIFFERENCE} +(\S+)", output) == ["0", "0"]
    plain = output.replace(",", "")
    trained = [(int(some), int(every)) for some, every in re.findall(r"(\d+) of (\d+) parameters trained", plain)]
    sent = [int(found) for found in re.findall(r"(\d+) bytes of float32 gradients", plain)]
    assert sent == [4 * count for count, _ in trained], "fp32 gradients of what is trained, and nothing else"
    (base_trained, base_all), (tuned_trained, tuned_all) = trained
    assert base_trained == base_all
    assert tuned_trained < tuned_all / 10 if lora else tuned_trained == tuned_all


def test_finetune_language_model_says_what_hugging_face_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    example = runpy.run_path(str(ROOT / "examples/finetune_language_model.py"))
    with pytest.raises(SystemExit, match="--model gpt2 needs Hugging Face's library: pip install transformers"):
        example["load_hugging_face"]("gpt2")
