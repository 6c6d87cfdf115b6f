"""``DDPStrategy``'s arguments for communication hooks and model averaging, as options of :class:`BucketDDP`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_bucketddp.layout.options import Options


def with_ddp_hook(
    options: Options,
    ddp_hook: Callable[..., Any] | None,
    ddp_state: Any,
    ddp_wrapper: Callable[..., Any] | None,
) -> Options:
    """The options with one communication hook and its state, whichever way they were spelled.

    Raises:
        ValueError: If one was given in both ways, or what belongs to a hook without one.
    """
    hook, state = options.comm_hook, options.comm_hook_state
    if hook is not None and ddp_hook is not None:
        raise ValueError("expected comm_hook or ddp_comm_hook, found both; they mean the same")
    if state is not None and ddp_state is not None:
        raise ValueError("expected comm_hook_state or ddp_comm_state, found both; they mean the same")
    hook = ddp_hook if hook is None else hook
    state = ddp_state if state is None else state
    if ddp_wrapper is not None:
        if not callable(hook):
            raise ValueError(
                f"expected a function as communication hook where ddp_comm_wrapper is given, found {hook!r}; for "
                "torch's wrappers around an all-reduce pass torch's allreduce_hook"
            )
        hook = ddp_wrapper(hook)
    if state is not None and hook is None:
        raise ValueError("expected no state of a communication hook without the hook, found one; pass the hook too")
    return replace(options, comm_hook=hook, comm_hook_state=state)


def require_averaging_possible(period: int | None, options: Options) -> None:
    """Require that models can be averaged every ``period`` steps, or are not to be.

    Raises:
        ValueError: If a period or its state is missing, or an option is in the way; says which.
    """
    state = options.comm_hook_state
    averages = isinstance(state, PostLocalSGDState)
    if averages is not (period is not None):
        found = f"model_averaging_period={period!r} with a state of {type(state).__name__}"
        raise ValueError(
            f"expected model_averaging_period together with a PostLocalSGDState as the hook's state, found {found}"
        )
    if averages and options.shard_optimizer:
        raise ValueError(
            "expected model averaging or shard_optimizer=True, found both: ranks whose models differ between averages "
            "cannot share an optimizer; leave out model_averaging_period, or pass shard_optimizer=False"
        )
    if averages and options.master_params:
        raise ValueError(
            "expected model averaging or fp32 master parameters, found both: what would be averaged are the rounded "
            "parameters; leave out model_averaging_period, or pass master_params=False"
        )
