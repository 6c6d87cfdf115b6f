"""What the reducer asks of, and tells, the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.peers.agreement import Agreement, PeerFailureError, RankMismatchError
from lightning_bucketddp.peers.control import Control, ControlExchange, Report, fingerprint, write
from lightning_bucketddp.peers.control_checks import ControlChecks
from lightning_bucketddp.peers.failures import Failures


class PassPeers:
    """The other ranks, as a pass of one set of parameters sees them.

    Args:
        collectives: The group.
        agreement: The group's store.
        failures: What is known of failures.
        checks: What the ranks must have in common when they meet in a pass.
        table: The parameters.
        topics: What other ranks may want to agree on now, though this rank does not.

    Attributes:
        since_reduction: The parameters that were trainable in any pass since the last reduction; None if there was no
            pass.
        agreed: Those that the ranks agreed on last.
    """

    def __init__(
        self,
        collectives: Collectives,
        agreement: Agreement,
        failures: Failures,
        checks: ControlChecks,
        table: SlotTable,
        topics: Sequence[Callable[[], str]],
    ) -> None:
        self._collectives, self._agreement, self._failures, self._checks = collectives, agreement, failures, checks
        self._table, self._topics = table, topics
        self.agreed = table.trainable_now()
        self.since_reduction: TrainableSet | None = None
        self._changes = 0

    @property
    def rank(self) -> int:
        """This rank."""
        return self._collectives.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._collectives.world_size

    # -- the trainable set ---------------------------------------------------------------------------

    def note(self, trainable: TrainableSet) -> TrainableSet:
        """Add the set of a pass; return the union since the last reduction."""
        before = self.since_reduction
        if before is not None and before != trainable:
            trainable = tuple([a or b for a, b in zip(before, trainable, strict=True)])
        self.since_reduction = trainable
        return trainable

    def agree(self, trainable: TrainableSet) -> bool:
        """Make sure that all ranks go from the set agreed last to ``trainable``; ask them if it is another.

        A change back to an earlier set is agreed too: a rank that changes alone would launch other buckets than the
        rest, which ends a gloo process on the spot and hangs NCCL.

        Returns:
            Whether the set has changed.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs and both sides.
            RuntimeError: If some ranks stay silent for the whole timeout.
        """
        if trainable == self.agreed:
            return False
        failures = self._failures
        self._changes += 1
        try:
            with failures.giving_up_on_errors():
                self._agreement.require_same_trainable(
                    failures.pass_number, self._changes, trainable, self._table.names, failures.look_from_opening
                )
        except (PeerFailureError, RankMismatchError):
            raise
        except RuntimeError as error:
            failures.give_up(str(error), cause=f"gave up: {error}")
            raise
        self.agreed = trainable
        return True

    # -- a pass --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Look for failures, and for ranks that are elsewhere, while this rank waits for the pass that it is in.

        Only here may it answer for this pass: before it has opened the pass itself, a question is no disagreement.

        Raises:
            PeerFailureError: If another rank failed, or has ended training.
            RankMismatchError: If another rank is elsewhere in the program.
        """
        failures, agreement, number, steps = self._failures, self._agreement, self._failures.pass_number, self._checks
        failures.raise_if_published()
        failures.raise_if_missed()
        agreement.answer_trainable(number, self._changes + 1, self.agreed, self._table.names)
        for topic in self._topics:
            agreement.answer_none(topic(), f"is in pass {number} without it")
        skipper = agreement.skipped_by(steps.steps)
        if skipper is not None:
            raise RankMismatchError(
                f"rank {self.rank}: rank {skipper} ran no backward in step {steps.steps}, in which this rank is in "
                f"pass {number}: look for a backward in a branch that depends on the rank or on its data"
            )

    def report(self, trainable: TrainableSet, failed: bool, out_of_data: bool) -> Report:
        """What this rank says of a pass before participants add to it."""
        failures = self._failures
        seen = fingerprint(self._agreement.number, failures.pass_number, trainable, failures.updated)
        return Report(seen, self._checks.steps, self._checks.forwards, failed=failed, out_of_data=out_of_data)

    def exchange(self, report: Report, used: Collection[int]) -> ControlExchange:
        """Send the control vector of a pass in a collective of its own."""
        device = self._table.all_params[0].device
        return ControlExchange.start(self._collectives, device, report, len(self._table), used)

    def put_in(self, vector: Tensor, report: Report, used: Collection[int]) -> ControlExchange:
        """Write the control vector of a pass where it travels with a bucket."""
        write(vector, report, used)
        return ControlExchange(vector, self.world_size)

    def read(self, exchange: ControlExchange, needed: bool) -> Control | None:
        """Require that the pass went well on every rank, now if that is needed or costs nothing; else later.

        Raises:
            PeerFailureError: If backward raised on some rank.
            RankMismatchError: If ranks met from different places of the program.
        """
        if needed or exchange.arrived():
            return self._checks.require_success(exchange.read())
        self._checks.read_later(exchange)
        return None

    def pass_ended(self) -> None:
        """Gradients have been reduced, or dropped on every rank."""
        self.since_reduction = None
        self._failures.pass_number += 1

    # -- failures ------------------------------------------------------------------------------------

    def publish(self, cause: str) -> None:
        """Tell the others that backward raised here in this pass; should it do so everywhere, training may go on."""
        self._failures.publish(cause)

    def publish_skip(self) -> None:
        """Tell ranks that run a backward in this step that this rank ran none."""
        self._agreement.publish_skip(self._checks.steps)

    def give_up(self, cause: str) -> None:
        """Give up for good, as ``cause`` happened on this rank and not on all."""
        self._failures.give_up(self._failures.cannot_complete(f"rank {self.rank} {cause}"), cause)

    def waiting_for(self, what: str | Callable[[], str]) -> AbstractContextManager[None]:
        """Around a wait: give up on whatever it raises, and say what was waited for."""
        return self._failures.waiting_for(what)

    def giving_up_on_errors(self) -> AbstractContextManager[None]:
        """Give up on errors after which the ranks are no longer in step."""
        return self._failures.giving_up_on_errors()
