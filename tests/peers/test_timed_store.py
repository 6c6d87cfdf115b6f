"""A store whose requests end."""

import threading
import time
from unittest.mock import Mock, patch

import pytest
from torch.distributed import DistNetworkError, HashStore

from lightning_bucketddp.peers.timed_store import TimedStore


class Stopping(HashStore):
    """Its server answers nothing while it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = threading.Event()
        self.runs.set()

    def check(self, keys: list[str]) -> bool:
        self.runs.wait(60)
        return super().check(keys)


def test_a_request_raises_if_the_server_is_stopped() -> None:
    server = Stopping()
    store = TimedStore(server, 1)
    store.set("key", "value")
    assert store.check(["key"])
    assert store.get("key") == b"value"
    with pytest.raises(ValueError, match="one"):
        store._request(lambda: int("one"))
    server.runs.clear()
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(RuntimeError, match="the process that serves the store does not answer"):
            store.check(["key"])
    assert 1 <= time.monotonic() - began < 15, "the first waits, the others raise at once"
    server.runs.set()
    assert store._late is not None
    assert store._late.result(timeout=20)
    assert store.check(["key"]), "it runs again"


def test_a_store_that_is_gone_is_asked_once() -> None:
    """torch prints a page for each request."""
    gone = Mock(**{"check.side_effect": DistNetworkError("Failed to recv"), "get.side_effect": KeyError("key")})
    store = TimedStore(gone, 20)
    with pytest.raises(KeyError):
        store.get("key")
    for each in (store, store, store.limited(3)):
        with pytest.raises(RuntimeError, match="Failed to recv"):
            each.check(["key"])
    assert gone.check.call_count == 1


def test_requests_work_while_the_interpreter_ends() -> None:
    store = TimedStore(HashStore(), 5)
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't create new thread")):
        store.set("key", "value")
        assert store.get("key") == b"value"
