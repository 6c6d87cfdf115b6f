"""What the Trainer's strategy and Fabric's have in common: names, calls of the wrapper, the end of processes."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.optim import LBFGS, Optimizer

from lightning_bucketddp.layout.require import require
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP
from lightning_bucketddp.wrapper.runtime import require_fit_group

_P = ParamSpec("_P")
_R = TypeVar("_R")

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


def forwarded(call: Callable[Concatenate[BucketDDP, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """A strategy's method that makes a call of :class:`BucketDDP`, with its name and its arguments.

    The strategy's ``_wrapper_for(name)`` finds the wrapper, or raises where there is none.
    """

    @wraps(call)
    def method(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return getattr(self._wrapper_for(call.__name__), call.__name__)(*args, **kwargs)

    return method


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


@contextmanager
def group_set_up(timeout: timedelta | None) -> Iterator[None]:
    """A context in which Lightning sets up the default process group, unless there is one already.

    A new one is destroyed when this process ends. Lightning does this for NCCL only; a gloo process that exits with an
    open group aborts now and then. One of an earlier run is looked at, as Lightning's own collectives come before the
    module is wrapped: see :func:`require_fit_group`.
    """
    is_new = not dist.is_initialized()
    yield
    if not is_new:
        require_fit_group(None, timeout)
    elif dist.is_initialized():  # not where a test mocks `init_process_group`
        atexit.register(_end_group)


def looks_at_loss(optimizer: Optimizer) -> bool:
    """Whether the loss may decide what an optimizer does: torch's look at none, but for LBFGS; others may."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return kind is LBFGS or not kind.__module__.startswith("torch.")


def stepping(wrapper: BucketDDP, optimizer: Optimizer) -> AbstractContextManager[object]:
    """A context for ``optimizer.step``, which is made on masters or on this rank's shard where there are any."""
    masters = wrapper.prepare_optimizer(optimizer)
    return nullcontext() if masters is None else masters.restored_after()


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Reference cycles, the Trainer's among them, keep the group and gloo's threads alive beyond that, and a process
    # that ends with those running aborts now and then.
    gc.collect()
