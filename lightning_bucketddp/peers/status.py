"""Where a rank is: one record per rank and wrapper, which other ranks read when they wait in vain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from zlib import crc32

from lightning_bucketddp.peers.names import Process, in_words, this_process

Frame = tuple[str, int, str]
"""A file, a line and a function."""


class Phase(StrEnum):
    """The kind of thing that a rank waits for. Some are the names of counters in :class:`Position`."""

    RUNS = "runs"
    """Nothing, or a collective that has no counter."""

    ROOT = "root"
    """The others, at the root of a pass."""

    PASS = "pass"
    """Gradients, after its backward."""

    EXCHANGE = "exchange"
    """BatchNorm statistics or module buffers."""

    UPDATE = "update"
    """Parameters that others have updated."""

    AGREEMENT = "agreement"
    """An agreement: through the store, on logged keys, or on an optimizer's state."""

    COLLECTIVE = "collective"
    """A collective of the Trainer's."""


COUNTED = (Phase.EXCHANGE, Phase.AGREEMENT, Phase.COLLECTIVE)
"""Waits that every rank counts when they begin."""


@dataclass(slots=True)
class Position:
    """How far a rank has come in the program. Ranks that run the same program count alike.

    Attributes:
        pass_number: Synchronised passes completed.
        step: Steps begun, if the caller tells.
        backward: Synchronised passes completed in this step.
        forward: Training forwards begun.
        exchange: Exchanges of BatchNorm statistics and of module buffers begun.
        agreement: Agreements begun: through the store, on logged keys, or on an optimizer's state.
        collective: Collectives of a Trainer's ``fit`` begun.
        validation: Validations in a Trainer's ``fit`` begun.
        updates: Steps of sharded optimizers, and a hash of the buckets that they have updated. One value, for it is
            written while another thread copies the record.
    """

    pass_number: int = 0
    step: int = 0
    backward: int = 0
    forward: int = 0
    exchange: int = 0
    agreement: int = 0
    collective: int = 0
    validation: int = 0
    updates: tuple[int, int] = (0, 0)

    @property
    def update(self) -> int:
        """Steps of sharded optimizers."""
        return self.updates[0]


@dataclass
class Status:
    """Where one rank is. Each rank keeps its own record up to date, and hands out snapshots of it.

    Attributes:
        rank: The rank.
        position: How far it has come.
        phase: What it waits for.
        waiting_for: The same in words.
        on_device: How many of the last passes an accelerator has not ended; 0 while the host waits for something.
        step_ended: Whether all backwards of the step have been run.
        ended: Whether it has ended training.
        heard_of: The last run in which it has heard of a failure.
        trainable: Per parameter, whether the rank trains it. Travels only if the others may ask for it.
        names: The names of the parameters. They do not travel: whoever reads a record puts in its own.
        stack: Where the thread that trains is, the innermost frame first. It travels in a rank's first record; whoever
            reads the others puts it in.
        silent_for: For how many seconds the rank has not answered the last roll call; 0 if it has. Else the record is
            older.
        waited: How long the rank has waited so far, in seconds of the host.
        process: Where the rank runs. Filled in for travel.
        records: The rank's records of all wrappers, by number, without the rank. Whoever reads a record puts them in,
            if some rank waits in another wrapper.
    """

    rank: int
    position: Position = field(default_factory=Position)
    phase: Phase = Phase.RUNS
    waiting_for: str | Callable[[], str] = ""
    on_device: int | Callable[[], int] = 0
    step_ended: bool = False
    ended: bool = False
    heard_of: int = field(default=-1, repr=False)
    trainable: Sequence[bool] = ()
    names: Sequence[str] = field(default=(), repr=False)
    stack: Sequence[Frame] = field(default=(), repr=False)
    silent_for: float = field(default=0.0, repr=False)
    waited: float = field(default=0.0, repr=False)
    process: Process = field(default=("", 0), repr=False, compare=False)
    records: Sequence[Status] = ()

    @property
    def name(self) -> str:
        """The rank in words."""
        return in_words([self.rank], {self.rank: self.process})

    @property
    def heard(self) -> bool:
        """Whether the rank has answered the last roll call."""
        return not self.silent_for

    def snapshot(self, stack: Sequence[Frame] = ()) -> Status:
        """The record as other ranks get it.

        Args:
            stack: Where the thread that trains is.
        """
        ended = self.ended  # before the position: it may end while this thread reads
        what = self.waiting_for
        on_device = 0
        with suppress(Exception):  # called by another thread: the awaited may arrive right now
            what = what if isinstance(what, str) else what()
            if not what:
                on_device = self.on_device if isinstance(self.on_device, int) else self.on_device()
        what = what if isinstance(what, str) else "gradients"
        what = f"the gradients of {on_device} pass(es), on the device" if on_device else what
        asked = self.phase in (Phase.AGREEMENT, Phase.PASS)
        trainable = self.trainable if asked else ()
        at = replace(self.position)
        snapshot = replace(self, position=at, waiting_for=what, on_device=on_device, ended=ended, stack=stack)
        snapshot.trainable, snapshot.names, snapshot.process = trainable, (), this_process()
        return snapshot

    @contextmanager
    def waiting(self, what: str | Callable[[], str], phase: Phase) -> Iterator[None]:
        """Note what this rank waits for, and count the wait.

        Args:
            what: The same in words.
            phase: What kind of thing it is.
        """
        if phase in COUNTED:  # on every rank
            setattr(self.position, phase, getattr(self.position, phase) + 1)
        before, began = (self.phase, self.waiting_for), time.perf_counter()
        self.phase, self.waiting_for = phase, what
        try:
            yield
        finally:
            self.phase, self.waiting_for = before
            if not before[1]:  # else a wait inside another one
                self.waited += time.perf_counter() - began

    def begin_step(self) -> None:
        """A training step begins, on every rank."""
        self.step_ended = False
        self.position.step += 1
        self.position.backward = 0

    def end_step(self) -> None:
        """All backwards of the step have been run."""
        self.step_ended = True

    def end_training(self) -> None:
        """This rank comes to no further pass."""
        self.ended = True

    def begin_forward(self) -> None:
        """A training forward begins."""
        self.position.forward += 1

    def forget_forwards(self) -> None:
        """Count forwards anew, after ranks have rightly run different numbers of them."""
        self.position.forward = 0

    def begin_validation(self) -> None:
        """A validation begins, on every rank."""
        self.position.validation += 1

    def end_pass(self) -> None:
        """A synchronised pass has been completed."""
        self.position.pass_number += 1
        self.position.backward += 1

    def note_trainable(self, names: Sequence[str], trainable: Sequence[bool]) -> None:
        """Keep which parameters this rank trains, for ranks that want to agree on it.

        Args:
            names: The parameters' names.
            trainable: Per parameter, whether it is trained.
        """
        self.names, self.trainable = names, trainable

    def note_update(self, buckets: Sequence[int]) -> None:
        """A sharded optimizer has made a step on this rank.

        Args:
            buckets: The buckets whose parameters travel after it.
        """
        number, before = self.position.updates
        self.position.updates = number + 1, crc32(repr((before, self.position.pass_number, buckets)).encode())
