"""``python -m lightning_bucketddp``, and the strategy's options on the command line and in YAML."""

import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_bucketddp import BucketDDPStrategy, BucketDPStrategy, __version__, check
from lightning_bucketddp.cli import describe, main
from lightning_bucketddp.layout.options import TrainerOptions
from lightning_bucketddp.layout.registry import REGISTERED
from tests.trainer.cli_models import Model

CLASS = "lightning_bucketddp.BucketDDPStrategy"


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's


def test_versions_and_names_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    entries = re.findall(r"^(\S+) +((?:.|\n +)+)$", capsys.readouterr().out, re.MULTILINE)
    found = {name: " ".join(value.split()) for name, value in entries}
    shown = [name for name in REGISTERED if "unused" not in name]
    endings = "; names with bucketddp may end in _find_unused_parameters_true or _false"
    assert found["Fabric(strategy=...)"] == ", ".join(shown) + endings
    assert found["Trainer(strategy=...)"] == ", ".join([*shown, "bucketdp"]) + endings
    assert [found[name] for name in ("lightning_bucketddp", "torch")] == [__version__, torch.__version__]
    for package in ("lightning", "pytorch-lightning"):
        assert found[package] == (check.version_of(package) or "not installed")
    assert "gloo" in found["backends"]
    monkeypatch.setattr(check, "version_of", lambda package: None)
    assert not re.search("strategy|Trainer|Fabric", describe())
    shows = {"--version": f"lightning_bucketddp {__version__}", "--help": "usage: python -m lightning_bucketddp "}
    for option, expected in shows.items():
        with pytest.raises(SystemExit, match="0"):
            main([option])
        assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize("arguments", [["fit", "--model", "x"], [__file__], ["-m", "tests.trainer.launch_script"]])
def test_what_is_no_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    errors = capsys.readouterr().err
    assert arguments[0] in errors
    assert "usage: python -m lightning_bucketddp" in errors


def test_check_is_handed_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(check, "main", lambda *args, **options: given.append([*args, *options.values()]) or len(given))
    assert [main(["check", "--quick", "--output=found.json"]), main(["check"]), main(["check", "--all"])] == [1, 2, 3]
    assert given == [[True, "found.json", False], [False, None, False], [False, None, True]]


def cli(*arguments: str) -> LightningCLI:
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false", *arguments]
    return LightningCLI(Model, run=False, args=options, save_config_callback=None, seed_everything_default=False)


OPTIONS = {
    "grad_dtype": ('{"net.*": "float32"}', {"net.*": "float32"}),
    "timeout": ("0:10:00", timedelta(minutes=10)),
    "module_buffers": ("mean", "mean"),
    "max_abs_grad": (".inf", float("inf")),
    "sparse_parameters": ("[net.weight]", ["net.weight"]),
    "comm_hook": (f"{fp16_compress_hook.__module__}.{fp16_compress_hook.__name__}", fp16_compress_hook),
}


def test_options_by_class_path_survive_yaml(tmp_path: Path) -> None:
    assert type(cli("--trainer.strategy=bucketddp").trainer.strategy) is BucketDDPStrategy
    assert (
        type(cli("--trainer.strategy=BucketDDPStrategy", "--trainer.strategy.bucket_cap_mb=1").trainer.strategy)
        is BucketDDPStrategy
    )
    in_process = cli("--trainer.strategy.class_path=lightning_bucketddp.BucketDPStrategy").trainer
    assert (type(in_process.strategy), in_process.num_devices) == (BucketDPStrategy, 2)
    saved = tmp_path / "config.yaml"
    options = [f"{name}={text}" for name, (text, _) in OPTIONS.items()]
    options += ["uneven_inputs=world_size", "exact_evaluation=true", "logged_keys=any"]
    first = cli(f"--trainer.strategy={CLASS}", *(f"--trainer.strategy.{option}" for option in options))
    saved.write_text(first.parser.dump(first.config))
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["class_path"] == CLASS
    second = cli(f"--config={saved}")
    assert second.parser.dump(second.config) == saved.read_text()
    own = {"uneven_inputs": "world_size", "exact_evaluation": True, "logged_keys": "any"}
    expected = TrainerOptions(**{name: value for name, (_, value) in OPTIONS.items()}, **own)
    for strategy in (first.trainer.strategy, second.trainer.strategy):
        assert strategy._options == expected
        assert strategy._timeout == strategy._options.timeout == expected.timeout


@pytest.mark.parametrize("option", ["grad_dtype=float33", "module_buffers=maybe", "nothing=1"])
def test_a_wrong_option_is_refused_by_the_parser(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(f"--trainer.strategy={CLASS}", f"--trainer.strategy.{option}")
    assert option.split("=")[0] in capsys.readouterr().err
