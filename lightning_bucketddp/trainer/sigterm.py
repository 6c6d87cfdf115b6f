"""SIGTERM ends training after the current batch. The rank that got it tells the others why they stop.

Lightning (2.6) broadcasts for this, twice. Its handler does so wherever the process is. In the middle of a step this
pairs with another rank's gradients, and ranks hang. Its training loop broadcasts rank 0's flag before each batch, and
the host waits for it. Neither is needed here.
"""

import os
import signal
from functools import partial
from typing import Any

import lightning.pytorch as pl

GOT_SIGTERM = "got SIGTERM, which launchers send to cancel a job, or when another rank has ended"


def quieten_sigterm(trainer: pl.Trainer) -> None:
    """Replace both broadcasts of the Trainer. Call this before it registers its handler."""
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = partial(
        _note_sigterm, connector, os.getpid()
    )  # not public; a test notices if it is gone
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = _broadcast_nothing  # not public; golden traces show the broadcast if this is gone


def _broadcast_nothing() -> None:  # no lambda: a Trainer can be pickled
    return


def _note_sigterm(connector: Any, pid: int, signum: int, frame: object) -> None:
    if os.getpid() != pid:  # a child that was forked, whose end is nobody else's
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
    launcher = connector.trainer.strategy.launcher
    if launcher is not None and not connector.received_sigterm:
        launcher.kill(signum)  # passes the signal on to the ranks that this process has started
    connector.received_sigterm = True
