"""MkDocs hook: links to examples, tests and benchmark figures work as on GitHub; long names may end a line."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
SHOWN = (
    "examples/*.py",
    "examples/*.ipynb",
    "examples/*.yaml",
    "examples/launch/*",
    "benchmarks/results/*.png",
    "benchmarks/results/*.txt",
    "tests/*/test_*.py",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files to which pages link to the site."""
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Point links into the repository to the added files."""
    for folder in ("examples", "benchmarks", "tests"):
        markdown = markdown.replace(f"](../{folder}/", f"]({folder}/")
    return markdown


def on_page_content(html: str, **_: object) -> str:
    """Let names in tables end a line behind a mark, so that phones do not cut words."""
    return re.sub(r"(?<=<code>)[^<]+(?=</code>)", lambda name: re.sub(r"([_./=]+)(?=\w)", r"\1<wbr>", name[0]), html)
