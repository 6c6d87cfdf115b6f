"""A store whose requests end. torch's wait without limit for a server process that is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
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
        self._late: Future[Any] | None = None

    def limited(self, seconds: float) -> TimedStore:
        """The same store with another limit."""
        return TimedStore(self.store, seconds)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._request, getattr(self.store, name))

    def _request(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._late is not None and not self._late.done():
            raise RuntimeError(STORE_SILENT)
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(call(*args))
            except Exception as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=ask, name="bucketddp-asks", daemon=True).start()
        except RuntimeError:  # no threads any more: the interpreter ends (Python 3.12 and later)
            ask()
        if not wait([answer], self._seconds).done:
            self._late = answer
            raise RuntimeError(STORE_SILENT)
        return answer.result()
