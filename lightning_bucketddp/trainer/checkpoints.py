"""A Trainer's checkpoints as directories to which every rank writes its own parts (``state_dict_type="sharded"``).

What is not the module's or the optimizers' is saved with them, as the Trainer has collected it on rank 0. Weights are
read before the module is wrapped, as those of other checkpoints are; optimizers, when they have been set up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives

if TYPE_CHECKING:
    from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint
    from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP


def is_checkpoint_directory(path: Path) -> bool:
    """Whether ranks have written their parts there."""
    return (path / ".metadata").is_file()  # torch.distributed.checkpoint's


def _parts_of(module: pl.LightningModule, wrapper: BucketDDP | None) -> ShardedCheckpoint:
    from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint  # which takes long to import

    if wrapper is not None:
        return wrapper.sharded_checkpoint()
    return ShardedCheckpoint(module, Collectives(None), None, lambda optimizer: None)


def save_parts(
    checkpoint: dict[str, Any],
    path: Path,
    module: pl.LightningModule,
    wrapper: BucketDDP | None,
    optimizers: Sequence[Optimizer],
    storage_options: Any = None,
) -> None:
    """Saves what the Trainer has collected. All ranks must call this.

    Args:
        checkpoint: What it has collected; the optimizers' states in it are not looked at.
        path: Where; what is there is replaced.
        module: The module.
        wrapper: The module's wrapper, which may be closed; None if it has not been wrapped.
        optimizers: The Trainer's.
        storage_options: What a ``CheckpointIO`` would get.

    Raises:
        TypeError: If there are options for a ``CheckpointIO``.
        ValueError: If somebody has put other weights into the checkpoint, which are not in parts.
        RuntimeError: If anything else went wrong on some rank; says where and what.
    """
    if storage_options is not None:
        raise TypeError(
            f'expected no storage_options with state_dict_type="sharded", found {storage_options!r}: no CheckpointIO '
            "is used"
        )
    checkpoint = dict(checkpoint)
    _require_own(checkpoint.pop("state_dict"), module)
    resumable = "optimizer_states" in checkpoint
    if resumable:
        checkpoint["optimizer_states"] = []  # says that training can be resumed
    _parts_of(module, wrapper).save(path, optimizers if resumable else (), checkpoint, overwrite=True)


def load_weights(
    path: Path, module: pl.LightningModule, wrapper: BucketDDP | None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Loads a module's weights; gives what the Trainer had collected, with the weights that have been loaded.

    All ranks must call this.

    Args:
        path: The directory.
        module: The module.
        wrapper: Its wrapper; None if it has not been wrapped yet, or will not be.
        weights_only: Whether nothing is to be unpickled, which is not possible here.

    Raises:
        ValueError: If names or shapes differ, the directory was not written by a Trainer, or nothing is to be
            unpickled.
        RuntimeError: If anything else went wrong on some rank; says where and what.
    """
    if weights_only:
        raise ValueError(
            f"expected weights_only to be left out for the directory {path}, found {weights_only!r}: what is not a "
            "tensor is pickled there"
        )
    checkpoint = _parts_of(module, wrapper).load(path, (), module.strict_loading)
    if "pytorch-lightning_version" not in checkpoint:
        raise ValueError(
            f"expected a checkpoint of a Trainer's in {path}, found one that save_sharded() has written; load it by "
            "BucketDDP.load_sharded()"
        )
    return {**checkpoint, "state_dict": module.state_dict()}


def whole_state(wrapper: BucketDDP, optimizer: Optimizer, interrupted: bool) -> dict[str, Any]:
    """The whole state of an optimizer whose state is in shards, on rank 0; empty on the others.

    All ranks must call this, unless an exception is being handled: then it is this rank's part.
    """
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    if interrupted:
        rank_zero_warn(
            "a checkpoint that is saved while an exception is handled has this rank's part of the optimizers' state, "
            "as the other ranks may not be there: weights can be loaded from it, but training cannot be resumed"
        )
        return optimizer.state_dict()
    return wrapper.optimizer_state_dict(optimizer) or {}


def _require_own(state_dict: Mapping[str, Any], module: pl.LightningModule) -> None:
    mine = module.state_dict()
    for name in [*mine.keys() - state_dict.keys(), *state_dict.keys() - mine.keys()]:
        where = "the checkpoint" if name in mine else "the module"
        raise ValueError(_told(f"{name!r} missing in {where}"))
    for name, value in state_dict.items():
        if getattr(value, "data_ptr", int)() != getattr(mine[name], "data_ptr", int)():
            raise ValueError(_told(f"another tensor as {name!r}"))


def _told(found: str) -> str:
    return (
        'expected the LightningModule\'s own weights in a checkpoint with state_dict_type="sharded", whose parts every '
        f"rank saves by itself, found {found}: a callback or on_save_checkpoint has changed them. Use "
        'state_dict_type="full"'
    )
