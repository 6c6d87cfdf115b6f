"""The examples run from end to end and show what they promise, on ranks that look as torchrun starts them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launchers import code_cells, free_port, run_as_torchrun, run_notebook
from tests.pool import ROOT, RunRanks

pytestmark = pytest.mark.slow


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    reason = f'{", ".join(missing)}: pip install -e ".[hugging-face]"'
    return pytest.mark.skipif(bool(missing), reason=reason)


DIFFERENCE = "largest difference of a weight between ranks"


def printed(run_ranks: RunRanks, example: str, *arguments: str, ranks: int = 2) -> str:
    job = (run_as_torchrun, free_port(), f"examples/{example}", *arguments)
    return "".join(run_ranks(ranks, *job, fresh=True, timeout=200))


def number_after(text: str, output: str) -> float:
    match = re.search(re.escape(text) + r"\s+([\d.e+-]+)", output)
    assert match, output
    return float(match.group(1))


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


def test_ranks_go_on_without_one_that_was_killed_and_start_again_with_it(tmp_path: Path) -> None:
    def started(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(ROOT / "examples/go_on_without_a_rank.py"), "run", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
        )

    first = started("--kill", "1")
    assert first.returncode == 75, first.stderr
    weights = re.findall(r"rank [02]: 2 ranks at step 10, sum of weights (\S+)", first.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    assert "exit codes [75, -9, 75]" in first.stdout
    second = started()
    assert second.returncode == 0, second.stderr
    assert len(re.findall(r"rank \d: 3 ranks at step 20", second.stdout)) == 3


def test_train_bytes_bf16(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "train_bytes_bf16.py", "--steps", "50")
    losses = [float(line.split()[4]) for line in output.splitlines() if "held-out loss" in line]
    assert losses[-1] < losses[0] - 1
    for rank in (0, 1):
        assert f"rank {rank}: parameters equal to rank 0's: True" in output
    assert "gradients in torch.float32, 7 of 7 parameters with an fp32 master" in output


def test_fabric(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "fabric.py")
    assert output.index("first layer frozen") < output.rindex("first layer training")
    assert number_after(DIFFERENCE, output) == 0
    assert number_after("loaded without Fabric", output) > 340
    assert "1 local passes before" in output


def test_notebook_prints_what_is_stored_in_it(run_ranks: RunRanks) -> None:
    notebook = "examples/notebook.ipynb"
    (printed,) = run_ranks(1, run_notebook, notebook, fresh=True)
    stored = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in code_cells(notebook)]
    assert {output["name"] for cell in code_cells(notebook) for output in cell["outputs"]} == {"stdout"}
    assert [words_of(output) for output in printed] == [words_of(output) for output in stored]
    assert numbers_of(printed[:-1]) == pytest.approx(numbers_of(stored[:-1]), abs=0.01)
    replicas, halves, alone, weights = printed[-4:]
    assert "BucketDPStrategy: 2 replicas, 1 process" in replicas
    assert halves.startswith("[32, 32, 32, 32, 32, 32]")
    epochs = [[line for line in output.splitlines() if line.startswith("epoch")] for output in (replicas, alone)]
    assert len(epochs[0]) == 3
    assert epochs[0] == epochs[1], "the second Trainer has one device"
    assert 0 < number_after("largest difference", weights) < 1e-9


def words_of(text: str) -> str:
    """A text without what may differ between machines: the digits."""
    return re.sub(r"\d", "#", text)


def numbers_of(texts: list[str]) -> list[float]:
    return [float(number) for text in texts for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_cli(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "cli.py", "fit", "--config", "examples/cli.yaml", "--trainer.max_epochs", "5")
    assert "BucketDDPStrategy on 2 ranks, parameters in torch.bfloat16, gradients in torch.float32" in output
    accuracies = [float(line.split()[-1]) for line in output.splitlines() if "held-out accuracy" in line]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.85
    assert "in 2 buckets" in output


def test_gan(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "gan.py", "--epochs", "6")
    assert number_after(DIFFERENCE, output) == 0
    reductions = re.findall(r"reductions that held gradients of (.*?)  +(\d+)", output)
    assert reductions == [("critic", "90"), ("generator", "90")], "never both networks' in one"
    assert number_after("generated", output) < number_after("noise", output) - 1, "of the distance to real digits"


@needs("skimage", "transformers")
def test_finetune_vision_sends_what_is_trained(run_ranks: RunRanks) -> None:
    output = printed(run_ranks, "finetune_vision.py")
    base, tuned = output.split("fine-tuning on 200 images of 2 classes")
    assert "pre-training on crops of 8 photographs" in base
    assert float(re.findall(r"held-out accuracy ([\d.]+)", base)[-1]) > 0.5, "of 8 photographs"
    epochs = re.findall(r"backbone (\w+) +loss ([\d.]+)  held-out accuracy ([\d.]+)(?: +([\d,]+) bytes)?", tuned)
    frozen, training = epochs[:4], epochs[4:]
    assert {state for state, *_ in frozen} == {"frozen"}
    assert {state for state, *_ in training} == {"training"}
    assert min(float(epoch[1]) for epoch in training) < float(frozen[-1][1]), "the loss"
    differences = [float(found) for found in re.findall(rf"{DIFFERENCE} +(\S+)", output)]
    assert float(training[-1][2]) > 0.85
    assert differences == [0, 0]
    (before,) = {int(sent.replace(",", "")) for sent in re.findall(r"([\d,]+) bytes", base)}
    (least,), (most,) = ({int(sent.replace(",", "")) for *_, sent in part} for part in (frozen, training))
    assert least < most / 100, "frozen parameters are not sent"
    assert most == pytest.approx(before, rel=0.01), "all but 6 of the 8 classes of the head"


@needs("skimage", "transformers")
def test_finetune_vision_on_a_folder_of_images(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(1, make_images_and_model, str(tmp_path), fresh=True)
    options = ["--data", str(tmp_path / "images"), "--model", str(tmp_path / "model"), "--epochs", "4"]
    output = printed(run_ranks, "finetune_vision.py", *options)
    assert output.startswith("fine-tuning on 40 images of 2 classes")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]


def make_images_and_model(folder: str) -> None:
    import torch
    from PIL import Image
    from transformers import ResNetConfig, ResNetModel

    for label, brightness in (("dark", 0), ("light", 128)):
        (Path(folder) / "images" / label).mkdir(parents=True)
        for index in range(20):
            pixels = brightness + torch.randint(128, (40, 30, 3), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(Path(folder) / "images" / label / f"{index}.png")
    small = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetModel(small).save_pretrained(Path(folder) / "model")


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", output)]


@needs("transformers", "peft")
@pytest.mark.parametrize(("lora", "strategy"), [(True, "bucketddp"), (False, "bucketddp_sharded")])
def test_finetune_language_model(run_ranks: RunRanks, lora: bool, strategy: str) -> None:
    steps = ["--base-steps", "40", "--steps", "25", "--strategy", strategy, *(["--lora"] if lora else [])]
    output = printed(run_ranks, "finetune_language_model.py", *steps)
    base, tuned = (losses_of(part) for part in output.split("fine-tuning"))
    assert base[-1] < base[0] - 2
    assert tuned[-1] < tuned[0] - 0.05
    assert re.findall(rf"{DIFFERENCE} +(\S+)", output) == ["0", "0"]
    plain = output.replace(",", "")
    trained = [(int(some), int(every)) for some, every in re.findall(r"(\d+) of (\d+) parameters trained", plain)]
    sent = [int(found) for found in re.findall(r"(\d+) bytes of float32 gradients", plain)]
    assert sent == [4 * count for count, _ in trained], "fp32 gradients of what is trained, and nothing else"
    (base_trained, base_all), (tuned_trained, tuned_all) = trained
    assert base_trained == base_all
    assert tuned_trained < tuned_all / 10 if lora else tuned_trained == tuned_all
    states = [int(found) for found in re.findall(r"(\d+) bytes on rank", plain)]
    ranks = 2 if strategy == "bucketddp_sharded" else 1
    wholes = [12 * count for count, _ in trained for _ in range(2)]  # two averages and a master in fp32, on two ranks
    assert states == pytest.approx([whole / ranks for whole in wholes], rel=0.1)


@needs("transformers", "peft")
def test_a_pretrained_language_model_learns_as_with_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(1, make_language_model, str(tmp_path), fresh=True)
    args = ["--model", str(tmp_path), "--lora", "--precision", "32-true", "--steps", "20", "--lr", "1e-2", "--strategy"]
    ours, theirs = (printed(run_ranks, "finetune_language_model.py", *args, kind) for kind in ("bucketddp", "ddp"))
    assert losses_of(ours)[-1] < losses_of(ours)[0] - 0.1
    assert losses_of(ours) == pytest.approx(losses_of(theirs), abs=0.0011), "they print three decimals"


def make_language_model(folder: str) -> None:
    """A small Llama with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), initializer_range=0.1, **small)).save_pretrained(folder)
