"""Ranks that run out of data before others: torch's join protocol for :class:`BucketDDP`.

In each iteration the ranks first tell each other who has data, and what its forward is about to do; a rank that has
none then takes part in the same collectives without contributing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.swap import restart_masters
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.wrapper.module_buffers import ModuleBuffers
from lightning_bucketddp.wrapper.validation import named_parameters


def tell(value: int, collectives: Collectives, device: torch.device, on_idle: Callable[[], None]) -> list[int]:
    """Tell the other ranks a number and return everybody's, by rank. The host waits; all ranks must call this.

    Args:
        value: The number.
        collectives: The group.
        device: The device whose tensors travel.
        on_idle: Called now and then while the host waits; an exception it raises ends the wait.
    """
    mine = [value if rank == collectives.rank else 0 for rank in range(collectives.world_size)]
    return _sum(mine, collectives, device, on_idle)


def _sum(values: list[int], collectives: Collectives, device: torch.device, on_idle: Callable[[], None]) -> list[int]:
    vector = torch.tensor(values, dtype=torch.int64).to(device)
    collectives.all_reduce_sum(vector).wait(on_idle)
    return vector.tolist()


class UnevenInputs(JoinHook):
    """What ranks with and without data tell each other, and what a rank does that has run out.

    torch's ``Join`` calls :meth:`main_hook` and :meth:`post_hook` on such a rank.

    Args:
        module: The module.
        passes: Its passes.
        buffers: What synchronises its module buffers.
        collectives: The group.
        options: What was asked for.

    Attributes:
        active: The ranks that have data of their own, where others go on with their last batch; None if all have.
    """

    def __init__(
        self, module: nn.Module, passes: Passes, buffers: ModuleBuffers, collectives: Collectives, options: Options
    ) -> None:
        self._module, self._passes, self._module_buffers = module, passes, buffers
        self._collectives, self._options = collectives, options
        self._device = next(module.parameters()).device
        self.active: tuple[int, ...] | None = None
        self._own_grads: list[tuple[nn.Parameter, Tensor | None]] | None = None

    def tell(self, value: int) -> list[int]:
        """Tell the other ranks a number and return everybody's, by rank."""
        peers = self._passes.peers
        with peers.waiting_for("what ranks tell each other"):
            return tell(value, self._collectives, self._device, peers.poll)

    def _exchange(self, has_data: bool, synchronises: bool, module_buffers: bool) -> bool:
        """Tell the other ranks what this one is about to do, hear it from them, and synchronise module buffers.

        Args:
            has_data: Whether this rank has data.
            synchronises: Whether its backward will be a synchronised pass.
            module_buffers: Whether its forward synchronises module buffers.

        Returns:
            Whether backward will be a synchronised pass on some rank.
        """
        ranks = range(self._collectives.world_size)
        mine = [int(has_data and rank == self._collectives.rank) for rank in ranks]
        mine += [int(synchronises), int(module_buffers)]
        peers = self._passes.peers
        with peers.waiting_for("what ranks with data are about to do"):
            *having, synchronising, sending = _sum(mine, self._collectives, self._device, peers.poll)
        if sending:
            self._module_buffers.synchronise([rank for rank in ranks if having[rank]])
        return synchronising > 0

    # -- ranks that go on with their last batch --------------------------------------------------------

    def set_active(self, active: Sequence[int]) -> None:
        """Say which ranks have a batch of their own in what follows, in ascending order."""
        self.active = None if len(active) == self._collectives.world_size else tuple(active)
        self._passes.joining.join(self._collectives.rank not in active)

    def divide_by_active(self) -> None:
        """Have gradients divided by the number of ranks that have data, from now on."""
        self._require_plain_mean("where gradients are divided by the ranks that have data")
        self._passes.joining.divide_by_active()

    def _require_plain_mean(self, where: str) -> None:
        if self._options.rescales:
            raise ValueError(
                f"expected gradients that are divided by the world size {where}, found "
                f"gradient_divide_by={self._options.gradient_divide_by!r}"
            )

    # -- torch's join ----------------------------------------------------------------------------------

    def require_nobody_misses_a_rank(self) -> None:
        """Require that the others can go on without a rank that has left its loop.

        Raises:
            ValueError: If a ``SyncBatchNorm`` or a sharded optimizer needs it.
        """
        waits_for_all = next((n for n, m in self._module.named_modules() if isinstance(m, nn.SyncBatchNorm)), None)
        if waits_for_all is not None:
            raise ValueError(
                "expected throw_on_early_termination=True where layers compute statistics over all ranks, found False: "
                f"{waits_for_all!r} would wait for ranks that have no data left"
            )
        if self._options.shard_optimizer:
            raise ValueError(
                "expected throw_on_early_termination=True with shard_optimizer=True, found False: a rank that has left "
                "its loop steps no optimizer, and nobody would update its shard of the parameters"
            )

    def begin(self, divide_by_active: bool) -> None:
        """A context begins in which ranks may run out of data.

        Args:
            divide_by_active: Divide gradients by the number of ranks that have data.
        """
        if divide_by_active:
            self._require_plain_mean("where divide_by_initial_world_size=False")
        self._passes.joining.begin(divide_by_active)

    def meet(self, wrapper: Joinable, trains: bool) -> None:
        """Tell ranks that have run out of data what a forward is about to do, and synchronise module buffers.

        Args:
            wrapper: Whose forward it is.
            trains: Whether gradients are enabled.
        """
        notified = Join.notify_join_context(wrapper)
        self._exchange(True, trains and self._passes.reduces, trains and self._module_buffers.due)
        if notified is not None:
            notified.wait()  # only now, as in the exchange this rank hears of failures

    def main_hook(self) -> None:
        """Take part in one iteration of the ranks that have data."""
        if self._exchange(False, False, False):
            if self._own_grads is None:
                self._own_grads = [(p, None if p.grad is None else p.grad.clone()) for p in self._module.parameters()]
            self._passes.shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of data: give them the parameters and module buffers of one that was among the last.

        Args:
            is_last_joiner: Whether this rank was.
        """
        source = max(rank for rank, was_last in enumerate(self.tell(int(is_last_joiner))) if was_last)
        tensors: list[Tensor] = [param for _, param in named_parameters(self._module)]
        if self._options.module_buffers != "off":
            tensors += self._module_buffers.tensors()
        broadcast_tensors(tensors, self._collectives, source=source)
        restart_masters(tensors)  # all ranks from the same bits, the one with the others' values too
        self.end()

    def end(self) -> None:
        """The context has ended, on every rank or by an exception."""
        # torch leaves its own flag on, so that every later forward would go on asking who has data.
        self._passes.joining.end()
        # Inside the context a joined rank holds the averaged gradients: a ZeroRedundancyOptimizer steps on them there.
        for param, grad in self._own_grads or ():
            param.grad = grad
        self._own_grads = None
