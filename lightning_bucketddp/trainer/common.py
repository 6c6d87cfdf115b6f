"""Shared by the strategies for Trainer and Fabric: registered names, forwarded calls, the process group's life."""

from __future__ import annotations

import atexit
import gc
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.registry import FOLDERS
from lightning_bucketddp.layout.require import require
from lightning_bucketddp.peers.machines import Node
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP
from lightning_bucketddp.wrapper.runtime import require_fit_group

_P = ParamSpec("_P")
_R = TypeVar("_R")

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def described(strategy: object) -> str:
    """Say which of Lightning's packages a strategy is for. The other's Trainer shows this when it refuses it."""
    imports = {"lightning": "lightning_bucketddp", "pytorch_lightning": FOLDERS["pytorch_lightning"]}
    here, other = imports if __name__.startswith(FOLDERS["lightning"]) else reversed(imports)
    name = next(kind.__name__ for kind in type(strategy).__mro__ if kind.__module__.startswith("lightning_bucketddp."))
    user = "Fabric" if "Fabric" in name else "Trainer"
    return f"<{type(strategy).__name__} for `{here}`'s {user}. For `{other}`'s: from {imports[other]} import {name}>"


def forwarded(call: Callable[Concatenate[BucketDDP, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Make a strategy's method that calls the method of the same name of its :class:`BucketDDP`.

    The strategy's ``_wrapper_for(name)`` returns the wrapper, or raises if there is none.
    """

    @wraps(call)
    def method(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return getattr(self._wrapper_for(call.__name__), call.__name__)(*args, **kwargs)

    return method


def list_options(init: Callable[_P, None]) -> Callable[_P, None]:
    """Let ``help()``, ``--help`` and ``inspect.signature`` list every option of a strategy's constructor by itself.

    First come keyword-only arguments, then this package's options, torch DDP's and Lightning's. Calls stay the same.
    """
    first, *shown = inspect.signature(init).parameters.values()
    torchs, types = inspect.signature(DistributedDataParallel).parameters, get_type_hints(Options)
    own = [each for each in shown if each.kind is each.KEYWORD_ONLY]
    lightnings = [each.replace(kind=each.KEYWORD_ONLY) for each in shown if each.kind is each.POSITIONAL_OR_KEYWORD]
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
        for each in sorted(fields(Options), key=lambda each: each.name in torchs)
        if all(each.name != other.name for other in lightnings)
    ]
    init.__signature__ = inspect.Signature([first, *own, *options, *lightnings])  # type: ignore[attr-defined]
    init.__doc__ = Options.__doc__
    return init


class BucketDDPInLightning(BucketDDP):
    """A wrapper that a strategy makes. Lightning's ``num_nodes`` says whether there are several machines.

    Its default of 1 says nothing: some clusters have several nodes all the same.

    Args:
        module: The module.
        strategy: The strategy, for Trainer or Fabric.
        options: As for :class:`BucketDDP`.
    """

    def __init__(self, module: Module, strategy: Any, **options: Any) -> None:
        if strategy.num_nodes > 1:
            self._node = Node(strategy.node_rank, strategy.num_processes)  # before ranks wrap the module
        super().__init__(module, **options)


def leave_shared_memory(module: Module, start_method: str | None) -> None:
    """Give a module memory of its own on this rank, if the ranks were started by ``"forkserver"``.

    torch puts CPU tensors that it passes to started processes into memory that these share. Every rank would change the
    weights of all. Lightning does the same for ``"spawn"``.
    """
    for tensor in (*module.parameters(), *module.buffers()) if start_method == "forkserver" else ():
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def require_start_method(start_method: object) -> None:
    """Require a start method that this platform has."""
    available = ("popen", *torch.multiprocessing.get_all_start_methods())
    wanted = f"one of {available}, the start methods on this platform"
    require("start_method", start_method, wanted, str, available.__contains__)


@contextmanager
def group_set_up(timeout: timedelta | None) -> Iterator[None]:
    """A context in which Lightning sets up the default process group, unless there is one already.

    A new group is destroyed when this process ends. Lightning does this for NCCL only, and a gloo process that exits
    with an open group sometimes aborts. A group of an earlier run is checked (:func:`require_fit_group`), because
    Lightning uses it before the module is wrapped.
    """
    is_new = not dist.is_initialized()
    yield
    if not is_new:
        require_fit_group(None, timeout)
    elif dist.is_initialized():  # not if a test mocks `init_process_group`
        atexit.register(_end_group, os.getpid())


def _end_group(pid: int) -> None:
    if os.getpid() != pid:  # a child that was forked: gloo's threads are not there
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # the Trainer's reference cycles keep gloo's threads alive, and a process may abort at exit with them


def looks_at_loss(optimizer: Optimizer) -> bool:
    """Whether an optimizer may use the loss: of torch's own only LBFGS does, others are assumed to."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return kind is LBFGS or not kind.__module__.startswith("torch.")


def stepping(wrapper: BucketDDP, optimizer: Optimizer) -> AbstractContextManager[object]:
    """A context for ``optimizer.step``: a step that raises gives the optimizer its parameters back."""
    swap = wrapper.prepare_optimizer(optimizer)
    return nullcontext() if swap is None else swap.restored_after()
