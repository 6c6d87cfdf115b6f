"""Imports point downwards, and private API that is built on is still there."""

import ast
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch._dynamo
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors import signal_connector
from torchmetrics import MeanMetric

import lightning_bucketddp
from lightning_bucketddp import BucketDPStrategy
from lightning_bucketddp.module_copies import _HOOKS

PACKAGE = Path(lightning_bucketddp.__file__).parent
LIGHTNING = "lightning"
ALLOWED: dict[str, set[str]] = {
    "layout": set(),
    "engine": set(),
    "schedule": set(),
    "gradient_hooks": {"engine"},
    "ready_times": set(),
    "link_cost": {"collectives", "schedule"},
    "planner": {"collectives", "layout", "link_cost", "ready_times", "schedule", "slots"},
    "nested": set(),
    "scattering": {"nested"},
    "round_robin": set(),
    "parallel_apply": {"round_robin", "scattering"},
    "flat_copies": {"layout"},
    "module_copies": set(),
    "replicas": {"flat_copies", "module_copies", "nested", "parallel_apply", "scattering"},
    "turns": set(),
    "gradient_checks": set(),
    "collectives": set(),
    "compiled": set(),
    "slots": {"layout"},
    "grad_buffer": {"layout"},
    "stepped_params": set(),
    "master_params": {"stepped_params"},
    "shards": {"layout"},
    "boxes": set(),
    "gathered_later": set(),
    "sharded_grad": {"gathered_later"},
    "shard_groups": {"collectives"},
    "sharded_runs": {"bucket_runs", "collectives", "layout", "shard_groups", "sharded_grad", "shards", "slots"},
    "sharded_params": {"layout", "master_params", "shards", "stepped_params"},
    "sharding": {
        "agreement",
        "collectives",
        "failures",
        "gathered_later",
        "layout",
        "master_params",
        "sharded_params",
        "sharded_runs",
        "shards",
        "slots",
    },
    "checkpoint_planners": {"boxes"},
    "sharded_checkpoint": {
        "boxes",
        "checkpoint_planners",
        "collectives",
        "master_params",
        "sharded_params",
        "sharding",
    },
    "sharded_calls": {"collectives", "master_params", "sharded_checkpoint", "sharded_params", "sharding"},
    "control": {"collectives"},
    "ready_order": {"collectives", "slots"},
    "agreement": {"collectives"},
    "module_state": {"collectives"},
    "module_params": {"agreement", "checks", "master_params", "options", "sparse_grads"},
    "options": {"collectives", "layout", "module_state"},
    "comm_hooks": {"collectives", "layout", "options"},
    "failures": {"agreement", "comm_hooks"},
    "common_end": {"agreement", "collectives"},
    "sync_batchnorm": {"agreement", "collectives", "failures"},
    "control_checks": {"agreement", "control", "failures"},
    "evened_loader": set(),
    "divisor": {"control", "options"},
    "sparse_grads": {"collectives", "gradient_checks", "slots"},
    "bucket_runs": {
        "collectives",
        "comm_hooks",
        "grad_buffer",
        "gradient_checks",
        "gradient_hooks",
        "layout",
        "slots",
    },
    "coalesced_runs": {"bucket_runs", "grad_buffer", "layout"},
    "trainable": {"agreement", "slots"},
    "tail_hooks": {"bucket_runs", "gradient_hooks", "slots"},
    "hook_registration": {"agreement", "comm_hooks", "failures", "options"},
    "reducer": {
        "agreement",
        "bucket_runs",
        "coalesced_runs",
        "collectives",
        "comm_hooks",
        "control",
        "control_checks",
        "diagnostics",
        "divisor",
        "engine",
        "failures",
        "gradient_checks",
        "gradient_hooks",
        "hook_registration",
        "layout",
        "module_params",
        "module_state",
        "options",
        "planner",
        "ready_order",
        "schedule",
        "shard_groups",
        "sharded_runs",
        "slots",
        "sparse_grads",
        "tail_hooks",
        "trainable",
        "turns",
    },
    "diagnostics": {"collectives", "layout", "slots"},
    "megatron": {"checks", "collectives", "master_params", "module_state", "reducer"},
    "uneven": {"checks", "collectives", "master_params", "module_state", "options", "reducer"},
    "replicated_forward": {"nested", "replicas", "scattering"},
    "checks": {"agreement", "gradient_hooks", "layout", "options", "sync_batchnorm"},
    "wrapper": {
        "agreement",
        "checks",
        "collectives",
        "comm_hooks",
        "compiled",
        "diagnostics",
        "gathered_later",
        "layout",
        "link_cost",
        "master_params",
        "megatron",
        "module_params",
        "module_state",
        "nested",
        "options",
        "planner",
        "reducer",
        "replicated_forward",
        "schedule",
        "shard_groups",
        "sharded_calls",
        "sharded_params",
        "sharded_runs",
        "sharding",
        "sync_batchnorm",
        "uneven",
    },
    "layer_sync": {"sync_batchnorm", "wrapper", LIGHTNING},
    "finetuning": {LIGHTNING},
    "strategy_common": {"diagnostics", "wrapper"},
    "spare_memory": set(),
    "shard_clipping": {"wrapper", LIGHTNING},
    "checkpoint_directories": {"collectives", "sharded_checkpoint", "wrapper", LIGHTNING},
    "strategy": {
        "checkpoint_directories",
        "collectives",
        "comm_hooks",
        "common_end",
        "evened_loader",
        "finetuning",
        "layer_sync",
        "module_state",
        "options",
        "shard_clipping",
        "sigterm",
        "spare_memory",
        "strategy_common",
        "uneven",
        "wrapper",
        LIGHTNING,
    },
    "sigterm": {LIGHTNING},
    "doubts": {LIGHTNING},
    "lockstep": {"nested"},
    "batch_division": {"nested", "scattering"},
    "merging": {"doubts", "nested", "scattering"},
    "replica_checks": {LIGHTNING},
    "replica_counters": {"replica_checks", "replica_lists", LIGHTNING},
    "replica_lists": {"doubts", "merging", "nested"},
    "replica_metrics": {"merging", "nested"},
    "replica_optimizers": {"merging"},
    "replica_profiler": {LIGHTNING},
    "replica_logging": {"doubts", "merging", "replica_metrics", LIGHTNING},
    "replica_methods": {"merging", "nested", "replica_logging", "replica_optimizers", LIGHTNING},
    "replica_step": {
        "batch_division",
        "doubts",
        "lockstep",
        "merging",
        "replica_checks",
        "replica_counters",
        "replica_lists",
        "replica_logging",
        "replica_methods",
        "replica_metrics",
        "replica_profiler",
        "replicas",
        "round_robin",
        LIGHTNING,
    },
    "dp_strategy": {"batch_division", "doubts", "module_copies", "replica_step", "replicas", LIGHTNING},
    "fabric": {"comm_hooks", "module_state", "options", "spare_memory", "strategy_common", "wrapper", LIGHTNING},
    "cli": {"__init__", "collectives", "dp_strategy", "strategy_common", LIGHTNING},
    "__main__": {"cli"},
    "__init__": {
        "agreement",
        "dp_strategy",
        "fabric",
        "gradient_checks",
        "sharded_params",
        "strategy",
        "sync_batchnorm",
        "wrapper",
    },
}


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """The package's own modules and the outside packages that a file imports, type-checking imports included."""
    own: set[str] = set()
    outside: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names = [node.module or ""]
        for name in names:
            parts = name.split(".")
            if parts[0] == "lightning_bucketddp":
                own.add(parts[1] if len(parts) > 1 else "__init__")
            else:
                outside.add(parts[0])
    return own, outside


def test_imports_point_downwards() -> None:
    files = {path.stem: path for path in PACKAGE.glob("*.py")}
    assert files.keys() == ALLOWED.keys(), "a file is missing from the table of allowed imports"
    for name, path in files.items():
        own, outside = imports_of(path)
        assert own <= ALLOWED[name], f"{name} may not import {own - ALLOWED[name]}"
        if LIGHTNING not in ALLOWED[name]:
            assert not outside & {"lightning", "pytorch_lightning", "lightning_utilities"}, name


def test_the_table_has_no_cycles() -> None:
    left = {name: allowed - {LIGHTNING} for name, allowed in ALLOWED.items()}
    while left:
        leaves = {name for name, allowed in left.items() if not allowed & left.keys()}
        assert leaves, f"cycle among {sorted(left)}"
        left = {name: allowed for name, allowed in left.items() if name not in leaves}


def test_only_collectives_calls_torch_distributed() -> None:
    for path in PACKAGE.glob("*.py"):
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "dist"
        }
        if path.stem in ("strategy", "strategy_common", "fabric"):  # Lightning owns the process group's life
            calls -= {"is_initialized", "destroy_process_group"}
        assert path.stem == "collectives" or not calls, f"{path.name} calls torch.distributed: {calls}"


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
    assert {"update", "compute"} <= vars(MeanMetric()).keys()
    assert BucketDPStrategy()._layer_sync is None
    assert issubclass(torch.nn.SyncBatchNorm, torch.nn.modules.batchnorm._BatchNorm)
    param = torch.nn.Parameter(torch.ones(1))
    assert isinstance(param._version, int)
    assert torch._C._storage_Use_Count(param.untyped_storage()._cdata) >= 1
    assert callable(torch._foreach_add_)
    assert hasattr(torch.autograd.function.BackwardCFunction, "_set_sequence_nr")
    assert callable(torch.nn.Module._replicate_for_data_parallel)
    assert set(_HOOKS) <= vars(torch.nn.Module()).keys()
    assert torch.nn.parameter.is_lazy(torch.nn.UninitializedParameter())
    assert isinstance(torch._dynamo.OptimizedModule, type)
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert len(param._post_accumulate_grad_hooks) == 1
