"""What the Trainer's strategy and Fabric's have in common: names, the end of processes, the view of optimizers."""

from __future__ import annotations

import atexit
import gc
from typing import Any, Literal

import torch.distributed as dist
from torch.optim import LBFGS, Optimizer

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

_START_METHODS: dict[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

REGISTERED: dict[str, dict[str, Any]] = {
    name + started + suffix: {"start_method": start_method, **sharded, **options}
    for name, sharded in (("bucketddp", {}), ("bucketddp_sharded", {"shard_optimizer": True}))
    for suffix, options in (
        ("", {}),
        ("_find_unused_parameters_true", {"find_unused_parameters": True}),
        ("_find_unused_parameters_false", {"find_unused_parameters": False}),
    )
    for started, start_method in _START_METHODS.items()
}
"""The names that are registered, as those of ``ddp``, and the options that they stand for."""


def register_names(strategy: type, registry: Any) -> None:
    """Adds the names to a registry of Lightning's; the ones that are there already are left alone."""
    for name, options in REGISTERED.items():
        if name not in registry:
            start_method = options["start_method"]
            sharded = " and a sharded optimizer" if options.get("shard_optimizer") else ""
            description = f"BucketDDP strategy with `start_method` {start_method!r}{sharded}"
            registry.register(name, strategy, description=description, **options)


def end_group_at_exit() -> None:
    """Has the default process group destroyed when this process ends.

    Lightning does this for NCCL only; a gloo process that exits with an open group aborts now and then.
    """
    atexit.register(_end_group)


def looks_at_loss(optimizer: Optimizer) -> bool:
    """Whether the loss may decide what an optimizer does: torch's look at none, but for LBFGS; others may."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return kind is LBFGS or not kind.__module__.startswith("torch.")


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Reference cycles, the Trainer's among them, keep the group and gloo's threads alive beyond that, and a process
    # that ends with those running aborts now and then.
    gc.collect()
