"""Compares the parameters of all ranks, to find those that some rank has changed by itself.

Each rank sums up the bits of every parameter. A sum of integers does not depend on its order, so equal parameters have
equal sums, whatever their strides. Ranks gather one number each, made of all sums. Only if these differ do they gather
the sums, to name parameters.

Parameters are read at the end of backward, before the optimizer changes them. Sharded ones are whole then: reading one
waits for its lazy all-gather, as any other use does. What aliases and other processes see is the same memory.

With them go the options of parameter groups, such as learning rates, of the optimizers that have stepped just before.
"""

from __future__ import annotations

import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.comm.host_copy import HostCopy
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.options import OnDifference
from lightning_bucketddp.layout.require import listed
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.control import ControlExchange
from lightning_bucketddp.peers.names import in_words
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant, PassResult

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers that have its bits. Their sums wrap around."""

_FACTOR = -7046029254386353131
"""An odd number of 64 bits without a pattern (2 ** 64 divided by the golden ratio). Its odd multiples are weights."""

_STEPS = 8
"""How many steps of optimizers are compared. They may step in turn, or several times between two passes."""


@dataclass(frozen=True)
class _Comparison:
    """One comparison on its way.

    Attributes:
        number: The pass in which parameters were read.
        names: Names of the parameters.
        options: The options of the last steps, by name; a dictionary for each step.
        sums: This rank's sums, the last one of the options.
        of_ranks: One number per rank, made of its sums.
        exchange: The control vector of the pass; None between passes.
    """

    number: int
    names: Sequence[str]
    options: Sequence[dict[str, Any]]
    sums: Tensor
    of_ranks: HostCopy
    exchange: ControlExchange | None


class RanksCheck(Participant):
    """Compares the parameters of all ranks in the first synchronised pass, and then once in ``every`` of them.

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
        self._options: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        self._comparison: _Comparison | None = None
        self._warned = False

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Compare these parameters from now on, frozen ones too.

        Those that do not hold plain values, such as sparse ones and quantised subclasses of tensors, are left out.
        """
        self._params = [
            (name, param)
            for name, param in zip(table.names, table.all_params, strict=True)
            if issubclass(type(param), nn.Parameter) and param.layout is torch.strided
        ]

    def note_step(self, optimizer: Optimizer) -> None:
        """Note the options with which an optimizer has stepped, if the next pass compares."""
        if self._peers.position.pass_number % self._every == 0 and not self._warned:
            self._options.append(dict(_options_of(optimizer)))

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
        options = list(self._options)
        self._options.clear()
        of_params = [sum_of_bits(param).to(device, torch.int64) for _, param in self._params]
        sums = torch.stack([*of_params, _sum_of_options(options, device)])
        weights = torch.arange(1, 2 * len(sums), 2, device=device) * _FACTOR
        of_ranks = HostCopy(self._gathered((sums * weights).sum()))
        self._comparison = _Comparison(self._peers.position.pass_number, names, options, sums, of_ranks, exchange)

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
        message = self._about_options(comparison) if bool(differ[:, -1].any()) else ""
        if bool((differ := differ[:, :-1]).any()):
            message = self._about_parameters(comparison, differ) + (f"\n{message}" if message else "")
        if not message:
            return
        if self._on_difference == "error":
            with self._peers.failing():
                raise RankMismatchError(message)
        self._warned = True
        warnings.warn(f"{message}. This warning is not repeated", stacklevel=2)

    def _about_parameters(self, comparison: _Comparison, differ: Tensor) -> str:
        found = [name for name, differs in zip(comparison.names, differ.any(0).tolist(), strict=True) if differs]
        others = in_words([rank for rank, differs in enumerate(differ.any(1).tolist()) if differs])
        return (
            f"rank {self._peers.rank}: expected the same parameters on all ranks, found {len(found)} of "
            f"{len(comparison.names)} that differ in pass {comparison.number}: {listed(found)}; {others} and rank 0 "
            "differ. Some rank changed them by itself: in forward (nn.Embedding(max_norm=...), an initialisation from "
            "data), or in a step on gradients that were not averaged (of torch.autograd.grad). Change them alike on "
            "all ranks; broadcast_params() gives all ranks those of rank 0"
        )

    def _about_options(self, comparison: _Comparison) -> str:
        """Name the first option that differs, of those that all ranks have. Ranks that had joined made fewer steps."""
        mine = [
            {name: value.tolist() if isinstance(value, Tensor) else value for name, value in step.items()}
            for step in comparison.options
        ]
        of_ranks = self._ranks.objects(mine, "the options of parameter groups", Phase.PASS)
        for steps in zip(*of_ranks, strict=False):
            for name, first in steps[0].items():
                values = [step.get(name, first) for step in steps]
                if (rank := next((at for at, value in enumerate(values) if value != first), None)) is not None:
                    return (
                        f"rank {self._peers.rank}: expected the same options of parameter groups on all ranks, found "
                        f"that {name} was {first} on rank 0 and {values[rank]} on rank {rank} in the last step before "
                        f"pass {comparison.number}. A scheduler that follows a metric of its own rank does that "
                        "(ReduceLROnPlateau): give it the mean over the ranks, in a Trainer by "
                        "self.log(..., sync_dist=True)"
                    )
        return ""

    def _gathered(self, mine: Tensor) -> Tensor:
        return self._ranks.gather(mine, "the comparison of parameters", Phase.PASS)


def sum_of_bits(param: Tensor) -> Tensor:
    """The sum of a tensor's elements, taken for integers of their size."""
    values = param.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    bits = _BITS[values.element_size()]
    return values.resolve_neg().view(bits).sum(dtype=bits)


def _options_of(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the options of an optimizer's parameter groups that are numbers, words or tensors, with a name for each."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            each = value if isinstance(value, tuple | list) else [value]
            if isinstance(value, Tensor):  # an optimizer changes it in place
                yield f"{key} of group {index} of {type(optimizer).__name__}", value.detach().clone()
            elif key != "params" and all(item is None or isinstance(item, int | float | str) for item in each):
                yield f"{key} of group {index} of {type(optimizer).__name__}", value


def _sum_of_options(options: Sequence[dict[str, Any]], device: torch.device) -> Tensor:
    pairs = [pair for step in options for pair in step.items()]
    words = repr([(name, None if isinstance(value, Tensor) else value) for name, value in pairs])
    total = torch.full((), zlib.crc32(words.encode()), dtype=torch.int64, device=device)
    for _, value in pairs:
        if isinstance(value, Tensor):
            total = total * _FACTOR + sum_of_bits(value).to(device, torch.int64)
    return total
