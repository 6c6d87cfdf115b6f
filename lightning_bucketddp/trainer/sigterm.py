"""SIGTERM ends training after the batch, wherever it arrives.

Lightning notes the signal and looks at its note after each batch. But its handler (2.6) also broadcasts, at whatever
point the process happens to be at: in the middle of a step that pairs with another rank's gradients, and the ranks hang
or abort.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, SimpleNamespace
from typing import Any

from lightning.pytorch.trainer.connectors import signal_connector


def quieten_sigterm() -> None:
    """Keeps Lightning's handler of SIGTERM from broadcasting: the ranks tell each other before the next batch.

    The Trainer that registered it puts back what was there before when it ends.
    """
    handler: Any = signal.getsignal(signal.SIGTERM)
    # Not public, and not in every version: where the name is not there, nor is the broadcast. A test notices.
    connector: Any = signal_connector
    dist = getattr(connector, "dist", None)
    is_lightnings = type(handler).__module__ == connector.__name__
    if dist is None or not is_lightnings or threading.current_thread() is not threading.main_thread():
        return

    def quiet(signum: int, frame: FrameType | None) -> None:
        connector.dist = SimpleNamespace(is_available=lambda: False)
        try:
            handler(signum, frame)
        finally:
            connector.dist = dist

    signal.signal(signal.SIGTERM, quiet)
