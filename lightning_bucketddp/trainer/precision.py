"""Changes to the precision plugin while a module is wrapped: backward is a pass, and sharded gradients are clipped.

The plugin is changed because ``Strategy.backward`` must stay Lightning's own: code that patches it then sees each call.
All of Lightning's ways to clip end in two methods of the plugin.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.trainer.replaced import replace_members
from lightning_bucketddp.trainer.wrapper import BucketDDPInTrainer


def adapt_precision(plugin: Precision, wrapper: BucketDDPInTrainer, sharded: bool) -> Callable[[], None]:
    """Give a precision plugin methods that work on a wrapped module.

    Args:
        plugin: The plugin.
        wrapper: The wrapped module.
        sharded: Whether gradients are sharded. The wrapper then clips them. Clipping that the user's own plugin
            overrides stays. It reads sharded gradients, and so raises.

    Returns:
        A function that gives the plugin its own methods back.
    """
    original = plugin.backward

    def backward(loss: Tensor, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        if not wrapper._in_training():
            original(loss, module, *args, **kwargs)
            return
        if wrapper.samples is not None:
            wrapper.samples.count(wrapper)
        if not wrapper._passes.joining.counts():
            loss = torch.zeros_like(loss, requires_grad=True)  # reaches no parameter
        with wrapper.backward_pass(loss):
            original(loss, module, *args, **kwargs)
        if wrapper.require_backward_grad_sync and (wrapper._uneven.active is not None or _averages_weights(module)):
            wrapper.synchronise_module_buffers()  # averages and checkpoints need the same values on every rank

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        wrapper.clip_grad_norm_(clip_val, parameters=list(plugin.main_params(optimizer)))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        wrapper.clip_grad_value_(clip_val, list(plugin.main_params(optimizer)))

    methods: dict[str, Callable[..., None]] = {"backward": backward}
    for clip in (clip_grad_by_norm, clip_grad_by_value) if sharded else ():
        if getattr(getattr(plugin, clip.__name__), "__func__", None) is getattr(Precision, clip.__name__):
            methods[clip.__name__] = clip
    return replace_members(plugin, **methods)


def _averages_weights(module: pl.LightningModule) -> bool:
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, pl.callbacks.WeightAveraging) for callback in callbacks)
