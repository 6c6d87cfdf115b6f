"""The other ranks, as a wrapper knows them: their positions, agreements with them, their failures."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

from lightning_bucketddp.comm.groups import Group
from lightning_bucketddp.comm.hooks import CommHookError
from lightning_bucketddp.comm.work import POLL_SECONDS, polling
from lightning_bucketddp.layout.options import DEFAULT_TIMEOUT
from lightning_bucketddp.peers.abort_listener import STORE_SECONDS, add_note, is_from_torch, listen
from lightning_bucketddp.peers.agreement import Entry, PeerFailureError, RankMismatchError, first_difference
from lightning_bucketddp.peers.diagnose import Failure
from lightning_bucketddp.peers.encoding import decode, encode
from lightning_bucketddp.peers.end_signals import end_signals
from lightning_bucketddp.peers.names import in_words, this_process
from lightning_bucketddp.peers.status import Phase, Status

_PROBLEM = "problem: "


class Peers:
    """The other ranks, as one wrapper sees them. All ranks must make one at the same point of the program.

    While all is well nothing is sent. When a rank has waited for a second, its :class:`Watch` calls the roll.

    Args:
        group: The group.
        timeout: How long a rank waits for an agreement before it names the silent ranks.
        report_after: After how many seconds of waiting ranks report; 0 to leave that as it is.

    Attributes:
        number: Which of the group's wrappers this is; the same on every rank.
        rank: This rank.
        world_size: Number of ranks.
        run: The run in which it was made. A failure of this run, or of a later one, is for good.
        name: This rank in words, for the others.
        here: Where this rank is.
        position: How far it has come.
    """

    def __init__(self, group: Group, timeout: timedelta | None = None, report_after: float = 0) -> None:
        self._listener = listen(group, report_after)
        self._roll_call = self._listener.roll_call
        self.rank, self.world_size = group.rank, group.world_size
        self.here = Status(self.rank)
        self.position = self.here.position
        self.number = self._roll_call.enter(self.here)
        self._listener.begin_run()
        self.run = self._listener.run
        self._polls = 0  # since this wait began
        self._timeout = (timeout or DEFAULT_TIMEOUT).total_seconds()
        self._store = self._listener.store.limited(self._timeout + STORE_SECONDS)  # a wait for others is no longer
        self.name = in_words([self.rank], {self.rank: this_process()})
        self._last_keys: list[str] = []  # this rank's, of the last agreement

    def in_words(self, ranks: Sequence[int]) -> str:
        """Ranks in words, with their hosts and process ids. May read the store."""
        return self._roll_call.in_words(ranks)

    def end_training(self) -> None:
        """Tell the other ranks that this one comes to no further pass."""
        self.here.end_training()
        with suppress(RuntimeError):  # the store is gone
            self._roll_call.write(self._listener.store)

    # -- agreements ----------------------------------------------------------------------------------

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Say ``mine`` on ``topic`` and return every rank's answer, by rank.

        It goes through the store. A collective would be paired with another one on ranks that do not ask.

        Args:
            topic: The subject, for errors; the same on every rank.
            mine: This rank's value.

        Raises:
            RuntimeError: If some ranks stay silent for the whole timeout; names them.
        """
        store, self._polls = self._store, 0
        with self.here.waiting(topic, Phase.AGREEMENT):
            name = f"{self.number}/{self.position.agreement}/{topic}"
            keys = [f"{name}/{rank}" for rank in range(self.world_size)]
            store.set(keys[self.rank], mine)
            store.add(counter := f"{name}/said", 1)
            began = time.monotonic()
            while store.add(counter, 0) < self.world_size:  # wait() would block the connection; torch logs its end
                waited = time.monotonic() - began
                time.sleep(min(max(waited / 10, 0.001), POLL_SECONDS))
                if waited > (self._polls + 1) * POLL_SECONDS:
                    self.poll()
                if waited > self._timeout:
                    silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
                    raise RuntimeError(
                        f"rank {self.rank}: waited {self._timeout:.0f} s for every rank to agree on {topic!r}; nothing "
                        f"came from {self.in_words(silent)}, not at this point of the program: look for a branch that "
                        "depends on the rank, or for an error in its output"
                    )
            more = [] if self._roll_call.processes or self.world_size == 1 else ["status/0"]
            values = store.multi_get([*keys, *more])
            if more:  # rank 0 may be gone when another rank is to tell where it ran
                self._roll_call.note_process(0, values.pop())
            answers = [value.decode() for value in values]
        for key in self._last_keys:  # every rank has read the last topic, or it would not have come to this one
            store.delete_key(key)
        self._last_keys = [keys[self.rank], *([counter] if self.rank == 0 else ())]
        return answers

    def require_same(self, topic: str, entries: Sequence[Entry], problem: Exception | None = None) -> None:
        """Require that all ranks have the same entries in the same order.

        Ranks compare digests first. The entries travel only if these differ.

        Args:
            topic: The subject, for errors; the same on every rank.
            entries: What this rank has.
            problem: What is wrong on this rank, so that it cannot go on in any case.

        Raises:
            Exception: The problem, on the rank that has it.
            PeerFailureError: If another rank has a problem; says which.
            RankMismatchError: On every rank, naming the first entry that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        text = encode(entries)
        mine = hashlib.sha256(text.encode()).hexdigest() if problem is None else f"{_PROBLEM}{problem}"
        digests = self.exchange(topic, mine)
        if problem is not None:
            raise problem
        for rank, digest in enumerate(digests):
            if digest.startswith(_PROBLEM):
                failed, why = self.in_words([rank]), digest.removeprefix(_PROBLEM)
                raise PeerFailureError(f"rank {self.rank}: {failed} cannot go on with {topic}: {why}")
        if len(set(digests)) == 1:
            return
        everyone = [decode(said, Sequence[tuple[str, str]], ()) for said in self.exchange(f"{topic} in full", text)]
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise RankMismatchError(
            f"rank {self.rank}: ranks disagree on {topic}: {first_difference(everyone[0], everyone[other], other)}. "
            "Build the same module with the same options on every rank"
        )

    # -- waiting -------------------------------------------------------------------------------------

    @contextmanager
    def waiting_for(self, what: str | Callable[[], str], phase: Phase = Phase.RUNS) -> Iterator[None]:
        """Context around a wait for a collective. An error in it names the awaited thing, and is for good.

        Args:
            what: What is waited for, in words.
            phase: What kind of thing it is.
        """
        self._polls = 0
        with self.here.waiting(what, phase), polling(self.poll):
            try:
                yield
            except (PeerFailureError, RankMismatchError, CommHookError) as error:
                self.failed_by(error)
                raise
            except RuntimeError as error:
                if str(error).startswith("DataLoader worker"):  # torch raises it in a signal handler, wherever that is
                    raise
                self._fail_after(what if isinstance(what, str) else what(), error)

    def poll(self) -> None:
        """Look whether this rank waits in vain, every half second while it waits.

        The listener brings all news, and the thread that watches looks for mistakes: the store is not asked.

        Raises:
            PeerFailureError: If another rank failed, or has ended training; or if this rank is to end, and another one
                does not come.
            RankMismatchError: If ranks are at different points of the program.
        """
        self.require_usable()
        self._polls += 1
        if end_signals.impatient(waited := self._polls * POLL_SECONDS):
            answers = self._roll_call.ask(self.number)
            away = {answer.rank: answer.process for answer in answers if not (answer.heard and answer.waiting_for)}
            cause = f"a signal asks all ranks to end, and {in_words([*away], away)} did not come in {waited:.0f} s"
            self._listener.publish(Failure(cause))
            self.require_usable()

    @contextmanager
    def trainers_collective(self, what: str) -> Iterator[None]:
        """Context around a collective of the Trainer's, of all ranks, while nothing else of this package is under way.

        Args:
            what: Such as ``"the Trainer's barrier"``.

        Raises:
            PeerFailureError: Instead of the collective's error, if another rank has failed.
            RankMismatchError: If ranks wait for different things.
        """
        with self.here.waiting(what, Phase.COLLECTIVE):
            try:
                yield
            except RuntimeError:
                self.look()
                self.require_usable()
                raise

    def steps(self) -> str:
        """In which step which ranks are, in words, as far as they answer a roll call."""
        found = {self.position.step: [self.rank]}
        with suppress(RuntimeError):  # the store is gone
            for status in self._roll_call.ask(self.number):
                if status.heard and status.rank != self.rank:
                    found.setdefault(status.position.step, []).append(status.rank)
        return ", ".join(f"{self.in_words(sorted(ranks))} in step {step}" for step, ranks in sorted(found.items()))

    # -- failures ------------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the ranks cannot go on together, as far as is known here; None if they can. Asks nobody."""
        return self._listener.failure_since(self.run)

    def require_usable(self) -> None:
        """Require that the ranks can go on together, as far as is known here. Asks nobody.

        Raises:
            PeerFailureError: If a rank failed, this one or another.
            RankMismatchError: If ranks were found at different points of the program.
        """
        if (failure := self.failure) is None:
            return
        self._listener.leave()
        if failure.mismatch:
            raise RankMismatchError(f"rank {self.rank}: {failure.text}")
        raise PeerFailureError(
            f"rank {self.rank}: pass {self.position.pass_number} cannot be completed: {failure.text}. Gradients of the "
            "ranks are no longer the same; restart from a checkpoint"
        )

    def look(self) -> None:
        """Read the news in the store, unless it is gone: it goes with the rank that serves it."""
        with suppress(RuntimeError):
            self._roll_call.look(self._listener.store)

    def fail(self, cause: str) -> None:
        """Say that this rank failed: for good, and to all ranks. What they heard of first stays.

        A rank without others goes on.

        Args:
            cause: What happened, as the end of a sentence that begins with the rank.
        """
        if self.world_size > 1:
            self._listener.leave()
            self._listener.publish(Failure(f"{self.name} {cause}"))

    def failed_by(self, error: BaseException) -> None:
        """Say that this rank failed, because of an error that is about to be raised.

        Args:
            error: The error. The other ranks find a PeerFailureError and a RankMismatchError by themselves.
        """
        if isinstance(error, PeerFailureError | RankMismatchError):
            text = str(error).removeprefix(f"rank {self.rank}: ")
            self._roll_call.know(Failure(text, isinstance(error, RankMismatchError), self.run))
        elif self.failure is None:
            # A hook's collective fails where another rank is gone.
            gone = self._listener.ask_why(0) if is_from_torch(error.__cause__) else ""
            add_note(error, f"rank {self.rank}: {gone}" if gone else "")
            self.fail(f"raised {type(error).__name__}: {error}" + (f"; {gone}" if gone else ""))
        else:  # it may be a consequence, as in a hook whose collective was aborted
            self._listener.explain(error)

    def failing(self) -> Failing:
        """A context in which an error leaves the ranks out of step."""
        return Failing(self)

    def _fail_after(self, awaited: str, error: RuntimeError) -> NoReturn:
        """Fail after a collective raised, and say which rank caused it, if that can be found out."""
        self.look()
        self.require_usable()
        told = self._listener.ask_why(self.number)
        self.look()
        known = "" if self.failure is None else self.failure.text
        cause = known or told or "another rank ended or did not get here in time; its output tells why"
        why = re.sub(r"^\[/\S+\] |\. This is typically.*", "", str(error), flags=re.DOTALL)  # gloo's file and advice
        self._listener.leave()
        self._listener.publish(Failure(told or f"{self.name} failed while it waited for {awaited}: {why}"))
        text = f"rank {self.rank}: waiting for {awaited} failed in pass {self.position.pass_number}: {cause} ({why})"
        raise PeerFailureError(f"{self._roll_call.stuck_report}\n{text}".lstrip()) from error  # the cause stands last


class Failing:
    """See :meth:`Peers.failing`. A class: contexts made of generators take far longer."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._peers.failed_by(error)
