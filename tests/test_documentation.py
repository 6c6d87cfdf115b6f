"""README and the pages of ``docs/``: their code runs, and every error has its entry in the troubleshooting page."""

import ast
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_bucketddp
from tests.pool import ROOT, RunRanks

PACKAGE = Path(lightning_bucketddp.__file__).parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
FENCE = re.compile(r"^```(\w*)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
NOT_RUN = 'title="Not run: '
"""Begins the fence's attribute of a block that one CPU process cannot run, before the reason."""
RESULTS = ROOT / "benchmarks" / "results"
LANGUAGES = {"python", "bash", "text", "yaml", ""}


def blocks_of(page: Path) -> list[str]:
    found = FENCE.findall(page.read_text())
    return [code for language, attribute, code in found if language == "python" and NOT_RUN not in attribute]


def test_fences_are_closed_and_few_blocks_are_not_run() -> None:
    assert len(PAGES) > 15
    for page in PAGES:
        text = page.read_text()
        found = FENCE.findall(text)
        assert 2 * len(found) == len(re.findall("^```", text, re.MULTILINE)), f"{page.name}: a fence is not closed"
        assert {language for language, *_ in found} <= LANGUAGES, page.name
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


def syntax_trees() -> Iterator[ast.AST]:
    for path in PACKAGE.rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


def test_every_error_class_has_its_entry() -> None:
    kinds = {"Exception", "BaseException"}
    classes = [node for node in syntax_trees() if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    while more := {node.name for node in classes if any(_is_error(base, kinds | found) for base in node.bases)} - found:
        found |= more
    assert {"PeerFailureError", "GradientError", "CommHookError"} <= found
    entries = set(re.findall(r"^### (\w+)$", TROUBLESHOOTING, re.MULTILINE))
    assert found <= entries, f"without an entry: {found - entries}"


def _is_error(base: ast.expr, known: set[str]) -> bool:
    name = ast.unparse(base).split(".")[-1]
    return name in known or name.endswith(("Error", "Exception", "Warning"))


def test_messages_of_the_troubleshooting_page_are_the_package_s() -> None:
    texts = []
    for node in syntax_trees():
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    messages = TROUBLESHOOTING.partition("## The most common messages")[2]
    headings = [heading.replace("`", "") for heading in re.findall(r"^### (.+)$", messages, re.MULTILINE)]
    assert len(headings) >= 10
    for heading in headings:
        pieces = [piece.strip() for piece in heading.split("…")]
        assert any(all(piece in text.replace("`", "") for piece in pieces) for text in texts), heading


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


def test_figures_in_tables_are_those_of_the_files_that_are_cited_above_them() -> None:
    """In the same section, or in the table. As far as they have decimal places and are no sizes; seconds may be ms."""
    checked = 0
    for page in PAGES:
        text = page.read_text()
        for table in TABLE.finditer(text):
            above = text[text.rindex("\n#", 0, table.start()) if "\n#" in text[: table.start()] else 0 : table.end()]
            files = [RESULTS / name for name in re.findall(r"results/([\w-]+\.txt)", above)]
            known = [float(figure) for file in files for figure in re.findall(r"\d+(?:\.\d+)?", file.read_text())]
            cells = re.sub(r"`.*?`|\(.*?\)|[\d.]+ MB", "", table[0])
            for number, unit in re.findall(r"(?<![\w.])(\d+\.\d+)(?![\w.])( s)?", cells) if files else ():
                places, scale = len(number.partition(".")[2]), 1e3 if unit else 1
                assert number in {f"{figure / scale + 1e-9:.{places}f}" for figure in known}, page.name
                checked += 1
    assert checked > 170


def test_figures_over_the_link_are_those_of_the_file() -> None:
    """In whole per cent of the time that ``ddp`` needs as shipped."""
    pages = {name: (ROOT / name).read_text() for name in ("README.md", "docs/performance.md")}
    assert "2026-11-26-link.png" in pages["docs/performance.md"]
    assert "docs/pictures/step.svg" in pages["README.md"]
    shares, steps = dict[str, str](), dict[str, str]()
    for line in (RESULTS / "2026-11-26-link.txt").read_text().splitlines():
        row = re.match(r"(\S.*?)  +(\d+) +(\d\.\d{3})(?: |$)", line)
        if row is not None:
            shares[row[1]], steps[row[1]] = f"{100 * float(row[3]) + 1e-9:.0f} %", f"{row[2]} ms"
    words = {
        "bucketddp": "`bucketddp` needs {} of the time",
        "bound for an all-reduce": "No all-reduce could need less than {}",
        "bucketddp_sharded": "A sharded optimizer needs {}",
        "bucketddp, bf16 wire": "sixteen bits on the wire {} (",
    }
    readme = " ".join(pages["README.md"].split())
    assert [name for name, text in words.items() if text.format(shares[name]) not in readme] == []
    rows = {
        "unsynchronised": "without synchronisation",
        "bucketddp, bf16 wire": '`wire_dtype="bfloat16"`, which sums in fp32',
        "bucketddp_sharded": "`bucketddp_sharded`",
        "bucketddp": "`bucketddp`",
        "bound for an all-reduce": "no all-reduce can need less than",
        "bound for a sharded optimizer": "no sharded optimizer can need less than",
        "ddp as shipped": "`ddp` as shipped",
    }
    table = re.findall(r"^\| (.+?) \| \d+ ms \| (\d+ %) \|$", pages["docs/performance.md"], re.MULTILINE)
    assert {(text, shares[name]) for name, text in rows.items()} - set(table) == set()
    picture = (ROOT / "docs" / "pictures" / "step.svg").read_text()
    assert f">{steps['ddp as shipped']}<" in picture
    assert f">{steps['bucketddp']}<" in picture
    home = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert f"`ddp` reaches {steps['ddp, best flags, 1 MiB']}" in home
