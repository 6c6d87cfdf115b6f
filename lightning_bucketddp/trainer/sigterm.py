"""SIGTERM ends training after the batch, wherever it arrives.

Lightning notes the signal and looks at its note after each batch. But its handler (2.6) also broadcasts, at whatever
point the process happens to be at: in the middle of a step that pairs with another rank's gradients, and the ranks hang
or abort.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch.trainer.connectors import signal_connector


class QuietHandler:
    """Calls Lightning's handler of SIGTERM without its broadcast: the ranks tell each other before the next batch.

    Args:
        handler: The handler.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        # Not public, and not in every version: where the name is not there, nor is the broadcast. A test notices.
        connector: Any = signal_connector
        dist = getattr(connector, "dist", None)
        if dist is None:
            self._handler(signum, frame)
            return
        connector.dist = _NoCollectives
        try:
            self._handler(signum, frame)
        finally:
            connector.dist = dist


class _NoCollectives:
    @staticmethod
    def is_available() -> bool:
        return False


def quieten_sigterm() -> None:
    """Quietens the handler that a Trainer has registered, which puts back what was there before when it ends."""
    handler = signal.getsignal(signal.SIGTERM)
    is_lightnings = type(handler).__module__ == signal_connector.__name__
    if is_lightnings and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, QuietHandler(handler))
