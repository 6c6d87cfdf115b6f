"""Whether ranks may run out of data, and whether this one has."""

from __future__ import annotations

from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.state import Contribution, PassState, Role


class Joining:
    """This rank's role where some ranks have fewer batches than others.

    Args:
        peers: The other ranks.

    Attributes:
        uneven: Whether ranks may run out of data before others.
        divides_by_active: Whether joined ranks are left out of the mean of gradients.
        role: What this rank does in passes.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.uneven = self.divides_by_active = False
        self.role = Role.ACTIVE
        self._contributed = False  # in a local pass since the last reduction

    def begin(self) -> None:
        """Let ranks run out of data from now on."""
        self.uneven = True

    def divide_by_active(self) -> None:
        """Divide gradients by the number of ranks that have data, from now on."""
        self.divides_by_active = True

    def end(self) -> None:
        """Say that all ranks have data again."""
        self.uneven = self.divides_by_active = False
        self._peers.here.forget_forwards()  # ranks have run different numbers of them

    def join(self, joined: bool) -> None:
        """Say whether this rank has run out of data and goes on with its last batch."""
        self.role = Role.JOINED if joined else Role.ACTIVE

    def counts(self) -> bool:
        """False while this rank has joined: its gradients do not count."""
        return self.role is Role.ACTIVE

    def contribution(self, role: Role | None) -> Contribution:
        """What the next reduction gets from this rank.

        Args:
            role: What this rank does in it, if that is decided; nothing of its own then.
        """
        if role is None and (self.counts() or self._contributed):
            return Contribution.OWN
        return Contribution.ZERO if self.divides_by_active else Contribution.EARLIER

    def forget(self) -> None:
        """Say that the gradients of local passes were dropped."""
        self._contributed = False

    def pass_ended(self, state: PassState) -> None:
        """Note that a pass of this kind has ended."""
        if state is PassState.LOCAL:
            self._contributed |= self.counts()
        elif state is PassState.SYNCHRONISED:
            self._contributed = False
