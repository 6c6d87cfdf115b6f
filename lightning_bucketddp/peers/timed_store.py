"""A store whose requests end. torch's wait without limit for a server process that is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

STORE_SILENT = "the process that serves the store, rank 0's or the launcher's, does not answer"


class TimedStore:
    """Makes the requests of a store in threads, and waits a limited time for each.

    Args:
        store: The store.
        seconds: The longest wait. As long as a request that took longer is under way, others raise at once.

    Attributes:
        store: The store.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self.store, self._seconds = store, seconds
        self._late: threading.Lock | None = None

    def limited(self, seconds: float) -> TimedStore:
        """The same store with another limit."""
        return TimedStore(self.store, seconds)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._request, getattr(self.store, name))

    def _request(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._late is not None and self._late.locked():
            raise RuntimeError(STORE_SILENT)
        under_way = threading.Lock()
        answer: list[Any] = [None, None]

        def ask() -> None:
            try:
                answer[0] = call(*args)
            except Exception as error:
                answer[1] = error
            under_way.release()

        under_way.acquire()
        try:
            threading.Thread(target=ask, name="bucketddp-asks", daemon=True).start()
        except RuntimeError:  # no threads any more: the interpreter ends (Python 3.12 and later)
            ask()
        if not under_way.acquire(timeout=self._seconds):
            self._late = under_way
            raise RuntimeError(STORE_SILENT)
        value, error = answer
        if error is not None:
            raise error
        return value
