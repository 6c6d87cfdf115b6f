"""A store whose requests end. torch's wait without limit for a server process that is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]  # documented, not in __all__

STORE_SILENT = "the process that serves the store does not answer"


class TimedStore:
    """Makes the requests of a store in threads, and waits a limited time for each.

    Args:
        store: The store.
        seconds: The longest wait. As long as a request that took longer is under way, others raise at once.

    Attributes:
        store: The store.
    """

    def __init__(self, store: Store, seconds: float, gone: list[Exception] | None = None) -> None:
        self.store, self._seconds = store, seconds
        self._gone = [] if gone is None else gone  # the first error of the connection, which all limits share
        self._late: Future[Any] | None = None

    def limited(self, seconds: float) -> TimedStore:
        """The same store with another limit."""
        return TimedStore(self.store, seconds, self._gone)

    def note(self, error: Exception) -> None:
        """Ask no more after an error of the connection: torch would print a page for each further request."""
        if isinstance(error, DistNetworkError):
            self._gone.append(error)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._request, getattr(self.store, name))

    def _request(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._late is not None and not self._late.done():
            raise RuntimeError(STORE_SILENT)
        if self._gone:
            raise RuntimeError(str(self._gone[0]))
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(call(*args))
            except Exception as error:
                self.note(error)
                answer.set_exception(error)

        try:
            threading.Thread(target=ask, name="bucketddp-asks", daemon=True).start()
        except RuntimeError:  # no threads any more: the interpreter ends (Python 3.12 and later)
            ask()
        if not wait([answer], self._seconds).done:
            self._late = answer
            raise RuntimeError(STORE_SILENT)
        return answer.result()
