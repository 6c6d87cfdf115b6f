"""Fine-tuning that is resumed goes on with what was trainable.

``BaseFinetuning`` freezes in ``setup``, when training is resumed too, and restores the optimizer's parameter groups but
not ``requires_grad``: with ``ddp`` an unfrozen backbone is frozen again without a word. A checkpoint says here what was
trainable, under a key of its own, where that has changed since the strategy's ``setup``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

CHECKPOINT_KEY = "bucketddp_trainable"


Trainable = dict[str, dict[str, bool]]
"""Which parameters require grad, and which BatchNorm modules track statistics."""


def trainable_state(module: nn.Module) -> Trainable:
    """What is trainable now."""
    return {
        "requires_grad": {name: param.requires_grad for name, param in module.named_parameters()},
        "track_running_stats": {name: norm.track_running_stats for name, norm in _batch_norms(module)},
    }


def add_trainable(checkpoint: dict[str, Any], module: nn.Module, at_setup: Trainable | None) -> None:
    """Notes in a checkpoint what is trainable, where that is not what the next ``setup`` will find by itself.

    Args:
        checkpoint: What is about to be saved. One without optimizer states, that training cannot be resumed from, is
            left alone.
        module: The module.
        at_setup: What was trainable in ``setup``, before anything was restored; None if there was none.
    """
    now = trainable_state(module)
    if "optimizer_states" in checkpoint and at_setup is not None and now != at_setup:
        checkpoint[CHECKPOINT_KEY] = now


def restore_trainable(checkpoint: Mapping[str, Any], module: pl.LightningModule) -> None:
    """Freezes and unfreezes as it was when the checkpoint was saved, where a ``BaseFinetuning`` callback is resumed.

    Says on rank 0 what it changed. Where it changes nothing although parameters that were trainable are frozen now, or
    may have been, it warns: no fine-tuning callback is resumed, or the checkpoint does not say.

    To be called when optimizers are configured, which saw the frozen module in the first run as well, and before their
    state is loaded.

    Args:
        checkpoint: The loaded checkpoint; the same on every rank.
        module: The module that training is resumed with.
    """
    states = checkpoint.get("callbacks", {})
    # `module.trainer` would raise where a strategy restores into a module that has none.
    callbacks = [c for c in getattr(module._trainer, "callbacks", ()) if isinstance(c, BaseFinetuning)]
    resumed = [states[callback.state_key] for callback in callbacks if callback.state_key in states]
    saved = checkpoint.get(CHECKPOINT_KEY)
    if saved is None:
        _warn_of_unknown(module, resumed)
        return
    before = saved["requires_grad"]
    params = {name: param for name, param in module.named_parameters() if name in before}
    changed = {name: param for name, param in params.items() if param.requires_grad != before[name]}
    unfrozen = [name for name in changed if before[name]]
    if not resumed:
        if unfrozen:
            rank_zero_warn(
                f"{_listed(unfrozen)} trainable when the checkpoint was saved and frozen now. No BaseFinetuning "
                "callback is resumed, so they stay frozen; unfreeze them where they are to be trained on"
            )
        return
    for name, norm in _batch_norms(module):
        norm.track_running_stats = saved["track_running_stats"].get(name, norm.track_running_stats)
    for name, param in changed.items():
        param.requires_grad_(before[name])
    if unfrozen:
        rank_zero_info(f"Resumed fine-tuning: {_listed(unfrozen)} trainable again, as when the checkpoint was saved")
    if frozen := [name for name in changed if not before[name]]:
        rank_zero_info(f"Resumed fine-tuning: {_listed(frozen)} frozen again, as when the checkpoint was saved")


def _warn_of_unknown(module: nn.Module, resumed: Iterable[Mapping[str, Any]]) -> None:
    # The callback knows its optimizers' parameters by name, but not whether they were frozen.
    groups = (
        group
        for state in resumed
        for param_groups in state.get("internal_optimizer_metadata", {}).values()
        for group in param_groups
    )
    stepped = {name for group in groups for name in group["params"]}
    frozen = [name for name, param in module.named_parameters() if name in stepped and not param.requires_grad]
    if frozen:
        rank_zero_warn(
            f"{_listed(frozen)} in the optimizer and frozen now. The checkpoint does not say whether they were "
            "trainable: they stay frozen. In a checkpoint of ddp they may have been; to train them on, unfreeze them "
            "in the LightningModule's on_train_start"
        )


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    # BaseFinetuning stops these, and no other modules, from tracking statistics while they are frozen.
    return ((name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm))


def _listed(names: list[str], most: int = 3) -> str:
    shown = ", ".join(map(repr, names[:most])) + (", …" if len(names) > most else "")
    return f"{len(names)} parameters ({shown}) are" if len(names) > 1 else f"1 parameter ({shown}) is"
