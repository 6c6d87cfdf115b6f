"""Every private name of torch, Lightning and torchmetrics that the package uses, in one table: a release may remove it.

Where the package can do without a name, it asks for it by ``getattr`` with a default.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_bucketddp

PACKAGE = Path(lightning_bucketddp.__file__).parent
SCRIPTS = "lightning.fabric.strategies.launchers.subprocess_script"
GROUP = "torch.distributed.ProcessGroup"
LAUNCHERS = "lightning.pytorch.strategies.launchers"
EPOCH = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
FIT = "lightning.pytorch.loops.fit_loop._FitLoop"
SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector"
CHECKPOINTS = "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector"
DDP = "torch.nn.parallel.DistributedDataParallel"
CONNECTOR = "lightning.pytorch.trainer.connectors.logger_connector.logger_connector"
RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"
OWNERS = {
    "_BatchNorm": "torch.nn.modules.batchnorm",
    "_C": "torch",
    "_LoggerConnector": CONNECTOR,
    "_Metadata": RESULT,
    "_MultiProcessingLauncher": LAUNCHERS,
    "_ResultCollection": RESULT,
    "_ResultMetric": RESULT,
    "_SubprocessScriptLauncher": LAUNCHERS,
    "_Sync": RESULT,
    "_accelerator_getStream": "torch._C",
    "_active_ddp_module": DDP,
    "_amp_foreach_non_finite_check_and_unscale_": "torch",
    "_batches_that_stepped": EPOCH,
    "_combined_loader": FIT,
    "_broadcast_sigterm_tensor": EPOCH,
    "_check_input_dim": "torch.nn.BatchNorm1d",
    "_cdata": "torch.UntypedStorage",
    "_checkpoint_connector": "lightning.pytorch.Trainer",
    "_ckpt_path": CHECKPOINTS,
    "_compiled_call_impl": "torch.nn.Module",
    "_computed": "torchmetrics.Metric",
    "_current_autograd_node": "torch._C",
    "_ddp_params_and_buffers_to_ignore": DDP,
    "_data_fetcher": FIT,
    "_dynamo": "torch",
    "_execution_engine": "torch.autograd.Variable",
    "_first_loop_iter": f"{CONNECTOR}._LoggerConnector",
    "_foreach_copy_": "torch",
    "_foreach_mul_": "torch",
    "_foreach_norm": "torch",
    "_foreach_zero_": "torch",
    "_forward_cache": "torchmetrics.Metric",
    "_get_backend": GROUP,
    "_get_sequence_number_for_group": GROUP,
    "_groups_checked": "torchmetrics.MetricCollection",
    "_in_backward_optimizers": "torch.distributed.optim.apply_optimizer_in_backward",
    "_hpc_resume_path": CHECKPOINTS,
    "_is_profiler_enabled": "torch.autograd.profiler",
    "_join_config": "torch.distributed.algorithms.join.Joinable",
    "_loaded_checkpoint": CHECKPOINTS,
    "_logger_connector": "lightning.pytorch.Trainer",
    "_modules": "torch.nn.Module",
    "_nested_dict": "torch.distributed.checkpoint",
    "_on_before_fetch": EPOCH,
    "_parameters": "torch.nn.Module",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_restarting": "lightning.pytorch.loops.loop._Loop",
    "_results": "lightning.pytorch.Trainer",
    "_set_sequence_nr": "torch._C._functions.AccumulateGrad",
    "_should_accumulate": EPOCH,
    "_signal_connector": "lightning.pytorch.Trainer",
    "_sigterm_notifier_fn": SIGNALS,
    "_skip_next_val": EPOCH,
    "_slurm_sigusr_handler_fn": SIGNALS,
    "_start_method": "lightning.pytorch.strategies.DDPStrategy",
    "_storage_Use_Count": "torch._C",
    "_update_count": "torchmetrics.Metric",
    "_version": "torch.Tensor",
    "_will_engine_execute_node": "torch._C",
}
PYTHONS = {"_current_frames", "_exit", "_fields", "_replace"}
"""Documented, for all their underscores."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def own_names(tree: ast.Module) -> Iterator[str]:
    """Names that a file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def used_names(tree: ast.Module) -> Iterator[str]:
    """Private names that a file reads as attributes, imports or asks for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_bucketddp"):
            yield from (*(node.module or "").split("."), *(alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield from (
                arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def test_the_table_has_every_private_name() -> None:
    files = trees()
    own = {name for tree in files for name in own_names(tree)}
    used = {name for tree in files for name in used_names(tree) if is_private(name)}
    assert used - own - PYTHONS == set(OWNERS)


@pytest.mark.parametrize("name", OWNERS)
def test_the_name_is_still_there(name: str) -> None:
    owner: Any = pkgutil.resolve_name(OWNERS[name])
    if not hasattr(owner, name):  # an attribute of instances, or a module that nobody has imported
        submodule = f"{OWNERS[name]}.{name}"
        assert name in inspect.getsource(owner) or importlib.import_module(submodule)
