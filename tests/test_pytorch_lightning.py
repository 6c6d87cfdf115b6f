"""Lightning's other package: the same strategies for ``pytorch_lightning`` and ``lightning_fabric``."""

import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

import lightning_bucketddp
from lightning_bucketddp.layout.registry import DP_NAMES, REGISTERED
from tests.lightning_models import QUIET, PoolEnvironment, Regression, data, ours, trainer
from tests.models import Mlp
from tests.pool import ROOT, on_ranks
from tests.reference import drift

pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
import lightning_fabric
import pytorch_lightning as pl

from lightning_bucketddp import pytorch_lightning as other

NAMES = ["BucketDDPFabricStrategy", "BucketDDPStrategy", "BucketDPStrategy", "CommunicationMonitor"]


def test_names_are_registered_in_both() -> None:
    from pytorch_lightning.strategies import StrategyRegistry

    assert {*REGISTERED, *DP_NAMES} <= set(StrategyRegistry)
    assert set(REGISTERED) <= set(lightning_fabric.strategies.STRATEGY_REGISTRY)
    assert isinstance(
        pl.Trainer(strategy="bucketdp", accelerator="cpu", devices=2, **QUIET).strategy, other.BucketDPStrategy
    )


@pytest.mark.parametrize("name", NAMES)
def test_classes_are_the_other_packages_from_one_source(name: str) -> None:
    mine, theirs = getattr(other, name), getattr(lightning_bucketddp, name)
    assert mine.__mro__[1].__module__.split(".")[0] in ("pytorch_lightning", "lightning_fabric", "lightning_bucketddp")
    assert not any(base.__module__.startswith("lightning.") for base in mine.__mro__)
    assert inspect.getsourcefile(mine) == inspect.getsourcefile(theirs)
    assert inspect.getsourcelines(mine) == inspect.getsourcelines(theirs)
    assert pickle.loads(pickle.dumps(mine)) is mine


def test_tracebacks_show_the_one_source() -> None:
    try:
        other.BucketDDPStrategy(start_method="never")
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
    assert {Path(frame.filename).parent.name for frame in frames[1:]} <= {"trainer", "layout"}
    assert "common.divided(" in (frames[1].line or "")


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("BucketDDPStrategy", (pl.Trainer, Trainer)),
        ("BucketDPStrategy", (pl.Trainer, Trainer)),
        ("BucketDDPFabricStrategy", (lightning_fabric.Fabric, Fabric)),
    ],
)
def test_the_other_packages_trainer_names_both_imports(name: str, launches: tuple[Any, Any]) -> None:
    user = launches[0].__name__
    words = [
        f"<{name} for `lightning`'s {user}. For `pytorch_lightning`'s: from {other.__name__} import",
        f"<{name} for `pytorch_lightning`'s {user}. For `lightning`'s: from lightning_bucketddp import",
    ]
    for module, launch, expected in zip((lightning_bucketddp, other), launches, words, strict=True):
        with pytest.raises(ValueError, match=re.escape(f"{expected} {name}>")):
            launch(strategy=getattr(module, name)(), accelerator="cpu", devices=2)


def _as_other(kind: type) -> Any:
    """A LightningModule of the tests as one of the other package: the same methods on other bases."""
    body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__", "__init__")}
    return type(kind.__name__, (pl.LightningModule,), body)


@on_ranks(2, cases=["plain", "sharded"])
def test_both_train_to_the_same_weights(kind: str) -> None:
    options = {"shard_optimizer": True} if kind == "sharded" else {}
    first = Regression()
    first.records = False
    trainer(ours(**options)).fit(first, data())
    second = _as_other(Regression)()
    torch.manual_seed(5)
    second.net, second.optimizer, second.records, second.after_backward, second.before_step = (
        Mlp(),
        "sgd",
        False,
        [],
        [],
    )
    environment = type(
        "Environment", (lightning_fabric.plugins.environments.LightningEnvironment,), dict(vars(PoolEnvironment))
    )
    strategy = other.BucketDDPStrategy(cluster_environment=environment(), bucket_cap_mb=0.0003, **options)
    options = {**QUIET, "accelerator": "cpu", "devices": dist.get_world_size(), "use_distributed_sampler": False}
    runs = pl.Trainer(strategy=strategy, max_epochs=1, **options)
    runs.fit(second, data())
    assert runs.global_step == 6
    assert drift(second) == 0
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


# ---- where `pytorch-lightning` alone is installed ---------------------------------------------------------

SELECTED = ["test_cli.py", "test_exact_resume.py", "test_fabric.py", "test_fit.py", "test_like_ddp.py", "test_ray.py"]
"""Of tests/trainer: a tenth of its cases and more."""

WITHOUT = """
from importlib.machinery import PathFinder

def without(kind, name, *given, found=PathFinder.find_spec):
    return None if name.split(".")[0] in {names!r} else found(name, *given)

PathFinder.find_spec = classmethod(without)
"""


def environment_without(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a process, and of those that it starts, in which packages cannot be found."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(WITHOUT.format(names=packages))
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.slow
def test_one_package_is_enough(tmp_path: Path) -> None:
    script = """
import lightning_bucketddp as ours
print(ours.BucketDDPStrategy.__mro__[2].__module__.split(".")[0])
print(ours.BucketDDPStrategy, ours.BucketDDP)
"""
    for missing, there, module in (
        ("lightning", "pytorch_lightning", "lightning_bucketddp.pytorch_lightning"),
        ("pytorch_lightning", "lightning", "lightning_bucketddp.trainer"),
    ):
        environment = environment_without(tmp_path, missing)
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert ran.stdout.split()[0] == there
        assert f"<class '{module}.strategy.BucketDDPStrategy'>" in ran.stdout


@pytest.mark.slow
def test_without_lightning_plain_pytorch_goes_on(tmp_path: Path) -> None:
    script = """
import lightning_bucketddp
assert lightning_bucketddp.BucketDDP
from lightning_bucketddp import BucketDDPStrategy
"""
    environment = environment_without(tmp_path, "lightning", "pytorch_lightning")
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: expected Lightning, as BucketDDPStrategy is for its Trainer or Fabric; found neither `lightning` "
        "nor `pytorch_lightning`. Install one: pip install lightning"
    )


@pytest.mark.slow
def test_selected_tests_pass_with_pytorch_lightning_alone(tmp_path: Path) -> None:
    """The tests for ``lightning``, with the other names."""
    names = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
    names["lightning_bucketddp.trainer"] = "lightning_bucketddp.pytorch_lightning"
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for file in (*tmp_path.rglob("*.py"), *tmp_path.rglob("*.yaml")):
        file.write_text(pattern.sub(lambda found: names[found[0]], file.read_text()))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *(f"tests/trainer/{name}" for name in SELECTED)]
    environment = environment_without(tmp_path / "without", "lightning")
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) > 60
