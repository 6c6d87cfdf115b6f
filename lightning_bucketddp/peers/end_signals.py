"""Signals ask this process to end, SIGTERM and SIGUSR1. Ranks hear of them in the control vector, and end together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from types import FrameType
from typing import Any

SIGNALS = [signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]  # not all on Windows

PATIENCE_SECONDS = 30.0
"""How long a rank that is to end waits for another one. Slurm kills as long after SIGTERM."""

_REPEAT_SECONDS = 1.0
"""A signal may come twice at once: from Slurm, and from torchrun, which has got it too and passes it on."""


class EndSignals:
    """The signals that this process has got. There is one object per process, as handlers belong to processes.

    Attributes:
        received: The first signal; 0 if there was none.
        ending: Whether this process knows that the ranks are to end.
    """

    def __init__(self) -> None:
        self.received, self.ending = 0, False
        self._received_at, self._patience = 0.0, PATIENCE_SECONDS
        self._before: dict[int, Any] = {}
        self._pid = 0

    def watch(self, signals: Collection[int] = SIGNALS, patience: float = PATIENCE_SECONDS) -> None:
        """Handle signals, in place of the handlers that are there. Does nothing until :meth:`release` if it does.

        Args:
            signals: The signals.
            patience: Seconds that a rank which is to end waits for another one.

        Raises:
            ValueError: In another thread than the main one, where Python handles no signals.
        """
        if not self._before:
            self._patience = patience
            self._pid = os.getpid()
            self._before = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child that was forked, whose end is nobody else's
            self.received, self.ending = 0, False
            self.release()
            signal.raise_signal(number)
        elif not self.received:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() > self._received_at + _REPEAT_SECONDS:
            os.write(2, b"lightning_bucketddp: a second signal ends this process\n")  # a logger may be in use
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def release(self) -> None:
        """Put the handlers back that were there before. They get a signal that came too late for all ranks to end."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        late = 0 if self.ending else self.received  # it may have come just now
        self.received, self.ending = 0, False
        if late and sys.exc_info()[0] is None:  # else this process ends anyway
            signal.raise_signal(late)

    def impatient(self, seconds: float) -> bool:
        """Whether this rank is to end and has waited too long for another one."""
        return seconds > self._patience and (self.ending or self.received > 0)


end_signals = EndSignals()
