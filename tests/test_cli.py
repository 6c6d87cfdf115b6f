"""``python -m lightning_bucketddp``, and the strategy's options on the command line and in YAML."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_bucketddp import BucketDDPStrategy, Options, __version__
from lightning_bucketddp.cli import main
from lightning_bucketddp.trainer.common import REGISTERED
from tests.cli_models import Model

ROOT = Path(__file__).parent.parent
CLASS = "lightning_bucketddp.BucketDDPStrategy"


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_bucketddp", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# -- python -m lightning_bucketddp -------------------------------------------------------------------


def test_versions_and_names_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    entries = re.findall(r"^(\S+) +((?:.|\n +)+)$", capsys.readouterr().out, re.MULTILINE)
    found = {name: " ".join(value.split()) for name, value in entries}
    assert found["Fabric(strategy=...)"] == ", ".join(REGISTERED)
    assert found["Trainer(strategy=...)"] == ", ".join([*REGISTERED, "bucketdp"])
    assert found["Fabric(strategy=...)"].startswith("bucketddp, bucketddp_spawn, bucketddp_fork, bucketddp_notebook")
    assert found["lightning_bucketddp"] == __version__
    assert (found["torch"], found["lightning"]) == (torch.__version__, lightning.__version__)
    assert "gloo" in found["backends"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["lightning_bucketddp", __version__]
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m lightning_bucketddp")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["fitt", "--model", "x"], "expected one of fit, validate, test, predict, found 'fitt'"),
        ([__file__], "put `import lightning_bucketddp` into yours, which registers the strategies, and start it as"),
        (["-m", "tests.launch_script"], "found '-m'. Scripts and modules are not run"),
    ],
)
def test_what_is_no_subcommand_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert problem in errors
    assert "usage: python -m lightning_bucketddp" in errors


def test_a_wrong_option_of_the_lightning_cli_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", "--model", "tests.cli_models.NoModel"]
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "NoModel" in capsys.readouterr().err


def own_classes(folder: Path, **options: Any) -> list[str]:
    """Arguments for training a module of a file in a folder on two ranks."""
    (folder / "mine.py").write_text((ROOT / "tests" / "cli_models.py").read_text())
    trainer = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, **options}
    trainer |= dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    (folder / "mine.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": {"class_path": "mine.Model"}}))
    return ["fit", "--config", "mine.yaml", "--data", "mine.Data", "--model.lr", "0.2"]


def assert_trained(output: str) -> None:
    lines = sorted(line for line in output.splitlines() if line.startswith("rank"))
    assert [line.split(", weight")[0] for line in lines] == [f"rank {rank}: 4 passes, lr 0.2" for rank in (0, 1)]
    assert len({line.split("weight")[1] for line in lines}) == 1


def run_main(folder: str, arguments: list[str]) -> str:
    """What the command prints; in a process that is not used again."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["program", *arguments]
    printed = Path(f"printed by rank {dist.get_rank()}")
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
    assert main(arguments) == 0
    return printed.read_text()


def test_a_lightning_cli_runs_on_two_ranks_with_classes_of_the_current_folder(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    arguments = own_classes(tmp_path, plugins=[{"class_path": "tests.lightning_models.PoolEnvironment"}])
    assert_trained("".join(run_ranks(2, run_main, str(tmp_path), arguments, fresh=True)))


@pytest.mark.slow
def test_a_lightning_cli_starts_the_ranks_itself(tmp_path: Path) -> None:
    result = run(*own_classes(tmp_path), cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
    assert_trained(result.stdout)


# -- the strategy's options --------------------------------------------------------------------------


def cli(*arguments: str) -> LightningCLI:
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    return LightningCLI(
        Model, run=False, args=[*options, *arguments], save_config_callback=None, seed_everything_default=False
    )


OPTIONS = {
    "bucket_cap_mb": ("4", 4.0),
    "grad_dtype": ('{"net.*": "float32"}', {"net.*": "float32"}),
    "timeout": ("0:10:00", timedelta(minutes=10)),
    "module_buffers": ("mean", "mean"),
    "max_abs_grad": (".inf", float("inf")),
    "sparse_parameters": ("[net.weight]", ["net.weight"]),
    "find_unused_parameters": ("true", True),
    "shard_optimizer": ("true", True),
}


def assert_options(strategy: Any) -> None:
    assert isinstance(strategy, BucketDDPStrategy)
    assert strategy._timeout == OPTIONS["timeout"][1]
    expected = Options(**{name: value for name, (_, value) in OPTIONS.items()})
    assert strategy._options == expected
    assert strategy._options.timeout == expected.timeout


def test_the_registered_name_is_known() -> None:
    assert type(cli("--trainer.strategy=bucketddp").trainer.strategy) is BucketDDPStrategy
    assert cli("--trainer.strategy=bucketddp_spawn").trainer.strategy._start_method == "spawn"
    assert cli("--trainer.strategy=bucketddp_sharded").trainer.strategy._options.shard_optimizer


def test_options_by_class_path_survive_yaml(tmp_path: Path) -> None:
    options = [f"--trainer.strategy.{name}={text}" for name, (text, _) in OPTIONS.items()]
    first = cli(f"--trainer.strategy={CLASS}", *options)
    assert_options(first.trainer.strategy)
    saved = tmp_path / "config.yaml"
    saved.write_text(first.parser.dump(first.config))
    written = yaml.safe_load(saved.read_text())["trainer"]["strategy"]
    assert written["class_path"] == CLASS
    assert written["init_args"]["grad_dtype"] == {"net.*": "float32"}
    second = cli(f"--config={saved}")
    assert_options(second.trainer.strategy)
    assert second.parser.dump(second.config) == saved.read_text()


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("grad_dtype=torch.float32", torch.float32),
        ("wire_dtype=bfloat16", torch.bfloat16),
        ("wire_dtype=bf16", torch.bfloat16),
        ("gradient_divide_by=tokens", "tokens"),
        ("gradient_divide_by=3", 3),
        ("comm_hook=bf16", "bf16"),
        (f"comm_hook={fp16_compress_hook.__module__}.{fp16_compress_hook.__name__}", fp16_compress_hook),
        ("broadcast_buffers=false", False),
        ("uneven_inputs=active_ranks", "active_ranks"),
    ],
)
def test_an_option_on_the_command_line(option: str, found: Any) -> None:
    strategy = cli(f"--trainer.strategy={CLASS}", f"--trainer.strategy.{option}").trainer.strategy
    name = option.split("=")[0]
    assert ({**vars(strategy._options), "uneven_inputs": strategy._uneven_inputs}[name]) == found


@pytest.mark.parametrize("option", ["grad_dtype=float33", "module_buffers=maybe", "bucket_cap_mb=much", "nothing=1"])
def test_a_wrong_option_is_refused_by_the_parser(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(f"--trainer.strategy={CLASS}", f"--trainer.strategy.{option}")
    assert option.split("=")[0] in capsys.readouterr().err


def test_help_shows_every_option_with_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli(f"--trainer.strategy.help={CLASS}")
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    described: dict[str, str] = {}
    for entry in re.split(r" (?=--trainer\.strategy\.)", shown):
        name = re.match(r"--trainer\.strategy\.([a-z0-9_]+)", entry)
        if name is not None:
            described[name[1]] = described.get(name[1], "") + entry
    explicit = inspect.signature(BucketDDPStrategy).parameters.keys() - {"options"}
    for name in explicit | {each.name for each in fields(Options)}:
        assert "(type: " in described[name], name
        assert "default: " in described[name], name
