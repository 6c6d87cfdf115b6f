"""``DDPStrategy``'s arguments for communication hooks and model averaging, as options of :class:`BucketDDP`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_bucketddp.layout.options import Options, TrainerOptions

_WITHOUT_AVERAGING = {
    "shard_optimizer": "ranks whose models differ between averages cannot share an optimizer",
    "master_params": "parameters would be averaged after rounding",
    "check_ranks_every": "parameters differ between averages, and that would be told as a mistake",
}
"""Options that exclude model averaging, and why."""


def with_ddp_hook(options: TrainerOptions, given: Mapping[str, Any]) -> TrainerOptions:
    """Return the options with one communication hook and its state, spelled either way.

    Args:
        options: The options, which may have a hook and its state.
        given: The arguments of ``DDPStrategy``.

    Raises:
        ValueError: If a hook or a state is spelled both ways, a state or wrapper comes without a hook, only the period
            of model averaging or only its state is given, or an option excludes averaging.
    """
    for name, alias in (("comm_hook", "ddp_comm_hook"), ("comm_hook_state", "ddp_comm_state")):
        if given[alias] is not None:
            if getattr(options, name) is not None:
                raise ValueError(f"expected {name} or {alias}, found both: they mean the same. Leave one of them out")
            options = replace(options, **{name: given[alias]})
    if (wrapper := given["ddp_comm_wrapper"]) is not None:
        if not callable(options.comm_hook):
            raise ValueError(
                f"expected a function as communication hook for ddp_comm_wrapper, found {options.comm_hook!r}; to wrap "
                "a plain all-reduce, pass torch's allreduce_hook"
            )
        options = replace(options, comm_hook=wrapper(options.comm_hook))
    if options.comm_hook_state is not None and options.comm_hook is None:
        raise ValueError("expected a communication hook for the given state, found none; pass the hook too")
    _require_averaging_possible(given["model_averaging_period"], options)
    return options


def _require_averaging_possible(period: int | None, options: Options) -> None:
    """Require that models can be averaged every ``period`` steps, if averaging was asked for.

    Raises:
        ValueError: If only the period or only its state is given, or an option excludes averaging.
    """
    state = options.comm_hook_state
    averages = isinstance(state, PostLocalSGDState)
    if averages is not (period is not None):
        raise ValueError(
            "expected model_averaging_period together with a PostLocalSGDState as the hook's state, found "
            f"model_averaging_period={period!r} with a state of {type(state).__name__}"
        )
    for option, reason in _WITHOUT_AVERAGING.items():
        if averages and (found := getattr(options, option)):
            raise ValueError(
                f"expected model averaging or {option}={found}, found both: {reason}. Leave out "
                f"model_averaging_period, or pass {option}={False if found is True else None}"
            )
