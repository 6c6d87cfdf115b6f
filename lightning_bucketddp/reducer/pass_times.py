"""How long passes take, and how long each rank waits for the others, added up while somebody asks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.state import Pass


class PassTimes(Participant):
    """Adds up the times of this rank's passes and steps, and exchanges the sums with the other ranks.

    On the CPU a rank waits wherever this package waits for a collective. On accelerators the host waits for nothing:
    events in the current stream take the times of passes, and a rank waits from the end of backward until gradients
    are published.

    Args:
        collectives: The group.
        peers: The other ranks.
        device: The device of the gradients.

    Attributes:
        passes: The synchronised passes since the last exchange: when the first bucket was launched, when backward
            ended, when gradients were published. Their number is the same on every rank.
    """

    def __init__(self, collectives: Collectives, peers: Peers, device: torch.device) -> None:
        self._collectives, self._peers, self._device = collectives, peers, device
        self._launched: Any = None  # times: events on accelerators, else seconds
        self._backward_ended: Any = None
        self.passes: list[tuple[Any, Any, Any]] = []
        self._own = self._waited = 0.0
        self.skip()

    # -- passes --------------------------------------------------------------------------------------

    def opened(self, it: Pass) -> None:
        """Forget the pass before."""
        self._launched = None

    def before_launch(self, bucket: object) -> None:
        """Take the time of the first launch."""
        self._launched = self._launched or self._now()

    def backward_ended(self, raised: bool) -> None:
        """Take the time."""
        self._backward_ended = self._now()

    def ended(self) -> None:
        """Keep the times of the pass."""
        self.passes.append((self._launched or self._backward_ended, self._backward_ended, self._now()))

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    # -- steps ---------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Begin a step now; what came before belongs to none."""
        self._step_began, self._waited_before = time.perf_counter(), self._peers.here.waited

    def step_ended(self) -> None:
        """Add up a step. The next one begins."""
        own, waited = self._own - self._step_began, self._waited - self._waited_before
        self.skip()
        self._own, self._waited = own + self._step_began, waited + self._waited_before

    def exchange(self) -> Tensor:
        """Exchange the sums since the last exchange. All ranks must call this, after a pass.

        Returns:
            On the CPU, in seconds, of shape ``(world size, 4)``. The columns: steps with waiting; waiting; from the end
            of backward, and from the first launch, until gradients were published.

        Raises:
            PeerFailureError: If another rank has failed.
        """
        exposed = sum(_seconds(began, ended) for _, began, ended in self.passes)
        under_way = sum(_seconds(launched, ended) for launched, _, ended in self.passes)
        self.step_ended()  # once more: an accelerator has caught up only now
        waited = self._waited if self._device.type == "cpu" else exposed
        mine = torch.tensor([self._own, waited, exposed, under_way], device=self._device)
        with self._peers.waiting_for("the times of all ranks"):
            gathered, work = self._collectives.all_gather(mine)
            work.wait(self._peers.poll)
        self.passes.clear()
        self._own = self._waited = 0.0
        return gathered.cpu()


def _seconds(began: Any, ended: Any) -> float:
    if not isinstance(began, torch.Event):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
