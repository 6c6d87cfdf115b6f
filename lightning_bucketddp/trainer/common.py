"""Shared by the strategies for Trainer and Fabric: arguments, forwarded calls, the process group's life."""

from __future__ import annotations

import atexit
import gc
import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.registry import FOLDERS
from lightning_bucketddp.layout.require import require, require_names
from lightning_bucketddp.peers.abort_listener import AbortListener, listen
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP
from lightning_bucketddp.wrapper.runtime import require_fit_group

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., None])
_TORCHS = Options.__match_args__[: Options.__match_args__.index("module_buffers")]
"""Names of the options that are arguments of torch's DDP, with those of newer releases."""


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


def divided(
    owner: str, base: type, kind: type[Options], args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a strategy's arguments into those of Lightning's class, with its defaults, and the options.

    What is one of either, as ``timeout`` is, goes to both.

    Args:
        owner: The strategy's name.
        base: Lightning's class.
        kind: The class of the options.
        args: By position: Lightning's.
        given: By name.

    Raises:
        TypeError: If an argument is unknown.
        TypeError, ValueError: If this platform does not have the start method.
    """
    bound = inspect.signature(base).bind(*args, **given)
    bound.apply_defaults()
    lightnings = bound.arguments
    available = ("popen", *torch.multiprocessing.get_all_start_methods())
    wanted = f"one of {available}, the start methods on this platform"
    require("start_method", lightnings["start_method"], wanted, str, available.__contains__)
    options = lightnings.pop("kwargs")
    require_names(owner, options, (*kind.__match_args__, *lightnings))
    return lightnings, {**options, **{name: lightnings[name] for name in lightnings if name in Options.__match_args__}}


def of_torch(options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that are arguments of torch's DDP."""
    return {name: value for name, value in options.items() if name in _TORCHS}


def list_options(base: type, options: type[Options]) -> Callable[[_F], _F]:
    """Let ``help()``, ``--help`` and ``inspect.signature`` list every argument of a strategy's constructor by itself.

    First come the strategy's own options, then the wrapper's, torch DDP's and Lightning's arguments. Calls stay the
    same.

    Args:
        base: Lightning's class, which has the last of them.
        options: The class of the strategy's options.
    """
    lightnings, names = inspect.signature(base).parameters, Options.__match_args__
    types = {**get_type_hints(options), **get_type_hints(vars(base)["__init__"])}
    own = [each for each in inspect.signature(options).parameters.values() if each.name not in lightnings]
    own.sort(key=lambda each: (each.name in names, each.name in _TORCHS))
    shown = [
        each.replace(kind=each.KEYWORD_ONLY, annotation=types[each.name])
        for each in (*own, *lightnings.values())
        if each.name != "kwargs"
    ]

    def listing(init: _F) -> _F:
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        init.__signature__ = inspect.Signature([first, *shown])  # type: ignore[attr-defined]
        init.__doc__ = Options.__doc__
        return init

    return listing


def set_up_group(
    set_up: Callable[[], None], options: Options, interrupted: Callable[[], bool] | None = None
) -> AbortListener | None:
    """Have Lightning set up the default process group, unless there is one already.

    A new group is destroyed when this process ends. Lightning does this for NCCL only, and a gloo process that exits
    with an open group sometimes aborts. A group of an earlier run is checked (:func:`require_fit_group`), because
    Lightning uses it before the module is wrapped.

    Args:
        set_up: Lightning's method.
        options: The strategy's options.
        interrupted: Whether this rank handles an exception, for a ``fit`` that begins; None for Fabric.

    Returns:
        The group's listener; None if a test mocks ``init_process_group``, so that there is no group.
    """
    is_new = not dist.is_initialized()
    set_up()
    if not dist.is_initialized():
        return None
    listener = listen(Collectives(None), options.report_after)
    if interrupted is not None:
        listener.begin_fit(interrupted)  # ends the last fit, before ranks wait for one another
    if is_new:
        atexit.register(_end_group, os.getpid())
    else:
        require_fit_group(None, options.timeout)
    return listener


def _end_group(pid: int) -> None:
    if os.getpid() != pid:  # a child that was forked: gloo's threads are not there
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # the Trainer's reference cycles keep gloo's threads alive, and a process may abort at exit with them
