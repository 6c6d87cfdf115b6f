"""Checkpoints as directories to which every rank writes its own parts (``state_dict_type="sharded"``).

A checkpoint also holds what the Trainer collects on rank 0. Weights are read before the module is wrapped, as from any
checkpoint. Optimizers are read after they have been set up.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_bucketddp.optim import checkpoint_places
from lightning_bucketddp.optim.checkpoint import ShardedCheckpoint
from lightning_bucketddp.optim.checkpoint_writer import CheckpointWriter
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.trainer.replaced import replace_members
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP

DIRECTORY_KEY = "bucketddp_directory"
"""Entry of a loaded checkpoint: the directory from which the optimizers are still to be loaded."""


def is_checkpoint_directory(path: Path) -> bool:
    """Whether ranks have written their parts there, or a save that was killed has left them next to it."""
    return checkpoint_places.is_complete(checkpoint_places.found(path))


def _checkpoint_of(module: pl.LightningModule, wrapper: BucketDDP | None, ranks: Ranks) -> ShardedCheckpoint:
    if wrapper is not None and wrapper.module is module:  # else another one has been validated since
        return wrapper._runtime.optimizers.checkpoint()
    return ShardedCheckpoint(module, ranks, None, lambda optimizer: None)


def save_parts(
    checkpoint: dict[str, Any],
    path: Path,
    module: pl.LightningModule,
    wrapper: BucketDDP | None,
    ranks: Ranks,
    optimizers: Sequence[Optimizer],
    storage_options: Any = None,
    writer: CheckpointWriter | None = None,
) -> None:
    """Save what the Trainer has collected, and each rank's parts. All ranks must call this.

    Args:
        checkpoint: What the Trainer has collected. Its optimizer states are ignored.
        path: The directory; replaced if it exists.
        module: The module.
        wrapper: The module's wrapper, open or closed; None if the module was not wrapped.
        ranks: All ranks.
        optimizers: The Trainer's optimizers.
        storage_options: What a ``CheckpointIO`` would get.
        writer: Writes while training goes on; None to return when the checkpoint is there.

    Raises:
        TypeError: If there are options for a ``CheckpointIO``.
        ValueError: If a callback has put other weights into the checkpoint.
        RuntimeError: If anything else fails on some rank; says where and what.
    """
    if storage_options is not None:
        raise TypeError(
            f'expected no storage_options with state_dict_type="sharded", which uses no CheckpointIO; found '
            f"{storage_options!r}"
        )
    checkpoint = dict(checkpoint)
    _require_own_weights(checkpoint.pop("state_dict"), module)
    resumable = "optimizer_states" in checkpoint
    if resumable:
        checkpoint["optimizer_states"] = []  # tells Lightning that training can be resumed
    parts = _checkpoint_of(module, wrapper, ranks)
    parts.save(path, optimizers if resumable else (), checkpoint, overwrite=True, writer=writer)


def start_writer(wrapper: BucketDDP, trainer: pl.Trainer, until_teardown: ExitStack) -> CheckpointWriter:
    """Make a writer. ``ModelCheckpoint`` gives no other checkpoint the name of one that is being written.

    All ranks must call this.

    Args:
        wrapper: The module's wrapper.
        trainer: The Trainer.
        until_teardown: Gives the callbacks their methods back.

    Raises:
        ValueError: If the last checkpoint is to be a link, which would lead to nothing while its target is written.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    if any(callback.save_last == "link" for callback in callbacks):
        raise ValueError(
            'expected ModelCheckpoint(save_last=True) with async_save=True, found save_last="link": the link would '
            "lead to a checkpoint that is not there yet"
        )
    writer = CheckpointWriter(wrapper._runtime.ranks)
    for callback in callbacks:
        is_taken = partial(_is_taken, writer, callback.file_exists)
        until_teardown.callback(replace_members(callback, file_exists=is_taken))
    return writer


def _is_taken(writer: CheckpointWriter, exists: Callable[..., bool], filepath: Any, trainer: pl.Trainer) -> bool:
    return writer.is_writing(Path(filepath)) or exists(filepath, trainer)


def load_weights(
    path: Path, module: pl.LightningModule, wrapper: BucketDDP | None, ranks: Ranks, weights_only: bool | None = None
) -> dict[str, Any]:
    """Load a module's weights. All ranks must call this.

    Args:
        path: The directory.
        module: The module.
        wrapper: Its wrapper; None if the module is not wrapped.
        ranks: All ranks.
        weights_only: Whether unpickling is forbidden. It cannot be.

    Returns:
        What the Trainer had collected, the loaded weights as ``state_dict``, and the directory.

    Raises:
        ValueError: If names or shapes differ, no Trainer has written the directory, or unpickling is forbidden.
        RuntimeError: If anything else fails on some rank; says where and what.
    """
    if weights_only:
        raise ValueError(
            f"expected weights_only to be left out for the directory {path}, found {weights_only!r}: the directory "
            "holds pickles besides tensors"
        )
    checkpoint = _checkpoint_of(module, wrapper, ranks).load(path, (), module.strict_loading)
    if "pytorch-lightning_version" not in checkpoint:
        raise ValueError(
            f"expected a Trainer's checkpoint in {path}, found one that save_sharded() has written; load it by "
            "BucketDDP.load_sharded()"
        )
    return {**checkpoint, "state_dict": module.state_dict(), DIRECTORY_KEY: path}


def whole_state(wrapper: BucketDDP, optimizer: Optimizer, interrupted: bool) -> dict[str, Any]:
    """Return the whole state of a sharded optimizer on rank 0, and an empty one on the others.

    All ranks must call this. After an exception they may not: then each rank returns its own part.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
    if interrupted:
        rank_zero_warn(
            "a checkpoint that is saved while an exception is handled has only this rank's part of the optimizers' "
            "state, as the other ranks may be gone: weights can be loaded from it, but training cannot be resumed"
        )
        return optimizer.state_dict()
    return wrapper.optimizer_state_dict(optimizer) or {}


def _require_own_weights(state_dict: Mapping[str, Any], module: pl.LightningModule) -> None:
    """Require that a checkpoint holds the module's own weights: none was added, removed or replaced."""
    dicts = state_dict, module.state_dict(), module.state_dict()  # what has no fixed address is made for each of them
    found, own, again = ({name: _address(value) for name, value in each.items()} for each in dicts)
    for name in {**own, **found}:
        if found.get(name) != own.get(name) == again.get(name):
            raise ValueError(
                'expected the LightningModule\'s own weights in a checkpoint with state_dict_type="sharded", as every '
                f"rank saves its parts of them; found another tensor as {name!r}, or none: a callback or "
                'on_save_checkpoint has changed them. Use state_dict_type="full"'
            )


def _address(value: Any) -> int:
    return value.data_ptr() if hasattr(value, "data_ptr") else 0
