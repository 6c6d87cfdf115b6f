"""Gradient clipping by Lightning's hooks, where gradients are sharded.

``Trainer(gradient_clip_val=...)``, ``LightningModule.clip_gradients`` and overrides of ``configure_gradient_clipping``
that call it all end in two methods of the precision plugin. The one object gets others while a module is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP


def clip_shards(plugin: Precision, wrapper: BucketDDP) -> Callable[[], None]:
    """Has a precision plugin clip gradients that are sharded.

    Methods that the user's own plugin overrides are left alone: those that look at gradients raise.

    Returns:
        Gives the plugin its own methods back.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        wrapper.clip_grad_norm_(clip_val, parameters=list(plugin.main_params(optimizer)))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        wrapper.clip_grad_value_(clip_val, list(plugin.main_params(optimizer)))

    methods = {"clip_grad_by_norm": clip_grad_by_norm, "clip_grad_by_value": clip_grad_by_value}
    plain = [name for name in methods if getattr(getattr(plugin, name), "__func__", None) is getattr(Precision, name)]
    for name in plain:
        setattr(plugin, name, methods[name])

    def give_back() -> None:
        for name in plain:
            vars(plugin).pop(name, None)

    return give_back
