"""What ``--help``, YAML and the documentation show of options: names, defaults, types and texts."""

import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy
from packaging.version import Version

from lightning_bucketddp import BucketDDPFabricStrategy, BucketDDPStrategy
from tests.pool import ROOT

LISTED = Path(__file__).parent / "option_listing"
"""One line per argument: its name, its default in YAML, its type and its default in help."""
BASES = {BucketDDPStrategy: Strategy, BucketDDPFabricStrategy: FabricStrategy}
ENTRY = re.compile(r"--strategy\.(\w+),? (?:\S+ ){5,}\((type: .+, default: .+)\)")
"""A text of several words is between the name and the type."""


@pytest.mark.skipif(Version(version("jsonargparse")) < Version("4.53"), reason="older ones word types otherwise")
@pytest.mark.filterwarnings("ignore")  # of jsonargparse, of its own use by Lightning
@pytest.mark.parametrize("strategy", BASES)
def test_help_and_yaml_list_names_defaults_and_types(strategy: type, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=BASES[strategy])
    path = f"lightning_bucketddp.{strategy.__name__}"
    with pytest.raises(SystemExit):
        parser.parse_args([f"--strategy.help={path}"])
    help_ = " ".join(capsys.readouterr().out.partition("Help for")[2].split())
    help_ = re.sub(r", known subclasses: [^)]*", "", help_)
    entries = map(ENTRY.fullmatch, re.split(r"(?<!,) (?=--strategy\.)", help_))
    shown = dict(entry.groups() for entry in entries if entry is not None)
    written = parser.dump(parser.parse_args([f"--strategy={path}"]), skip_none=False)
    arguments = yaml.safe_load(written)["strategy"]["init_args"]
    assert list(shown) == list(arguments), "an argument without a text"
    torchs, lightnings = list(shown).index("broadcast_buffers"), list(shown).index("accelerator")
    assert list(shown).index("report_after") < torchs < lightnings, "Lightning's arguments come last"
    lines = [f"{name}: {value}  # {shown[name]}" for name, value in arguments.items()]
    assert lines == (LISTED / f"{strategy.__name__}.txt").read_text().splitlines()
    assert parser.dump(parser.parse_object(yaml.safe_load(written)), skip_none=False) == written


def test_the_documentation_lists_all_options_and_calls() -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    for page, text in reference["pages"]().items():
        assert page.read_text() == text, f"{page.name}: run `python docs/reference.py`"
        for name in re.findall(r"^(\w+):", (LISTED / "BucketDDPStrategy.txt").read_text(), re.MULTILINE):
            assert page.name != "options.md" or text.count(f"\n| `{name}` | `") == 1, name
