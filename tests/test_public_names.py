"""What users import stays where it is, whichever file it lives in."""

import importlib
import pickle
import re

import pytest

from lightning_bucketddp import BucketDDP, __version__
from tests.pool import ROOT

PUBLIC_NAMES = {
    "lightning_bucketddp": """
        BatchSizeFinder BucketDDP BucketDDPFabricStrategy BucketDDPStrategy BucketDPStrategy CommunicationMonitor
        GradientError Options PeerFailureError PreemptionCheckpoint RankMismatchError WrapError __version__
        convert_sync_batchnorm declare_element_wise declare_whole_parameter revert_sync_batchnorm""",
    "lightning_bucketddp.replicas": "Replicas data_parallel gather parallel_apply replicate scatter",
    "lightning_bucketddp.trainer.ray": "RayBucketDDPStrategy",
    "lightning_bucketddp.wrapper": "BucketDDP",  # pickles name it
}
PUBLIC = {path: names.split() for path, names in PUBLIC_NAMES.items()}
IMPORT = re.compile(r"^ *from (lightning_bucketddp[\w.]*) import (.+)$", re.MULTILINE)
CLASS_PATH = re.compile(r"\b(lightning_bucketddp)\.([A-Z]\w+)")


@pytest.mark.parametrize("path", PUBLIC)
def test_public_names_can_be_imported(path: str) -> None:
    if path.endswith(".ray"):
        pytest.importorskip("ray", reason="Ray is not installed")
    module = importlib.import_module(path)
    assert [name for name in PUBLIC[path] if not hasattr(module, name)] == []
    assert set(PUBLIC[path]) <= set(getattr(module, "__all__", PUBLIC[path]))


def test_what_documentation_and_examples_import_is_public() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files = [*pages, *(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.yaml")]
    found: set[tuple[str, str]] = set()
    for text in (file.read_text() for file in files):
        found |= {(path, name.strip()) for path, names in IMPORT.findall(text) for name in names.split(",")}
        found |= set(CLASS_PATH.findall(text))
    assert {("lightning_bucketddp", "BucketDDPStrategy"), ("lightning_bucketddp.replicas", "scatter")} <= found
    assert {(path, name) for path, name in found if name not in PUBLIC.get(path, [])} == set()


def test_files_name_one_version() -> None:
    for name in ("pyproject.toml", "CITATION.cff", ".ci/conda/recipe.yaml"):
        found = re.search(r'^ *version(?: =|:) "?([\w.]+)', (ROOT / name).read_text(), re.MULTILINE)
        assert found is not None
        assert found[1] == __version__, name


def test_pickles_of_0_1_0_find_the_wrapper() -> None:
    assert pickle.loads(b"clightning_bucketddp.wrapper\nBucketDDP\n.") is BucketDDP
