"""What the Trainer's strategy and Fabric's have in common: names, calls of the wrapper, the end of processes."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_bucketddp.layout.require import require
from lightning_bucketddp.reducer.record import PassRecord
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP

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


class WrapperCalls:
    """Calls of :class:`BucketDDP` that a strategy passes on to the module that it has wrapped.

    Each raises RuntimeError where there is no such module. Gradients are as optimizers see them in
    ``on_before_optimizer_step``; in ``on_after_backward`` fp16 mixed precision has them scaled.
    """

    def _wrapper_for(self, call: str) -> BucketDDP:
        """The wrapper, for a call of that name."""
        raise NotImplementedError

    def count_tokens(self, tokens: int | Tensor) -> None:
        """Adds to what gradients will be divided by; see :meth:`BucketDDP.count_tokens`."""
        self._wrapper_for("count_tokens").count_tokens(tokens)

    def last_pass(self) -> PassRecord | None:
        """What happened in the last synchronised pass; see :meth:`BucketDDP.last_pass`."""
        return self._wrapper_for("last_pass").last_pass()

    def full_grad(self, param: Tensor) -> Tensor | None:
        """A copy of a parameter's whole gradient; None if it has none. All ranks must call this."""
        return self._wrapper_for("full_grad").full_grad(param)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: Iterable[Tensor] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips gradients by their norm, on all ranks; see :meth:`BucketDDP.clip_grad_norm_`."""
        wrapper = self._wrapper_for("clip_grad_norm_")
        return wrapper.clip_grad_norm_(max_norm, norm_type, parameters, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[Tensor] | None = None) -> None:
        """Clips each gradient's values, on all ranks; see :meth:`BucketDDP.clip_grad_value_`."""
        self._wrapper_for("clip_grad_value_").clip_grad_value_(clip_value, parameters)


def require_start_method(start_method: object) -> None:
    """Require that this platform can start processes that way."""
    here = ("popen", *torch.multiprocessing.get_all_start_methods())
    wanted = f"one of {here}, the start methods that are available on this platform"
    require("start_method", start_method, wanted, str, lambda one: one in here)


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
