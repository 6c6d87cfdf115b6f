"""The interface between passes and a feature that takes part in them. The reducer knows no features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.control import Control, ControlExchange, Report
from lightning_bucketddp.reducer.state import Pass


@dataclass(frozen=True)
class PassResult:
    """A pass when all reductions are complete, before gradients are published.

    Attributes:
        this_pass: The pass; its active buckets hold reduced gradients.
        exchange: The control vector; nobody need wait for it.
        control: What it says; None if no participant reads it now and reading would wait for an accelerator.
    """

    this_pass: Pass
    exchange: ControlExchange
    control: Control | None


class Participant:
    """A feature that takes part in every pass. Override what it needs.

    The list of participants follows from the options and is the same on every rank; its order is the order of their
    collectives. All live as long as the wrapper.
    """

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Take part in passes of these parameters from now on. Called when they are wrapped or taken in anew.

        Send nothing.

        Args:
            table: The parameters and their slots.
            storage: The memory of their gradients.
            planner: Plans their layouts.
        """

    @property
    def follows_gradients(self) -> bool:
        """Whether it follows every gradient of the next synchronised pass, the same on every rank.

        Then nothing is launched before backward ends.
        """
        return False

    @property
    def reads_control(self) -> bool:
        """Whether :meth:`use_reports` needs the control vector in this pass. Reading it waits for an accelerator."""
        return False

    def opened(self, this_pass: Pass) -> None:
        """A pass has opened. Raise to refuse it."""

    def ready(self, slot: int) -> None:
        """The gradient of ``slot`` has been accumulated. Called if it follows gradients."""

    def before_launch(self, bucket: Bucket) -> None:
        """``bucket`` is about to be packed. Raise to refuse its gradients."""

    def backward_ended(self, raised: bool) -> None:
        """Backward has ended, or raised. Collectives may be under way."""

    def decide_layout(self) -> Layout | None:
        """Decide where slots lie, the same on every rank, before anything is launched. Called if it follows gradients.

        Returns:
            The layout; None to stay in the present one.
        """
        return None

    def laid_out(self, layout: Layout) -> None:
        """Buckets were laid out anew, on every rank. Send nothing."""

    def report(self, report: Report) -> None:
        """All buckets have been launched. Add to the control vector what only this rank knows, or raise."""

    def use_reports(self, result: PassResult) -> None:
        """Use the ranks' reports. Start collectives, if need be, and wait for them."""

    def ended(self) -> None:
        """A synchronised pass has ended: gradients are published, or were dropped on every rank."""


class Participants(tuple[Participant, ...]):
    """The participants, in the order of their collectives.

    Most of them override few moments, and each pass has many: the others are not called.
    """

    def __init__(self, participants: Sequence[Participant]) -> None:
        moments = [name for name in vars(Participant) if not name.startswith("_")]
        self._overriding = {
            name: [each for each in self if getattr(type(each), name) is not getattr(Participant, name)]
            for name in moments
        }

    def that_have(self, moment: str) -> list[Participant]:
        """Those that override a method or property of :class:`Participant`."""
        return self._overriding[moment]
