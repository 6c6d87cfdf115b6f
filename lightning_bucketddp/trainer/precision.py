"""What the precision plugin does while a module is wrapped: backward is a pass, and sharded gradients are clipped.

Lightning's own ``Strategy.backward`` stays as it is, so that whoever patches or wraps that one sees each call.
``Trainer(gradient_clip_val=...)``, ``LightningModule.clip_gradients`` and overrides of
``configure_gradient_clipping`` that call it all end in two methods of the plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP

_WEIGHT_AVERAGING = getattr(pl.callbacks, "WeightAveraging", ())  # since Lightning 2.6


def adapt_precision(plugin: Precision, wrapper: BucketDDP, shards: bool) -> Callable[[], None]:
    """Give a precision plugin methods that work on a wrapped module.

    Args:
        plugin: The plugin.
        wrapper: The wrapped module.
        shards: Whether gradients are sharded. They are then clipped by the wrapper, unless the user's own plugin
            overrides clipping: that looks at gradients, and raises.

    Returns:
        Gives the plugin its own methods back.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        wrapper.clip_grad_norm_(clip_val, parameters=list(plugin.main_params(optimizer)))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        wrapper.clip_grad_value_(clip_val, list(plugin.main_params(optimizer)))

    methods: dict[str, Callable[..., None]] = {"backward": partial(_run_as_pass, wrapper, plugin.backward)}
    for clip in (clip_grad_by_norm, clip_grad_by_value) if shards else ():
        name = clip.__name__
        if getattr(getattr(plugin, name), "__func__", None) is getattr(Precision, name):
            methods[name] = clip
    own = {name: method for name, method in vars(plugin).items() if name in methods}
    vars(plugin).update(methods)

    def give_back() -> None:
        for name in methods:
            vars(plugin).pop(name, None)
        vars(plugin).update(own)

    return give_back


def _run_as_pass(
    wrapper: BucketDDP,
    backward: Callable[..., None],
    loss: Tensor,
    module: pl.LightningModule,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run the plugin's ``backward`` as a pass: gradients are averaged when it returns, before ``on_after_backward``."""
    if wrapper.is_replaying:
        loss = torch.zeros_like(loss, requires_grad=True)  # reaches no parameter
    with wrapper.backward_pass(loss):
        backward(loss, module, *args, **kwargs)
    if wrapper.require_backward_grad_sync and (wrapper.some_replay or _averages_weights(module)):
        # What goes into an average or a checkpoint is to be the same on every rank, and to count.
        wrapper.synchronise_module_buffers()


def _averages_weights(module: pl.LightningModule) -> bool:
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, _WEIGHT_AVERAGING) for callback in callbacks)
