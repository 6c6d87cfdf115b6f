"""Giving up: what makes a rank stop for good, what it says, and who else hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from zlib import crc32

from lightning_bucketddp.comm.hooks import CommHookError
from lightning_bucketddp.peers.agreement import Agreement, PeerFailureError, RankMismatchError

_LOOK_FOR_STEPS = (
    "look for an optimizer.step() in a branch that depends on the rank, or for one that raised. The parameters of the "
    "ranks are no longer the same; restart from a checkpoint"
)


_LOST = "could not reduce"


class Failures:
    """What this rank knows of failures, its own and others'.

    Args:
        agreement: The group's store.
        on_give_up: Called when this rank gives up for good.

    Attributes:
        message: What every later use is to raise; empty while this rank has not given up.
        pass_number: The synchronised pass that this rank is in, or comes to next.
        exchanges: How many exchanges of BatchNorm statistics and of module buffers this rank has begun.
        updates: How many steps of sharded optimizers this rank has made.
        updated: A number that tells which buckets these have updated.
    """

    def __init__(self, agreement: Agreement, on_give_up: Callable[[], None]) -> None:
        self._agreement = agreement
        self._rank = agreement.rank
        self._on_give_up = on_give_up
        self.message = ""
        self.pass_number = 0
        self.exchanges = 0
        self.updates = 0
        self.updated = 0
        self._ended = False

    def give_up(self, message: str, cause: str | None = None) -> None:
        """Gives up for good.

        Args:
            message: What every later use raises.
            cause: What happened, for other ranks that would otherwise wait for this one in a later pass; as the end of
                a sentence that begins with the rank.
        """
        self.message = message
        self._on_give_up()
        if cause is not None:
            self._agreement.publish_failure(None, cause)

    def publish(self, cause: str) -> None:
        """Tells the others that backward raised here in this pass; should it do so everywhere, training may go on."""
        self._agreement.publish_failure(self.pass_number, cause)

    def publish_for_good(self, cause: str) -> None:
        """Tells ranks that wait, or will wait, for this rank that it does not come."""
        self._agreement.publish_failure(None, cause)

    def published(self) -> str | None:
        """The first failure, in words, that concerns this pass, if some rank published one."""
        return self._agreement.failure(self.pass_number)

    def raise_if_published(self) -> None:
        """Called now and then while this rank waits for the others.

        Raises:
            PeerFailureError: If another rank failed in this pass, or for good.
        """
        cause = self.published()
        if cause is not None:
            raise PeerFailureError(self.cannot_complete(cause + self._silent(cause)))

    def _silent(self, cause: str) -> str:
        """Which ranks are gone, as far as can be told, if one was found to be."""
        if _LOST not in cause:
            return ""
        silent = self._agreement.silent_after_failure()
        return f"; nothing is heard of rank(s) {', '.join(map(str, silent))}" if silent else ""

    def look_from_exchange(self, what: str) -> None:
        """Called now and then while this rank waits in an exchange that belongs to forward or backward.

        Args:
            what: What is exchanged.

        Raises:
            PeerFailureError: As :meth:`raise_if_published`.
        """
        self.raise_if_published()
        self._agreement.publish_exchange(self.pass_number, self.exchanges, what)

    def publish_end(self) -> None:
        """Says that this rank has ended training: whoever comes to another pass waits in vain."""
        self._ended = True
        self._agreement.publish_end(self.pass_number, self.updates)

    def _cause_if_ended(self) -> str | None:
        # A rank that has said so itself runs what all run behind the end of training.
        rank = None if self._ended else self._agreement.ended_before(self.pass_number)
        if rank is None:
            return None
        return (
            f"rank {rank} has ended training after {self.pass_number} passes; look for ranks with different numbers of "
            'batches, which need uneven_inputs="world_size"'
        )

    def note_update(self, buckets: Sequence[int], complete: bool) -> None:
        """A sharded optimizer has made a step on this rank, or the first stages of one.

        Args:
            buckets: The buckets whose parameters travel after it.
            complete: Whether the step is complete.
        """
        self.updates += complete
        self.updated = crc32(repr((self.updated, self.pass_number, buckets)).encode())

    def look_from_update(self, what: str) -> None:
        """Called now and then while this rank waits for parameters.

        Args:
            what: Which.

        Raises:
            PeerFailureError: As :meth:`raise_if_published`.
            RankMismatchError: If another rank has ended training without the step.
        """
        self.raise_if_published()
        rank = self._agreement.ended_without_update(self.pass_number, self.updates)
        if rank is not None:
            cause = f"waits for {what} of optimizer step {self.updates}, and rank {rank} has ended training without it"
            self.publish_for_good(cause)
            raise RankMismatchError(f"rank {self._rank} {cause}: {_LOOK_FOR_STEPS}")
        self._agreement.publish_update(self.pass_number, self.updates, f"{what} of optimizer step {self.updates}")

    def _raise_if_behind(self) -> None:
        ahead = self._agreement.update_beyond(self.pass_number, self.updates)
        if ahead is not None:
            cause = f"is in pass {self.pass_number} after {self.updates} optimizer steps, while {ahead}"
            self.publish_for_good(cause)
            raise RankMismatchError(f"rank {self._rank} {cause}: {_LOOK_FOR_STEPS}")

    def look_from_opening(self) -> None:
        """Called now and then while this rank waits for the others to open the pass that it has come to.

        Raises:
            PeerFailureError: As :meth:`raise_if_published`.
            RankMismatchError: If another rank waits for the parameters of an optimizer step that this one has not made.
        """
        self.raise_if_published()
        self._raise_if_behind()

    def require_same_updates(self, everyone: Sequence[Sequence[int]]) -> None:
        """Requires that the ranks' optimizers have made the same steps.

        Args:
            everyone: By rank, how many steps, and :attr:`updated`.

        Raises:
            RankMismatchError: If not.
        """
        other = next((rank for rank, it in enumerate(everyone) if it != everyone[0]), None)
        if other is not None:
            raise RankMismatchError(
                f"rank {self._rank}: ranks come to pass {self.pass_number} after different optimizer steps, rank 0 "
                f"after {everyone[0][0]} and rank {other} after {everyone[other][0]}: {_LOOK_FOR_STEPS}"
            )

    def raise_if_missed(self) -> None:
        """Called now and then while this rank waits for gradients, with its backward behind it.

        Raises:
            PeerFailureError: If another rank has ended training.
            RankMismatchError: If another rank waits in an exchange of this pass that this one has not come to, or for
                the parameters of an optimizer step before it.
        """
        ended = self._cause_if_ended()
        if ended is not None:
            raise PeerFailureError(self.cannot_complete(ended))
        self._raise_if_behind()
        missed = self._agreement.exchange_beyond(self.pass_number, self.exchanges)
        if missed is not None:
            cause = f"has ended its backward of pass {self.pass_number} while {missed}"
            self.publish_for_good(cause)
            raise RankMismatchError(
                f"rank {self._rank} {cause}: look for a loss that does not reach that layer on every rank (a "
                "training_step that returns None), or for a branch that depends on the rank"
            )

    def raise_if_elsewhere(self) -> None:
        """Called now and then while this rank waits for module buffers.

        Raises:
            PeerFailureError: As :meth:`raise_if_published`.
            RankMismatchError: If another rank waits for BatchNorm statistics where this one waits for module buffers.
        """
        self.raise_if_published()
        elsewhere = self._agreement.waits_in_exchange(self.pass_number, self.exchanges)
        if elsewhere is not None:
            cause = f"waits for the module buffers before pass {self.pass_number} while {elsewhere}"
            self.publish_for_good(cause)
            raise RankMismatchError(
                f"rank {self._rank} {cause}: look for a forward in training mode that not all ranks run (one that "
                "makes samples on rank 0 alone); put the module into eval mode for it"
            )

    def cannot_complete(self, cause: str) -> str:
        """The message for a pass that cannot be completed.

        Args:
            cause: Why, as a sentence without its full stop.
        """
        return (
            f"rank {self._rank}: pass {self.pass_number} cannot be completed: {cause}. Gradients of the ranks are no "
            "longer the same; restart from a checkpoint"
        )

    @contextmanager
    def giving_up_on_errors(self) -> Iterator[None]:
        """Gives up on errors after which the ranks are no longer in step."""
        try:
            yield
        except (PeerFailureError, RankMismatchError) as error:  # which the other ranks find too
            self.give_up(str(error))
            raise
        except CommHookError as error:  # what the hook has started, and what not, is not known
            self.give_up(f"rank {self._rank}: {error}", cause=f"cannot go on in pass {self.pass_number}: {error}")
            raise

    @contextmanager
    def waiting_for(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Around a wait: gives up on whatever it raises, and says what was waited for."""
        try:
            with self.giving_up_on_errors():
                yield
        except (PeerFailureError, RankMismatchError, CommHookError):
            raise
        except RuntimeError as error:
            awaited = what if isinstance(what, str) else what()
            cause = "another rank ended or did not get here in time; its output tells why"
            with suppress(RuntimeError):  # the store goes with the rank that serves it
                cause = self.published() or self._cause_if_ended() or cause
            lost = f"{_LOST} {awaited}: {error}"
            self.publish_for_good(lost)  # first: the others do not answer before they have heard of it
            cause += self._silent(lost)
            self.give_up(f"rank {self._rank}: reducing {awaited} failed in pass {self.pass_number}: {cause} ({error})")
            raise PeerFailureError(self.message) from error
