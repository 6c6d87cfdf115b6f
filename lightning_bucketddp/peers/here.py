"""This rank's own record, as the rank goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from zlib import crc32

from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.diagnose import LOOK_FOR_STEPS
from lightning_bucketddp.peers.status import Phase, Position, Status


class Here:
    """Where this rank is.

    Args:
        rank: This rank.

    Attributes:
        rank: The same.
        position: How far it has come.
        waits_for: What it waits for, by its kind and in words.
        ended: Whether it has ended training.
        failure: Why it cannot go on, in words; empty if it can.
        names: The names of the parameters, as far as others may ask for those that this rank trains.
        updated: A number that tells which buckets sharded optimizers have updated.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = Position()
        self.waits_for: tuple[Phase, str | Callable[[], str]] = Phase.RUNS, ""
        self.ended = False
        self.failure = ""
        self.names: Sequence[str] = ()
        self.updated = 0
        self._trainable: Sequence[bool] = ()
        self._step_ended = False

    def begin_step(self) -> None:
        """A training step begins, on every rank."""
        self._step_ended = False
        self.position = self.position._replace(step=self.position.step + 1, backward=0)

    def end_step(self) -> None:
        """All backwards of the step have been run."""
        self._step_ended = True

    def begin_forward(self) -> None:
        """A training forward begins."""
        self.position = self.position._replace(forward=self.position.forward + 1)

    def forget_forwards(self) -> None:
        """Ranks have run different numbers of forwards, as they should."""
        self.position = self.position._replace(forward=0)

    def begin_exchange(self) -> None:
        """An exchange of BatchNorm statistics or of module buffers begins, on every rank."""
        self.position = self.position._replace(exchange=self.position.exchange + 1)

    def begin_agreement(self) -> None:
        """An agreement through the store begins, on every rank."""
        self.position = self.position._replace(agreement=self.position.agreement + 1)

    def end_pass(self) -> None:
        """A synchronised pass has been completed."""
        at = self.position
        self.position = at._replace(pass_number=at.pass_number + 1, backward=at.backward + 1)

    def note_trainable(self, names: Sequence[str], trainable: Sequence[bool]) -> None:
        """Keep which parameters this rank trains, for ranks that want to agree on it.

        Args:
            names: The parameters' names.
            trainable: Per parameter, whether it is trained.
        """
        self.names, self._trainable = names, trainable

    def note_update(self, buckets: Sequence[int], complete: bool) -> None:
        """A sharded optimizer has made a step on this rank, or the first stages of one.

        Args:
            buckets: The buckets whose parameters travel after it.
            complete: Whether the step is complete.
        """
        self.position = self.position._replace(update=self.position.update + complete)
        self.updated = crc32(repr((self.updated, self.position.pass_number, buckets)).encode())

    def require_same_updates(self, everyone: Sequence[Sequence[int]]) -> None:
        """Require that the ranks' optimizers have made the same steps.

        Args:
            everyone: By rank, how many steps, and :attr:`updated`.

        Raises:
            RankMismatchError: If not.
        """
        other = next((rank for rank, it in enumerate(everyone) if it != everyone[0]), None)
        if other is not None:
            raise RankMismatchError(
                f"rank {self.rank}: ranks come to pass {self.position.pass_number} after different optimizer steps, "
                f"rank 0 after {everyone[0][0]} and rank {other} after {everyone[other][0]}: {LOOK_FOR_STEPS}"
            )

    def status(self) -> Status:
        """The record."""
        phase, what = self.waits_for
        with suppress(Exception):  # another thread asks: what is waited for may have come
            what = what if isinstance(what, str) else what()
        asked = phase in (Phase.AGREEMENT, Phase.PASS)
        trainable = "".join("01"[flag] for flag in self._trainable) if asked else ""
        what = what if isinstance(what, str) else "gradients"
        return Status(self.rank, self.position, phase, what, self._step_ended, self.ended, self.failure, trainable)
