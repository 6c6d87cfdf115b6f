"""Ranks that run out of data before others: torch's join protocol for :class:`BucketDDP`.

In each iteration the ranks first tell each other who has data, and what its forward is about to do; a rank that has
none then takes part in the same collectives without contributing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.masters import restart_masters
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.wrapper.validation import names_to_ignore


@dataclass(frozen=True)
class Iteration:
    """What the ranks that have data are about to do.

    Attributes:
        active: The ranks that have data, in ascending order.
        synchronises: Whether their backward will be a synchronised pass.
        module_buffers: Whether their forward synchronises module buffers.
    """

    active: tuple[int, ...]
    synchronises: bool
    module_buffers: bool


class UnevenInputs:
    """The exchanges between ranks with and without data.

    Args:
        collectives: The group.
        device: The device whose tensors travel.

    Attributes:
        active: The ranks that have data of their own, where some have not and go on with their last batch.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self.active: tuple[int, ...] | None = None

    def _sum(self, values: list[int], on_idle: Callable[[], None]) -> list[int]:
        vector = torch.tensor(values, dtype=torch.int64).to(self._device)
        self._collectives.all_reduce_sum(vector).wait(on_idle)
        return vector.tolist()

    def exchange(
        self, active: bool, synchronises: bool, module_buffers: bool, on_idle: Callable[[], None]
    ) -> Iteration:
        """Tells the other ranks what this one is about to do, and hears it from them. The host waits.

        Args:
            active: Whether this rank has data.
            synchronises: Whether its backward will be a synchronised pass.
            module_buffers: Whether its forward synchronises module buffers.
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.
        """
        mine = [int(active and rank == self._collectives.rank) for rank in range(self._collectives.world_size)]
        *ranks, synchronising, sending = self._sum([*mine, int(synchronises), int(module_buffers)], on_idle)
        return Iteration(tuple(rank for rank, has in enumerate(ranks) if has), synchronising > 0, sending > 0)

    def tell(self, value: int, on_idle: Callable[[], None]) -> list[int]:
        """Every rank's value, by rank."""
        mine = [value if rank == self._collectives.rank else 0 for rank in range(self._collectives.world_size)]
        return self._sum(mine, on_idle)

    def common_rank(self, candidate: bool, on_idle: Callable[[], None]) -> int:
        """The highest rank of those that are candidates; every rank gets the same answer."""
        return max(rank for rank, stands in enumerate(self.tell(int(candidate), on_idle)) if stands)


class JoinedRank(JoinHook):
    """What a rank without data does in the others' iterations, and at the end.

    Args:
        iterate: Takes part in one iteration.
        end: Ends; told whether this rank was among the last to run out of data.
    """

    def __init__(self, iterate: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._iterate = iterate
        self._end = end

    def main_hook(self) -> None:
        """One iteration of the others."""
        self._iterate()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of data."""
        self._end(is_last_joiner)


class UnevenRanks(Joinable):
    """The part of a wrapper that torch's ``Join`` talks to."""

    module: nn.Module
    _module_buffers_due: bool
    _own_grads: list[tuple[nn.Parameter, Tensor | None]] | None = None
    _collectives: Collectives
    _options: Options
    _reducer: Reducer
    _uneven: UnevenInputs

    def publish_failure(self, error: BaseException) -> None:
        """Tells the other ranks of a failure; the wrapper does it."""
        raise NotImplementedError

    def synchronise_module_buffers(self, active: Sequence[int] | None = None) -> None:
        """Makes module buffers the same on all ranks; the wrapper does it."""
        raise NotImplementedError

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """A context in which ranks may have different numbers of batches, as torch DDP's.

        A rank that leaves its loop takes part in the others' collectives without contributing, until all have left;
        then every rank gets the parameters and module buffers of one that was among the last, and a joined rank has
        the ``.grad`` that it left its loop with. One forward and at most
        one backward per iteration, and no change of what is trainable, which a rank that has left its loop would not
        make. Use torch's ``Join`` directly for several at once, such as a
        ``ZeroRedundancyOptimizer``: joined ranks receive the averaged gradients that its shard needs.

        Args:
            divide_by_initial_world_size: Divide by the world size; otherwise by the number of ranks that have data.
            enable: Whether ranks may have different numbers of batches at all.
            throw_on_early_termination: Raise a RuntimeError on all ranks when the first one runs out of data.

        Raises:
            ValueError: If a rank that has left its loop would be missed in the collectives of a ``SyncBatchNorm``, or
                in the steps of a sharded optimizer.
        """
        waits_for_all = next((n for n, m in self.module.named_modules() if isinstance(m, nn.SyncBatchNorm)), None)
        if enable and not throw_on_early_termination and waits_for_all is not None:
            raise ValueError(
                "expected throw_on_early_termination=True where layers compute statistics over all ranks, found False: "
                f"{waits_for_all!r} would wait for ranks that have no data left"
            )
        if enable and not throw_on_early_termination and self._options.shard_optimizer:
            raise ValueError(
                "expected throw_on_early_termination=True with shard_optimizer=True, found False: a rank that has left "
                "its loop steps no optimizer, and nobody would update its shard of the parameters"
            )
        context = Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )
        try:
            with context:
                yield
        except BaseException as error:
            if not throw_on_early_termination:  # which raises on all ranks
                self.publish_failure(error)
            raise
        finally:
            self._leave_join()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's ``Join`` calls on a rank that has run out of data.

        Args:
            kwargs: ``divide_by_initial_world_size``; others are for other members of the context.

        Raises:
            ValueError: If gradients are not divided by the world size to begin with.
        """
        by_active = not kwargs.get("divide_by_initial_world_size", True)
        if by_active:
            self._require_plain_mean("where divide_by_initial_world_size=False")
        self._reducer.uneven = True
        self._reducer.divisor.divide_by_active = by_active
        return JoinedRank(self._iterate_joined, self._end_join)

    @property
    def join_device(self) -> torch.device:
        """Where torch's ``Join`` keeps what it sends."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group in which ranks join."""
        return self._collectives.group

    def exchange(self, value: int) -> list[int]:
        """Tells the other ranks a number and returns everybody's, by rank. The host waits; all ranks must call this.

        Raises:
            PeerFailureError: If another rank has failed.
        """
        with self._reducer.peers.waiting_for("what ranks tell each other"):
            return self._uneven.tell(value, self._reducer.peers.poll)

    def divide_by_active_ranks(self) -> None:
        """Has gradients divided by the number of ranks that have data, from now on; see :meth:`set_active_ranks`.

        Raises:
            ValueError: If gradients are not divided by the world size to begin with.
        """
        self._require_plain_mean("where gradients are divided by the ranks that have data")
        self._reducer.divisor.divide_by_active = True

    def set_active_ranks(self, active: Sequence[int]) -> None:
        """Says which ranks have a batch of their own in what follows; the others go on with their last one.

        Those must not contribute: their losses are to reach no parameter, in :meth:`BucketDDP.backward_pass`. Their
        module buffers and token counts do not count. All ranks must call this at the same point of the program.

        Args:
            active: The ranks, in ascending order; at least one.
        """
        everybody = len(active) == self._collectives.world_size
        self._uneven.active = None if everybody else tuple(active)
        self._reducer.replaying = self._collectives.rank not in active

    @property
    def is_replaying(self) -> bool:
        """Whether this rank has no batch of its own; what :meth:`set_active_ranks` was told."""
        return self._reducer.replaying

    @property
    def some_replay(self) -> bool:
        """Whether some rank has no batch of its own; the same on every rank."""
        return self._uneven.active is not None

    def _require_plain_mean(self, where: str) -> None:
        if self._options.rescales:
            raise ValueError(
                f"expected gradients that are divided by the world size {where}, found "
                f"gradient_divide_by={self._options.gradient_divide_by!r}"
            )

    def _meet_joined_ranks(self, trains: bool) -> bool:
        """Tells ranks that have run out of data what this forward is about to do, and synchronises module buffers.

        Returns:
            Whether ranks may run out of data at all.
        """
        if not (self._join_config.enable and self._reducer.uneven):
            return False
        notified = Join.notify_join_context(self)  # waited for behind the exchange, where this rank hears of failures
        with self._reducer.peers.waiting_for("what ranks with data are about to do"):
            iteration = self._uneven.exchange(
                True,
                trains and self._reducer.reduces,
                trains and self._module_buffers_due,
                self._reducer.peers.poll,
            )
        if notified is not None:
            notified.wait()
        if iteration.module_buffers:
            self.synchronise_module_buffers(iteration.active)
        return True

    def _iterate_joined(self) -> None:
        with self._reducer.peers.waiting_for("what ranks with data are about to do"):
            iteration = self._uneven.exchange(False, False, False, self._reducer.peers.poll)
        if iteration.module_buffers:
            self.synchronise_module_buffers(iteration.active)
        if iteration.synchronises:
            if self._own_grads is None:
                self._own_grads = [(p, None if p.grad is None else p.grad.clone()) for p in self.module.parameters()]
            self._reducer.shadow_pass()

    def _end_join(self, is_last_joiner: bool) -> None:
        source = self._uneven.common_rank(is_last_joiner, self._reducer.peers.poll)
        ignored = names_to_ignore(self.module)
        tensors: list[Tensor] = [param for name, param in self.module.named_parameters() if name not in ignored]
        if self._options.module_buffers != "off":
            tensors += [buffer for name, buffer in self.module.named_buffers() if name not in ignored]
        broadcast_tensors(tensors, self._collectives, source=source)
        restart_masters(tensors)  # all ranks from the same bits, the one with the others' values too
        self._leave_join()

    def _leave_join(self) -> None:
        # torch leaves its own flag on, so that every later forward would go on asking who has data.
        self._reducer.uneven = self._reducer.divisor.divide_by_active = False
        self._reducer.peers.here.forget_forwards()  # they differ between the ranks, as they should
        # Inside the context a joined rank holds the averaged gradients: a ZeroRedundancyOptimizer steps on them there.
        for param, grad in self._own_grads or ():
            param.grad = grad
        self._own_grads = None
