"""README and the pages of ``docs/`` are right.

Each page's Python code runs, in a process of its own. What pages say of errors, messages, figures and files is compared
with the package's source, the results of benchmarks and the folders.
"""

import ast
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_bucketddp
from tests.pool import ROOT, RunRanks

PACKAGE = Path(lightning_bucketddp.__file__).parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def in_one_line(page: str) -> str:
    return " ".join(text_of(page).split())


# -- code --------------------------------------------------------------------------------------------------------------

FENCE = re.compile(r"^```(\w*)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
"""A block of code: its language, its attributes, its lines."""
NOT_RUN = 'title="Not run: '
"""Begins the attribute of a block that one CPU process cannot run, before the reason."""


def blocks_of(page: Path) -> list[str]:
    found = FENCE.findall(page.read_text())
    return [code for language, attribute, code in found if language == "python" and NOT_RUN not in attribute]


def test_blocks_of_code_are_closed_and_in_known_languages() -> None:
    for page in PAGES:
        blocks, fences = FENCE.findall(page.read_text()), re.findall("^```", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks), f"{page.name}: a fence is not closed"
        assert {language for language, *_ in blocks} <= {"python", "bash", "text", "yaml", ""}, page.name


def test_few_blocks_are_not_run() -> None:
    assert len(PAGES) > 15
    assert sum(page.read_text().count(NOT_RUN) for page in PAGES) <= 2


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.stem)
def test_code_of_a_page_runs(run_ranks: RunRanks, page: Path) -> None:
    run_ranks(1, run_page, str(page), fresh=True)


def run_page(path: str) -> None:
    """Run a page's blocks one after the other, as a reader would in a notebook."""
    page = Path(path)
    os.chdir(tempfile.mkdtemp())
    os.environ["LOCAL_RANK"] = "0"  # as launchers do: Lightning then starts no other process where devices=2
    os.environ |= {"LT_ACCELERATOR": "cpu", "PL_TRAINER_ACCELERATOR": "cpu", "PL_TRAINER_LOGGER": "False"}
    os.environ |= {"PL_TRAINER_ENABLE_PROGRESS_BAR": "False", "PL_TRAINER_ENABLE_MODEL_SUMMARY": "False"}
    names = what_readers_have()
    for code in blocks_of(page):
        before = page.read_text().partition(code)[0]
        exec(compile("\n" * before.count("\n") + code, page.name, "exec"), names)


def what_readers_have() -> dict[str, Any]:
    """The LightningModule, its data and the module that the documentation takes for granted."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(filter(lambda param: param.requires_grad, self.parameters()), lr=0.01)

    data = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 4)), batch_size=4)
    return {"__name__": "page", "model": Model(), "data": data, "module": torch.nn.Linear(8, 4)}


# -- the troubleshooting page ------------------------------------------------------------------------------------------


@cache
def source() -> list[ast.AST]:
    """The nodes of the package's syntax trees."""
    return [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]


def error_classes() -> set[str]:
    """The package's exceptions and warnings, by name."""
    classes = [node for node in source() if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base).split(".")[-1] for base in node.bases} - {node.name} for node in classes}

    def is_error(name: str) -> bool:
        return name.endswith(("Error", "Exception", "Warning")) or any(map(is_error, bases.get(name, ())))

    return {name for name in bases if is_error(name)}


def strings() -> Iterator[str]:
    """The strings in the package's code, with an ellipsis for each value that is put in."""
    for node in source():
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_error_class_has_its_entry() -> None:
    entries = re.findall(r"^### (\w+)$", text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert {"PeerFailureError", "GradientError", "CommHookError"} <= error_classes() <= set(entries)


def test_messages_of_the_troubleshooting_page_are_the_package_s() -> None:
    messages = text_of("docs/troubleshooting.md").partition("## The most common messages")[2].replace("`", "")
    headings = re.findall(r"^### (.+)$", messages, re.MULTILINE)
    assert len(headings) >= 10
    texts = [text.replace("`", "") for text in strings()]
    for heading in headings:
        pieces = [piece.strip() for piece in heading.split("…")]
        assert any(all(piece in text for piece in pieces) for text in texts), heading


# -- lists of files ----------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r"^ +- [^#\n]+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {page.name for page in PAGES} - {"README.md"} <= set(listed)


def test_each_test_file_is_in_the_table_of_features_once() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| feature |")[2].partition("\n\n")[0]
    files = [path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(re.findall(r"`([\w/]*test_\w+\.py)`", table)) == sorted(files)


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 160, "the list of pages has a line for each"
    assert sum(len(line.split()) for line in lines) <= 900


# -- figures -----------------------------------------------------------------------------------------------------------

RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def cited_tables(page: Path) -> Iterator[tuple[str, list[str]]]:
    """A page's tables, with the texts of the results that are cited in the same section above them, or in them."""
    text = page.read_text()
    for table in TABLE.finditer(text):
        section = max(text.rfind("\n#", 0, table.start()), 0)
        files = re.findall(r"results/([\w.-]+\.txt)", text[section : table.end()])
        if files:
            yield table[0], [(RESULTS / file).read_text() for file in files]


def test_figures_in_tables_are_those_of_the_files_that_are_cited_above_them() -> None:
    """As far as they have decimal places and are no sizes. A table may have seconds where the file has ms."""
    checked = 0
    for page in PAGES:
        for table, results in cited_tables(page):
            measured = [float(figure) for result in results for figure in re.findall(r"\d+(?:\.\d+)?", result)]
            cells = re.sub(r"`.*?`|\(.*?\)|[\d.]+ MB", "", table)
            for figure, seconds in re.findall(r"(?<![\w.])(\d+\.\d+)(?![\w.])( s)?", cells):
                places, scale = len(figure.partition(".")[2]), 1000 if seconds else 1
                assert figure in {f"{each / scale + 1e-9:.{places}f}" for each in measured}, page.name
                checked += 1
    assert checked > 170


@cache
def over_the_link(result: str = "2026-11-26-link") -> dict[str, tuple[str, str]]:
    """Each peer's step, and its share of the time that ``ddp`` needs as shipped: ``("378 ms", "81 %")``."""
    text = (RESULTS / f"{result}.txt").read_text()
    rows = re.findall(r"^(\S.*?)  +(\d+) +(\d\.\d{3})(?: .*)?$", text, re.MULTILINE)
    return {peer: (f"{step} ms", f"{100 * float(share) + 1e-9:.0f} %") for peer, step, share in rows}


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ("bucketddp", "`bucketddp` needs {} of the time"),
        ("bound for an all-reduce", "No all-reduce could need less than {}"),
        ("bucketddp_sharded", "A sharded optimizer needs {}"),
        ("bucketddp, bf16 wire", "sixteen bits on the wire {} ("),
    ],
)
def test_figures_over_the_link_in_the_readme_are_measured(peer: str, words: str) -> None:
    _, share = over_the_link()[peer]
    assert words.format(share) in in_one_line("README.md")


def test_figures_of_two_hosts_of_four_ranks_in_the_readme_are_measured() -> None:
    peers = over_the_link("2026-11-29-link-2x4-4-times-slower")
    named = ("bucketddp", "bucketddp_sharded", "bucketddp, bf16 wire", "ddp, best flags, 1 MiB")
    words = "it needs {}, a sharded optimizer {}, sixteen bits {}, and `ddp` tuned by hand {}."
    assert words.format(*(peers[peer][1] for peer in named)) in in_one_line("README.md")


@pytest.mark.parametrize(
    ("peer", "row"),
    [
        ("unsynchronised", "without synchronisation"),
        ("bucketddp, bf16 wire", '`wire_dtype="bfloat16"`, which sums in fp32'),
        ("bucketddp_sharded", "`bucketddp_sharded`"),
        ("bucketddp", "`bucketddp`"),
        ("bound for an all-reduce", "no all-reduce can need less than"),
        ("bound for a sharded optimizer", "no sharded optimizer can need less than"),
        ("ddp as shipped", "`ddp` as shipped"),
    ],
)
def test_figures_over_the_link_in_the_table_are_measured(peer: str, row: str) -> None:
    step, share = over_the_link()[peer]
    assert f"| {row} | {step} | {share} |\n" in text_of("docs/performance.md")


def test_figures_over_the_link_in_pictures_are_measured() -> None:
    assert "2026-11-26-link.png" in text_of("docs/performance.md")
    assert "docs/pictures/step.svg" in text_of("README.md")
    for peer in ("ddp as shipped", "bucketddp"):
        step, _ = over_the_link()[peer]
        assert f">{step}<" in text_of("docs/pictures/step.svg")


def test_figures_over_the_link_on_the_first_page_are_measured() -> None:
    step, _ = over_the_link()["ddp, best flags, 1 MiB"]
    assert f"`ddp` reaches {step}" in in_one_line("docs/index.md")
