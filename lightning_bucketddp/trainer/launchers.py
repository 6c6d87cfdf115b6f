"""What Lightning's launchers do about a rank that ends with an error: here the other ranks hear of it, and raise."""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from traceback import format_exception_only
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as _FabricScriptLauncher
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from typing_extensions import override

from lightning_bucketddp.peers.abort_listener import tell_end_of_rank
from lightning_bucketddp.peers.agreement import PeerFailureError, RankMismatchError

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.2


class _TellsOfEndedRanks:
    """A launcher of scripts that tells all ranks when a rank has ended that it has started.

    Lightning kills this process then, within five seconds: it raises no error, and runs no ``finally``.
    """

    procs: list[subprocess.Popen[Any]]
    num_processes: int
    cluster_environment: Any
    _looks = False

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks of this machine, and call a function."""
        return super().launch(partial(self._observed, function), *args, **kwargs)  # type: ignore[misc]  # a launcher's

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: processes stay with the launcher that has started them."""
        return {**self.__dict__, "procs": []}

    def _observed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.procs and not self._looks:
            self._looks = True
            lightnings, self.procs = self.procs, list(self.procs)
            lightnings.clear()  # Lightning's thread, which has this list, then looks at no process
            threading.Thread(target=self._look, name="bucketddp-ended-ranks", daemon=True).start()
        return function(*args, **kwargs)

    def _look(self) -> None:
        """Look for ranks that have ended with an error, until all have ended without one."""
        told = False
        # Ranks may end before this process does, which is at its end when its main thread is.
        while threading.main_thread().is_alive() and any(process.poll() != 0 for process in self.procs):
            for local_rank, process in enumerate(self.procs, 1):
                if code := process.poll():
                    rank = self.cluster_environment.node_rank() * self.num_processes + local_rank
                    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
                    if tell_end_of_rank(rank, process.pid, f"has ended with {how}; its output tells why"):
                        told = True
                    elif not told:  # else the group has ended since
                        self._end_all()  # this rank waits in `init_process_group`
            time.sleep(_LOOK_SECONDS)

    def _end_all(self) -> None:
        for process in self.procs:
            process.kill()
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL


class ScriptLauncher(_TellsOfEndedRanks, _SubprocessScriptLauncher):
    """The Trainer's launcher of scripts. All ranks hear when one of them ends with an error."""


class FabricScriptLauncher(_TellsOfEndedRanks, _FabricScriptLauncher):
    """Fabric's launcher of scripts. All ranks hear when one of them ends with an error."""


class TellingLauncher(_MultiProcessingLauncher):
    """Calls the strategy's ``on_exception`` in the processes that it starts, which Lightning does in the main one."""

    def __init__(self, strategy: Any, start_method: Any) -> None:
        super().__init__(strategy, start_method)
        self.on_exception: Callable[[BaseException], None] = strategy.on_exception

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        pid = os.getpid()
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            if os.getpid() != pid:  # a child that user code forked
                raise
            self.on_exception(error)
            if isinstance(error, PeerFailureError | RankMismatchError) or hasattr(error, "__notes__"):
                # The main process prints the error of one rank: the one that ends first.
                _log.error("".join(format_exception_only(error)).rstrip())
            if isinstance(error, SystemExit) and not error.code:  # as at SIGTERM: the main process waits for a result
                raise SystemExit(1) from error
            raise
