"""SIGTERM ends training after the current batch.

Lightning's handler (2.6) sets a flag, which the training loop checks on all ranks before each batch. The handler also
broadcasts, wherever the process is. In the middle of a step this pairs with another rank's gradients, and ranks hang.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl


def quieten_sigterm(trainer: pl.Trainer) -> None:
    """Replace the Trainer's SIGTERM handler by one that does not broadcast. Call this before it is registered."""
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = partial(_note_sigterm, connector)  # not public; a test notices if it is gone


def _note_sigterm(connector: Any, signum: int, frame: object) -> None:
    launcher = connector.trainer.strategy.launcher
    if launcher is not None and not connector.received_sigterm:
        launcher.kill(signum)  # passes the signal on to the ranks that this process has started
    connector.received_sigterm = True


def register_instead(trainer: pl.Trainer, register: Callable[[], None]) -> None:
    """Have the Trainer call this once instead of registering its own handlers, which it does after ``on_fit_start``."""
    connector: Any = trainer._signal_connector

    def once() -> None:
        del connector.register_signal_handlers
        connector.received_sigterm = False
        register()

    connector.register_signal_handlers = once


def end_training(trainer: pl.Trainer, end: bool) -> None:
    """Say whether Lightning's loops raise SIGTERMException here: after a step and its validation, or after the epoch.

    It would break a validation off.
    """
    connector: Any = trainer._signal_connector
    connector.received_sigterm = end
