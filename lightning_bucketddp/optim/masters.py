"""fp32 master parameters: the optimizer steps on them, and bf16/fp16 parameters are their rounded copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.optim.state_dicts import params_of
from lightning_bucketddp.optim.swap import Swap, all_swaps, swap_of


def master_params(optimizer: Optimizer) -> Swap:
    """The optimizer's master parameters; attached to it in the first call.

    Args:
        optimizer: A torch optimizer.

    Returns:
        The same object in every call, until it is closed.

    Raises:
        TypeError: If it is no torch optimizer, but a wrapper around one, which has no hooks and state of its own.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}; pass the optimizer that it wraps"
        )
    return swap_of(optimizer) or Swap(optimizer)


def holders_of_masters(params: Container[int]) -> list[Optimizer]:
    """The optimizers that step on fp32 masters of some whole parameters, which are given by id."""
    return [it for it, swap in all_swaps() if any(id(param) in params for param in swap.stepped.whole_masters())]


def restart_masters(params: Iterable[Tensor]) -> None:
    """Have masters of whole parameters made anew, in the next step, from the parameters.

    For ranks that got one rank's rounded parameters: that rank's masters know more than the others'.
    """
    chosen = {id(param) for param in params}
    for _, swap in all_swaps():
        for param in swap.stepped.whole_masters():
            if id(param) in chosen:
                swap.stepped.set_master(param, None)


def prepare_at_first_step(
    params: Callable[[], Container[int]], prepare: Callable[[Optimizer], object] = master_params
) -> RemovableHandle:
    """Prepare every optimizer that steps on some parameters, in its first step.

    Through torch's global step hook, so that an optimizer nobody has handed over steps on masters or shards too. A
    state dict that is loaded into one *before* its first step is loaded as torch does, in the parameters' dtype and
    without masters: where training is resumed, prepare the optimizer first.

    Args:
        params: Gives the ids of the parameters, which may change.
        prepare: Called once with the optimizer, when it has such parameters. It has to attach a :class:`Swap`, unless
            there is one.

    Returns:
        A handle that ends it; optimizers that were prepared stay so.
    """
    prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch calls the optimizer's own hooks after the global ones, and so the one that is registered here.
        if optimizer in prepared:
            return
        ours = params()
        if any(id(param) in ours for param in params_of(optimizer)):
            prepare(optimizer)
            prepared.add(optimizer)

    return register_optimizer_step_pre_hook(look)
