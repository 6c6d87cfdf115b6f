"""The ranks that train together: their collectives, and what is known of them. Every wait of the host is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase

_T = TypeVar("_T")

_SAME_ON_ALL_RANKS = (ValueError, TypeError, FileExistsError, RuntimeError)
"""Errors that all ranks raise in the class that one rank raised. Other errors become a RuntimeError."""


class Ranks:
    """Waits for the ranks of a group. Each wait says for what, and ends if a rank fails or does not come.

    All ranks must call the same methods in the same order. They all raise:

    - PeerFailureError: If a rank has failed, has ended training, or is gone.
    - RankMismatchError: If ranks are at different points of the program.

    Args:
        collectives: The collectives of the group, or of a part of it.
        peers: The ranks of the group.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, collectives: Collectives, peers: Peers) -> None:
        self.collectives, self.peers = collectives, peers
        self.rank, self.world_size = collectives.rank, collectives.world_size

    def waiting_for(self, what: str | Callable[[], str], phase: Phase = Phase.RUNS) -> AbstractContextManager[None]:
        """Context around several waits for one thing; see :meth:`Peers.waiting_for`."""
        return self.peers.waiting_for(what, phase)

    def gather(self, mine: Tensor, what: str, phase: Phase = Phase.RUNS) -> Tensor:
        """Every rank's tensor, of shape ``(world size, *mine.shape)``."""
        with self.peers.waiting_for(what, phase):
            gathered, work = self.collectives.all_gather(mine)
            work.wait()
        return gathered

    def numbers(self, mine: int, device: torch.device, what: str, phase: Phase = Phase.RUNS) -> list[int]:
        """Every rank's number, by rank; they travel in a tensor on ``device``, for which the host waits.

        As a sum, which gloo has in one round where it is short.
        """
        numbers = [mine if rank == self.rank else 0 for rank in range(self.world_size)]
        with self.peers.waiting_for(what, phase):
            vector = torch.tensor(numbers).to(device)
            self.collectives.all_reduce_sum(vector).wait()
            return vector.tolist()

    def total(self, tensor: Tensor, what: str, phase: Phase = Phase.RUNS) -> Tensor:
        """Replace a tensor by its sum over the ranks, in place; return it."""
        with self.peers.waiting_for(what, phase):
            self.collectives.all_reduce_sum(tensor).wait()
        return tensor

    def mean(self, flat: Tensor, what: str, phase: Phase = Phase.RUNS) -> Tensor:
        """Replace a tensor (1-D, floating or complex) by its mean over the ranks, in place; return it."""
        with self.peers.waiting_for(what, phase):
            self.collectives.all_reduce_mean(flat).wait()
        return flat

    def objects(self, mine: _T, what: str, phase: Phase = Phase.RUNS) -> list[_T]:
        """Every rank's object, pickled on the way, by rank."""
        with self.peers.waiting_for(what, phase):
            return self.collectives.exchange_objects(mine)

    def broadcast(
        self,
        tensors: Sequence[Tensor],
        what: str,
        phase: Phase = Phase.RUNS,
        source: int = 0,
        hidden: bool = False,
    ) -> None:
        """Give every rank one rank's values of tensors, in place; see :func:`broadcast_tensors`."""
        with self.peers.waiting_for(what, phase):
            broadcast_tensors(tensors, self.collectives, source, hidden)

    def together(self, what: str, run: Callable[[], _T]) -> _T:
        """Call ``run`` on every rank; if it raises on some, raise on all.

        Args:
            what: What ``run`` does, for the error.
            run: Returns this method's result.

        Raises:
            Exception: One of the errors that callers expect, with the first rank's text.
            RuntimeError: If it was any other error.
        """
        problem: BaseException | None = None
        try:
            result = run()
        except CheckpointException as error:  # torch raises it on every rank
            problem, _ = error.failures.get(self.rank, (None, None))
        except Exception as error:
            problem = error
        kept = next((kind for kind in _SAME_ON_ALL_RANKS if isinstance(problem, kind)), None)
        other = None if problem is None else (RuntimeError, f"{type(problem).__name__}: {problem}")
        mine: Any = other if kept is None else (kept, str(problem))  # not the error, which may not be picklable
        everyone = self.objects(mine, f"the end of {what}")
        failed = {rank: found for rank, found in enumerate(everyone) if found is not None}
        if failed:
            kind, message = next(iter(failed.values()))
            raise kind(f"{what} failed on {self.peers.in_words([*failed])}: {message}") from problem
        return result
