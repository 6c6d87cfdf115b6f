"""What ranks must have in common when they meet in a pass, as the control vector tells."""

from __future__ import annotations

import warnings
from collections import deque

from lightning_bucketddp.peers.agreement import PeerFailureError, RankMismatchError
from lightning_bucketddp.peers.control import Control, ControlExchange
from lightning_bucketddp.peers.peers import Peers


class ControlChecks:
    """Reads control vectors, at once or, on accelerators, when they happen to have come to the host.

    Args:
        peers: How this rank gives up, and where it is. Ranks are expected to be in the same step when they are in the
            same pass. Where nobody counts steps, ranks that meet in a pass after different numbers of forwards are told
            so, once: it may be a skipped backward.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._unread: deque[ControlExchange] = deque()
        self._warned_of_forwards = False

    def require_success(self, control: Control) -> Control:
        """Requires that a pass went well on every rank, and was the same pass.

        Raises:
            PeerFailureError: If backward raised on some rank.
            RankMismatchError: If ranks met from different places of the program.
        """
        peers, at = self._peers, self._peers.position
        here, number = f"rank {peers.rank}: ranks", at.pass_number
        if control.failed_ranks:
            cause = peers.failure() or f"{control.failed_ranks} rank(s) raised in backward"
            peers.give_up(peers.cannot_complete(cause))
            raise PeerFailureError(peers.message)
        if not control.agreed:
            peers.give_up(
                f"{here} took pass {number} for different things: passes of different models, or with different "
                "trainable parameters, or after different steps of sharded optimizers"
            )
            raise RankMismatchError(peers.message)
        if control.ranks_out_of_data:  # those know nothing of steps and forwards
            return control
        if not control.in_step:
            peers.give_up(
                f"{here} met in pass {number} from different steps; this rank is in step {at.step}. Some rank "
                "skipped a backward that the others ran, or ran one more: look for a backward in a branch that depends "
                "on the rank or on its data"
            )
            raise RankMismatchError(peers.message)
        if not control.same_forwards and not at.step and not self._warned_of_forwards:
            self._warned_of_forwards = True
            warnings.warn(
                f"{here} met in pass {number} after different numbers of training forwards, {at.forward} on this "
                "rank. If some rank skipped a backward, gradients of different batches are being averaged; a forward "
                "that only some ranks run belongs under torch.no_grad()",
                stacklevel=2,
            )
        return control

    def read_later(self, exchange: ControlExchange) -> None:
        """Takes a control vector that nobody needs now and that has not come to the host."""
        self._unread.append(exchange)

    def read_what_arrived(self) -> None:
        """Looks at earlier passes' control vectors, without waiting for the device; raises as above."""
        while self._unread and self._unread[0].arrived():
            self.require_success(self._unread.popleft().read())
