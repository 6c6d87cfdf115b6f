"""Imports point downwards, and private API that is built on is still there."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch._dynamo
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors import signal_connector
from torch.distributed.optim import _apply_optimizer_in_backward
from torchmetrics import MeanMetric, MetricCollection

import lightning_bucketddp
from lightning_bucketddp import BucketDPStrategy
from lightning_bucketddp.replicas.module_copies import HOOKS

PACKAGE = Path(lightning_bucketddp.__file__).parent
FOLDERS = ["layout", "comm", "peers", "grads", "reducer", "optim", "replicas", "wrapper", "trainer"]
"""From the bottom up: a file imports from its own folder and from those below."""


def folder_of(parts: Sequence[str]) -> int:
    """The rank of the folder that a path within the package begins with; the package's root is above all."""
    return FOLDERS.index(parts[0]) if parts and parts[0] in FOLDERS else len(FOLDERS)


def imports_of(path: Path) -> Iterator[list[str]]:
    """The dotted names that a file imports, in parts; those for type checkers alone included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            yield from ([*(node.module or "").split("."), alias.name] for alias in node.names)


def test_imports_point_downwards() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py"}
    assert sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")) == sorted(FOLDERS)
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE)
        for package, *parts in imports_of(path):
            if package == "lightning_bucketddp":
                assert folder_of(parts) <= folder_of(here.parts), f"{here} imports {'.'.join(parts)}, which is above it"
            elif package in ("lightning", "pytorch_lightning", "lightning_utilities"):
                assert folder_of(here.parts) >= FOLDERS.index("trainer"), f"{here} imports {package}"


def test_the_drawing_shows_these_folders() -> None:
    drawing = (PACKAGE.parent / "docs" / "house.md").read_text()
    assert re.findall(r"^ *\| (\w+)/ ", drawing, re.MULTILINE) == FOLDERS[::-1]


def test_only_comm_calls_torch_distributed() -> None:
    for path in PACKAGE.rglob("*.py"):
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "dist"
        }
        if path.parent.name == "trainer":  # Lightning owns the process group's life
            calls -= {"is_initialized", "destroy_process_group"}
        assert path.parent.name == "comm" or not calls, f"{path.name} calls torch.distributed: {calls}"


def test_private_and_undocumented_api_is_still_there() -> None:
    assert callable(torch.autograd.Variable._execution_engine.queue_callback)
    assert callable(dist.ProcessGroup.get_group_store)
    assert callable(torch._foreach_copy_)
    assert callable(torch._foreach_zero_)
    assert callable(dist.Store.clone)
    assert callable(_MultiProcessingLauncher._wrapping_function)
    assert hasattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module")
    assert isinstance(dist._DEFAULT_FIRST_BUCKET_BYTES, int)
    assert any(Path(folder) == PACKAGE for folder in torch._dynamo.trace_rules.SKIP_DIRS)
    assert signal_connector.dist is dist
    assert signal_connector._HandlersCompose.__module__ == signal_connector.__name__
    assert "_device" in vars(pl.LightningModule())
    assert "_device" in vars(MeanMetric())
    assert {"update", "compute", "_update_count", "_computed", "_forward_cache"} <= vars(MeanMetric()).keys()
    assert {"_groups", "_groups_checked", "_state_is_copy"} <= vars(MetricCollection([MeanMetric()])).keys()
    assert BucketDPStrategy()._layer_sync is None
    assert issubclass(torch.nn.SyncBatchNorm, torch.nn.modules.batchnorm._BatchNorm)
    param = torch.nn.Parameter(torch.ones(1))
    assert isinstance(param._version, int)
    assert callable(torch._foreach_add_)
    assert hasattr(torch.ones(1, requires_grad=True).clone().grad_fn, "_set_sequence_nr")
    assert callable(torch.nn.Module._replicate_for_data_parallel)
    assert {"_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks"} <= set(HOOKS)
    assert torch.nn.parameter.is_lazy(torch.nn.UninitializedParameter())
    assert isinstance(torch._dynamo.OptimizedModule, type)
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert len(param._post_accumulate_grad_hooks) == 1
    _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.1})
    assert len(param._in_backward_optimizers) == 1
