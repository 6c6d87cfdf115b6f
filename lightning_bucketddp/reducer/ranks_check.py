"""Compares the parameters of all ranks, to find those that some rank has changed by itself.

Each rank sums up the bits of every parameter. A sum of integers does not depend on its order, so equal parameters have
equal sums, whatever their strides. Ranks gather one number each, made of all sums. Only if these differ do they gather
the sums, to name parameters.

Parameters are read at the end of backward, before the optimizer changes them. Sharded ones are whole then: reading one
waits for its lazy all-gather, as any other use does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.host_copy import HostCopy
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.options import OnDifference
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.control import ControlExchange
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.report import in_words
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant, PassResult

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers that have its bits. Their sums wrap around."""

_FACTOR = -7046029254386353131
"""An odd number of 64 bits without a pattern (2 ** 64 divided by the golden ratio). Its odd multiples are weights."""

_SHOWN = 3
"""So many parameters are named."""


@dataclass(frozen=True)
class _Comparison:
    """One comparison on its way.

    Attributes:
        number: The pass in which parameters were read.
        names: Names of the parameters.
        sums: This rank's sums.
        of_ranks: One number per rank, made of its sums.
        exchange: The control vector of the pass; None between passes.
    """

    number: int
    names: Sequence[str]
    sums: Tensor
    of_ranks: HostCopy
    exchange: ControlExchange | None


class RanksCheck(Participant):
    """Compares the parameters of all ranks every so many synchronised passes, from the first one on.

    The host does not wait for an accelerator: it looks at a comparison in the next synchronised pass, on every rank.
    Where ranks have joined they may differ, so such a pass is not looked at.

    Args:
        ranks: The ranks.
        every: How many passes.
        on_difference: Whether a difference is a warning, once, or an error.
    """

    def __init__(self, ranks: Ranks, every: int, on_difference: OnDifference) -> None:
        self._ranks, self._peers = ranks, ranks.peers
        self._every, self._on_difference = every, on_difference
        self._params: list[tuple[str, nn.Parameter]] = []
        self._comparison: _Comparison | None = None
        self._warned = False

    def follow(self, table: SlotTable) -> None:
        """Compare these parameters from now on, frozen ones too.

        Those that do not hold plain values, such as sparse ones and quantised subclasses of tensors, are left out.
        """
        self._params = [
            (name, param)
            for name, param in zip(table.names, table.all_params, strict=True)
            if issubclass(type(param), nn.Parameter) and param.layout is torch.strided
        ]

    def use_reports(self, result: PassResult) -> None:
        """Look at the comparison of an earlier pass, and start one if it is due.

        Raises:
            RankMismatchError: On every rank, if parameters differ and that is an error.
        """
        self.look()
        if result.this_pass.number % self._every == 0:
            self.start(result.exchange)
            if self._comparison is not None and not self._comparison.of_ranks.waits:
                self.look()

    def compare(self) -> None:
        """Compare now, between passes. All ranks must call this.

        Raises:
            RankMismatchError: As :meth:`use_reports`.
        """
        self.look()
        self.start()
        self.look()

    @torch.no_grad()
    def start(self, exchange: ControlExchange | None = None) -> None:
        """Start a comparison. All ranks must call this.

        Args:
            exchange: The control vector of the pass; None between passes.
        """
        if self._warned or self._ranks.world_size == 1 or not self._params:
            return
        names, device = [name for name, _ in self._params], self._params[0][1].device
        sums = torch.stack([_sum_of_bits(param).to(device, torch.int64) for _, param in self._params])
        weights = torch.arange(1, 2 * len(names), 2, device=device) * _FACTOR
        gathered = self._gathered((sums * weights).sum())
        self._comparison = _Comparison(self._peers.position.pass_number, names, sums, HostCopy(gathered), exchange)

    def look(self) -> None:
        """Look at the comparison that is on its way, if there is one. All ranks must call this.

        Raises:
            RankMismatchError: As :meth:`use_reports`.
        """
        comparison, self._comparison = self._comparison, None
        if comparison is None or (comparison.exchange is not None and comparison.exchange.read().joined_ranks):
            return
        of_ranks = comparison.of_ranks.read()
        if bool((of_ranks == of_ranks[0]).all()):
            return
        differ = (sums := self._gathered(comparison.sums).cpu()) != sums[0]
        found = [name for name, differs in zip(comparison.names, differ.any(0).tolist(), strict=True) if differs]
        listed = ", ".join(map(repr, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")
        others = in_words([rank for rank, differs in enumerate(differ.any(1).tolist()) if differs])
        message = (
            f"rank {self._peers.rank}: expected the same parameters on all ranks, found {len(found)} of "
            f"{len(comparison.names)} that differ in pass {comparison.number}: {listed}; {others} and rank 0 differ. "
            "Some rank changed them by itself: in forward (nn.Embedding(max_norm=...), an initialisation from data), "
            "or in a step on gradients that were not averaged (of torch.autograd.grad). Change them alike on all "
            "ranks; broadcast_params() gives all ranks those of rank 0"
        )
        if self._on_difference == "error":
            with self._peers.failing():
                raise RankMismatchError(message)
        self._warned = True
        warnings.warn(f"{message}. This warning is not repeated", stacklevel=2)

    def _gathered(self, mine: Tensor) -> Tensor:
        return self._ranks.gather(mine, "the comparison of parameters", Phase.PASS)


def _sum_of_bits(param: Tensor) -> Tensor:
    """The sum of a parameter's elements, taken for integers."""
    values = param.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    bits = _BITS[values.element_size()]
    return values.resolve_neg().view(bits).sum(dtype=bits)
