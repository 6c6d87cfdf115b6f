"""Resumed fine-tuning continues with the parameters that were trainable.

``BaseFinetuning`` freezes in ``setup``, also when training is resumed. It restores the optimizer's parameter groups but
not ``requires_grad``: with ``ddp`` an unfrozen backbone is silently frozen again. Here a checkpoint says what was
trainable, under a key of its own, if that has changed since the strategy's ``setup``.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bucketddp.layout.require import listed

CHECKPOINT_KEY = "bucketddp_trainable"

Trainable = dict[str, dict[str, bool]]
"""By name: which parameters require grad, and which BatchNorm modules track statistics."""


def trainable_state(module: nn.Module) -> Trainable:
    """Return what is trainable now."""
    return {
        "requires_grad": {name: param.requires_grad for name, param in module.named_parameters()},
        "track_running_stats": {name: norm.track_running_stats for name, norm in _batch_norms(module)},
    }


def add_trainable(checkpoint: dict[str, Any], module: nn.Module, at_setup: Trainable | None) -> None:
    """Add to a checkpoint what is trainable, if the next ``setup`` will not make it so by itself.

    Args:
        checkpoint: What is about to be saved. Without optimizer states it stays as it is: no training resumes from it.
        module: The module.
        at_setup: What was trainable in ``setup``, before anything was restored; None if there was no setup.
    """
    now = trainable_state(module)
    if "optimizer_states" in checkpoint and at_setup is not None and now != at_setup:
        checkpoint[CHECKPOINT_KEY] = now


def restore_trainable(checkpoint: Mapping[str, Any], module: pl.LightningModule) -> None:
    """Freeze and unfreeze as in the checkpoint, if a ``BaseFinetuning`` callback is resumed.

    Rank 0 logs what this changes. It warns if parameters that were trainable stay frozen, as no such callback is
    resumed. A checkpoint of another strategy does not say what was trainable, and changes nothing.

    Call this after optimizers are configured, as the first run configured them with the frozen module too, and before
    their state is loaded.

    Args:
        checkpoint: The loaded checkpoint, the same on every rank.
        module: The module whose training is resumed.
    """
    if (saved := checkpoint.get(CHECKPOINT_KEY)) is None:
        return
    resumed = False
    with suppress(RuntimeError):  # a strategy may restore into a module that has no Trainer
        trainer: Any = module.trainer
        callbacks = [each for each in trainer.callbacks if isinstance(each, BaseFinetuning)]
        resumed = any(callback.state_key in checkpoint.get("callbacks", {}) for callback in callbacks)
    before, now = saved["requires_grad"], dict(module.named_parameters())
    changed = [name for name, param in now.items() if param.requires_grad != before.get(name, param.requires_grad)]
    unfrozen, frozen = ([name for name in changed if before[name] is wanted] for wanted in (True, False))
    if not resumed:
        if unfrozen:
            rank_zero_warn(
                f"{_are(unfrozen)} trainable when the checkpoint was saved and frozen now. No BaseFinetuning "
                "callback is resumed, so they stay frozen; unfreeze them if they are to be trained"
            )
        return
    for name, norm in _batch_norms(module):
        norm.track_running_stats = saved["track_running_stats"].get(name, norm.track_running_stats)
    for name in changed:
        now[name].requires_grad_(before[name])
    for names, state in ((unfrozen, "trainable"), (frozen, "frozen")):
        if names:
            rank_zero_info(f"Resumed fine-tuning: {_are(names)} {state} again, as when the checkpoint was saved")


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Find the modules that BaseFinetuning stops from tracking statistics while they are frozen."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm))


def _are(names: list[str]) -> str:
    return f"{len(names)} parameters ({listed(names)}) are" if len(names) > 1 else f"1 parameter ({listed(names)}) is"
