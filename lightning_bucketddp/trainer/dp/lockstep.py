"""Replicas' threads that meet: each makes the same call, one of them does it for all, and all go on with the result."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_bucketddp.replicas.nested import cloned


class AbandonedError(RuntimeError):
    """Ends a replica that waits for one that has raised; what that one raised is what the caller should see."""


class _Arrival(NamedTuple):
    call: str
    value: Any
    handled: BaseException | None


class Lockstep:
    """Where the threads of one step's replicas meet.

    A call that changes what all replicas share, an optimizer's step say, has to happen once, when all of them have got
    there. Each calls :meth:`meet` in its own thread; the first replica's thread does what is to be done, so that its
    device is the current one, and the others wait. Replicas that make different calls, or of which one has ended, can
    never meet: then all raise, and none waits for ever.

    Args:
        devices: The replicas' devices, for messages.
        step: What the replicas run, for messages, as ``"training_step"``.
    """

    def __init__(self, devices: Sequence[torch.device], step: str) -> None:
        self._devices = devices
        self._step = step
        self._changed = threading.Condition()
        self._arrived: dict[int, _Arrival] = {}
        self._ended: dict[int, BaseException | None] = {}
        self._meetings = 0
        self._copies: dict[int, Any] = {}
        self._raised: BaseException | None = None
        self._unread = 0
        self._error: Callable[[], RuntimeError] | None = None

    def meet(
        self,
        replica: int,
        call: str,
        value: Any,
        once: Callable[[list[Any]], Any],
        handled: BaseException | None = None,
    ) -> Any:
        """Waits until all replicas make this call, and has it done once.

        Args:
            replica: The index of the replica that calls.
            call: What it calls, in words; the same in all of them.
            value: What it brings along.
            once: Gets all replicas' values, in order. The first replica's is run, in its thread.
            handled: The exception that the replica handles while it calls, in a ``finally`` say. If others make
                another call, that is why.

        Returns:
            What ``once`` returned; all but the first replica have copies of its tensors, which they may change.

        Raises:
            BaseException: What ``once`` raised, in all replicas, so that those that go on stay together.
            RuntimeError: If another replica makes another call, or has ended; names both calls. If two threads of
                one replica call.
            AbandonedError: If another replica has raised, or this one, and others do not make the call.
        """
        with self._changed:
            self._raise()
            if replica in self._arrived:
                self._fail(
                    f"expected {self._name(replica)} to make one call at a time, found {call} in one thread while "
                    f"another is in {self._arrived[replica].call}; make such calls in {self._step}'s own thread"
                )
                self._raise()
            self._arrived[replica] = _Arrival(call, value, handled)
            self._look()
            meeting = self._meetings
            if replica != 0:
                self._changed.wait_for(lambda: self._meetings != meeting or self._error is not None)
                if self._meetings == meeting:
                    self._raise()
                return self._read(replica)
            self._changed.wait_for(lambda: len(self._arrived) == len(self._devices) or self._error is not None)
            self._raise()
            values = [self._arrived[index].value for index in range(len(self._devices))]
        copies: dict[int, Any] = {}
        raised: BaseException | None = None
        try:  # not under the lock: it may take long, and an interrupted thread must be able to leave
            result = once(values)
            with torch.enable_grad():  # as the first replica's has its graph in any case
                copies = {index: cloned(result) for index in range(1, len(self._devices))}
            return result
        except BaseException as error:
            raised = error
            raise
        finally:
            with self._changed:
                self._arrived.clear()
                self._copies, self._raised = copies, raised
                self._unread = len(self._devices) - 1
                self._meetings += 1
                self._changed.notify_all()
            raised = None  # else the traceback, which holds this frame, would keep itself alive

    def _read(self, replica: int) -> Any:
        """What came of the last meeting; kept no longer than until all have read it."""
        result, raised = self._copies.pop(replica, None), self._raised
        self._unread -= 1
        if self._unread == 0:
            self._raised = None
        if raised is not None:
            raise _another(raised)
        return result

    def end(self, replica: int, error: BaseException | None = None) -> None:
        """Says that a replica's step has ended; those that wait for it raise. What is said first holds.

        Args:
            replica: The replica's index.
            error: What it raised, if it did.
        """
        with self._changed:
            self._ended.setdefault(replica, error)
            self._look()

    def raised_by(self, replica: int) -> BaseException | None:
        """What a replica has raised, as far as it is known: also what it handled in a call that others did not make."""
        return self._ended.get(replica)

    def _look(self) -> None:
        """Notes why those that have arrived cannot meet, if they cannot, and wakes whoever may go on."""
        calls = {arrival.call for arrival in self._arrived.values()}
        differ = bool(calls) and (bool(self._ended) or len(calls) > 1)
        handled = {index: found.handled for index, found in self._arrived.items() if found.handled is not None}
        if self._error is None:
            if any(error is not None for error in self._ended.values()):
                self._error = self._abandoned
            elif differ and handled:
                self._ended.update(handled)
                self._error = self._abandoned
            elif differ:
                self._fail(self._difference())
        self._changed.notify_all()

    def _fail(self, message: str) -> None:
        self._error = lambda: RuntimeError(message)
        self._changed.notify_all()

    def _raise(self) -> None:
        """Raises if replicas cannot meet any more."""
        if self._error is not None:
            raise self._error()

    def _abandoned(self) -> RuntimeError:
        who = next(index for index, error in self._ended.items() if error is not None)
        return AbandonedError(f"{self._name(who)} has raised {self._ended[who]!r}")

    def _difference(self) -> str:
        found = [f"{self._name(index)} called {arrival.call}" for index, arrival in sorted(self._arrived.items())]
        found += [f"{self._name(index)} ended" for index in sorted(self._ended)]
        return (
            f"expected the replicas to make the same calls in the same order in {self._step}, as each is made once for "
            f"all of them; found that {', '.join(found)}; make the call in every replica, or in a hook such as "
            "on_train_batch_end"
        )

    def _name(self, replica: int) -> str:
        return f"replica {replica} ({self._devices[replica]})"


def _another(error: BaseException) -> BaseException:
    """The same error, with a traceback of its own if it can be copied, as another thread raises it too."""
    try:
        copied = copy.copy(error)
    except Exception:  # its class may need other arguments than it keeps
        return error
    return copied if type(copied) is type(error) else error
