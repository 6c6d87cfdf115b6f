"""Communication hooks that tests use, and other ways for buckets to travel."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

HOOKS: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16_wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "bf16_wrapper": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    "noop": noop_hook,
}


def disguised(hook: Callable[..., Any]) -> Callable[..., Any]:
    """torch DDP refuses its bf16 hooks by their name where there is no NCCL, though they work on gloo."""

    def reference(state, bucket):  # without annotations: torch DDP insists on its own class
        return hook(state, bucket)

    return reference


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "allreduce": {"comm_hook": default_hooks.allreduce_hook},
    "own hook": {"comm_hook": type("Own", (), {"__call__": staticmethod(HOOKS["allreduce"]), "__hash__": None})()},
    "wire": {"wire_dtype": torch.bfloat16},
}


def options_for(way: str) -> dict[str, Any]:
    if way == "powersgd":
        return {"comm_hook": "powersgd", "comm_hook_state": PowerSGDState(None, 1, 2, orthogonalization_epsilon=1e-8)}
    return WAYS[way]
