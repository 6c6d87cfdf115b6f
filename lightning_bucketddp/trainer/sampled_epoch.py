"""After a resume, data loading workers take the samples of the epoch that begins.

Lightning (2.6, issue 21938) begins to iterate over dataloaders before it tells samplers the epoch. Workers take their
first batches in the order of epoch 0 by then.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader


def begin_epoch_anew(trainer: pl.Trainer) -> None:
    """Iterate over the training dataloaders anew if they began with another epoch than the one to come.

    Dataloaders with a ``state_dict`` know where they are. Without workers nothing is sampled so far.

    Args:
        trainer: A Trainer that is about to train, and has loaded its progress.
    """
    loop: Any = trainer.fit_loop
    fetcher = getattr(loop, "_data_fetcher", None)  # not public; without it Lightning's order stays
    resumes = loop.restarting or getattr(loop, "is_resuming", False)  # without the latter Lightning begins anew itself
    if fetcher is None or not resumes:
        return
    epoch, early = loop.epoch_progress.current.processed, False
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        batches = getattr(loader, "batch_sampler", None)
        samplers: Any = getattr(loader, "sampler", None), getattr(batches, "sampler", None)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch") and getattr(sampler, "epoch", None) != epoch:
                sampler.set_epoch(epoch)
                early |= getattr(loader, "num_workers", 0) > 0 and not hasattr(loader, "state_dict")
    if early:
        iter(fetcher)
