"""What ranks must have in common when they meet in a pass, as the control vector tells."""

from __future__ import annotations

import warnings
from collections import deque

from lightning_bucketddp.peers.agreement import PeerFailureError, RankMismatchError
from lightning_bucketddp.peers.control import Control, ControlExchange
from lightning_bucketddp.peers.failures import Failures


class ControlChecks:
    """Reads control vectors, at once or, on accelerators, when they happen to have come to the host.

    Args:
        failures: How this rank gives up.
        rank: This rank.

    Attributes:
        steps: How many steps this rank has begun, if the caller tells. Ranks are expected to be in the same step when
            they are in the same pass.
        forwards: How many training forwards this rank has run. Where nobody counts steps, ranks that meet in a pass
            after different numbers of forwards are told so, once: it may be a skipped backward.
    """

    def __init__(self, failures: Failures, rank: int) -> None:
        self._failures = failures
        self._rank = rank
        self._unread: deque[ControlExchange] = deque()
        self._warned_of_forwards = False
        self.steps = 0
        self.forwards = 0

    def require_success(self, control: Control) -> Control:
        """Requires that a pass went well on every rank, and was the same pass.

        Raises:
            PeerFailureError: If backward raised on some rank.
            RankMismatchError: If ranks met from different places of the program.
        """
        here = f"rank {self._rank}: ranks"
        number = self._failures.pass_number
        if control.failed_ranks:
            cause = self._failures.published() or f"{control.failed_ranks} rank(s) raised in backward"
            self._failures.give_up(self._failures.cannot_complete(cause))
            raise PeerFailureError(self._failures.message)
        if not control.agreed:
            self._failures.give_up(
                f"{here} took pass {number} for different things: passes of different models, or with different "
                "trainable parameters, or after different steps of sharded optimizers"
            )
            raise RankMismatchError(self._failures.message)
        if control.ranks_out_of_data:  # those know nothing of steps and forwards
            return control
        if not control.in_step:
            self._failures.give_up(
                f"{here} met in pass {number} from different steps; this rank is in step {self.steps}. Some rank "
                "skipped a backward that the others ran, or ran one more: look for a backward in a branch that depends "
                "on the rank or on its data"
            )
            raise RankMismatchError(self._failures.message)
        if not control.same_forwards and not self.steps and not self._warned_of_forwards:
            self._warned_of_forwards = True
            warnings.warn(
                f"{here} met in pass {number} after different numbers of training forwards, {self.forwards} on this "
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
