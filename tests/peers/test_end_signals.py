"""Signals that ask a process to end. Ranks that hear of one end together in ``tests/trainer/test_preemption.py``."""

import signal
from typing import Any
from unittest.mock import patch

import pytest

from lightning_bucketddp.peers.end_signals import end_signals


@pytest.fixture
def before() -> Any:
    """The signals that the handler got which was there before."""
    got: list[int] = []
    others = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, others)


def test_a_signal_that_comes_while_handlers_are_put_back_is_passed_on(before: list[int]) -> None:
    end_signals.watch([signal.SIGTERM])
    put_back = signal.signal

    def signalled(number: int, handler: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return put_back(number, handler)

    with patch.object(signal, "signal", signalled):
        end_signals.release()
    assert before == [signal.SIGTERM]
    assert not end_signals.received
