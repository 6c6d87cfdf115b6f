"""Ranks that run out of data before others: torch's join protocol, and ranks that repeat their last batch.

In each iteration the ranks tell each other who has data and what its forward is about to do. A rank without data then
takes part in the same collectives without contributing anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.swap import restart_masters
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.replicas.module_copies import first_sync_batchnorm
from lightning_bucketddp.wrapper.module_buffers import ModuleBuffers
from lightning_bucketddp.wrapper.module_params import ModuleParams


class UnevenInputs(JoinHook):
    """Keeps ranks with and without data in step, so that they start the same collectives.

    torch's ``Join`` calls :meth:`main_hook` and :meth:`post_hook` on a rank that has run out of data.

    Args:
        params: The module's parameters and module buffers.
        passes: The module's passes.
        buffers: Synchronises the module buffers.
        ranks: The ranks.
        options: The wrapper's options.

    Attributes:
        active: The ranks that have batches of their own, while others repeat their last one; None if all have.
    """

    def __init__(
        self, params: ModuleParams, passes: Passes, buffers: ModuleBuffers, ranks: Ranks, options: Options
    ) -> None:
        self._params, self._passes, self._module_buffers = params, passes, buffers
        self._ranks, self._options = ranks, options
        self._device = params.named[0][1].device
        self.active: tuple[int, ...] | None = None
        self._own_grads: list[tuple[nn.Parameter, Tensor | None]] | None = None

    def tell(self, value: int) -> list[int]:
        """Tell the other ranks a number and return everybody's, by rank. The host waits; all ranks must call this.

        Raises:
            PeerFailureError: If another rank has failed.
        """
        return self._ranks.numbers(value, self._device, "what ranks tell each other")

    def _exchange(self, has_data: bool, reduces: bool, sends: bool) -> bool:
        """Tell the other ranks what this one is about to do, and synchronise module buffers if that is due.

        Args:
            has_data: Whether this rank has data.
            reduces: Whether its backward will be a synchronised pass.
            sends: Whether its forward synchronises module buffers.

        Returns:
            Whether backward will be a synchronised pass on some rank.
        """
        mine, what = has_data + 2 * reduces + 4 * sends, "what ranks with data are about to do"
        everyone = self._ranks.numbers(mine, self._device, what, Phase.EXCHANGE)
        if any(told & 4 for told in everyone):
            self._module_buffers.synchronise([rank for rank, told in enumerate(everyone) if told & 1])
        return any(told & 2 for told in everyone)

    # -- ranks that repeat their last batch ------------------------------------------------------------

    def set_active(self, active: Sequence[int]) -> None:
        """Set the ranks that have a batch of their own from now on; the others repeat their last one.

        The others must not contribute: their losses, run in ``backward_pass``, reach no parameter. Their module buffers
        and token counts do not count. All ranks must call this at the same point of the program.

        Args:
            active: The ranks, in ascending order; at least one.
        """
        if self.active is not None and not self._module_buffers.due:
            self._module_buffers.synchronise(self.active)  # a rank that repeated its last batch may have its own again
        self.active = None if len(active) == self._ranks.world_size else tuple(active)
        self._passes.joining.join(self._ranks.rank not in active)

    def divide_by_active(self, why: str = "where gradients are divided by the ranks that have data") -> None:
        """Divide gradients by the number of ranks that have data, from now on.

        Args:
            why: For the error.

        Raises:
            ValueError: If gradients are not divided by the world size to begin with.
        """
        if self._options.rescales:
            raise ValueError(
                f'expected gradient_divide_by="world_size" {why}, found '
                f"gradient_divide_by={self._options.gradient_divide_by!r}; leave one of the two out"
            )
        self._passes.joining.divide_by_active()

    # -- torch's join ----------------------------------------------------------------------------------

    def require_ranks_may_leave(self) -> None:
        """Require that a rank may leave its loop, and the others go on without its data.

        Raises:
            ValueError: If a ``SyncBatchNorm`` or a sharded optimizer needs it.
        """
        if (name := first_sync_batchnorm(self._params.module)) is not None:
            raise ValueError(
                "expected throw_on_early_termination=True with a SyncBatchNorm, found False: "
                f"{name!r} would wait for ranks that have no data left"
            )
        if self._options.shard_optimizer:
            raise ValueError(
                "expected throw_on_early_termination=True with shard_optimizer=True, found False: nobody would update "
                "the shard of a rank that has no data left"
            )

    def begin(self, divide_by_active: bool) -> None:
        """Enter a context in which ranks may run out of data.

        Args:
            divide_by_active: Whether gradients are divided by the number of ranks that have data.
        """
        if divide_by_active:
            self.divide_by_active("where divide_by_initial_world_size=False")
        self._passes.joining.begin()

    def meet(self, wrapper: Joinable, trains: bool) -> None:
        """Tell ranks without data of a forward, and synchronise module buffers if that is due.

        Args:
            wrapper: The wrapper whose forward it is.
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
                params = self._params.module.parameters()
                self._own_grads = [(p, None if p.grad is None else p.grad.clone()) for p in params]
            self._passes.shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters and module buffers of a rank that was among the last to run out of data.

        Args:
            is_last_joiner: Whether this rank was.
        """
        source = max(rank for rank, was_last in enumerate(self.tell(int(is_last_joiner))) if was_last)
        tensors: list[Tensor] = [param for _, param in self._params.named]
        if self._options.module_buffers != "off":
            tensors += self._params.buffers_to_write()
        self._ranks.broadcast(tensors, "the parameters of the last ranks with data", source=source)
        restart_masters(tensors)  # on the source too: all ranks go on from the same bits
        self._module_buffers.due = True  # ranks have run different forwards
        self._passes.wrapped.note_trainable()
        self.end()

    def end(self) -> None:
        """Leave the context, on every rank or by an exception."""
        # torch leaves its own flag on, so that every later forward would go on asking who has data.
        self._passes.joining.end()
        # Inside the context a joined rank holds the averaged gradients: a ZeroRedundancyOptimizer steps on them there.
        for param, grad in self._own_grads or ():
            param.grad = grad
        self._own_grads = None
