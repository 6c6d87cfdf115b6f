"""MkDocs hook: pages link to examples, tests and benchmark figures by their path in the repository, as GitHub does."""

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
