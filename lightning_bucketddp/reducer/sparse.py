"""Sparse gradients: reduced apart from the buckets, at the end of a pass.

The ranks agree on the parameters with sparse gradients when the module is wrapped. When the control vector has said
that all are in the same pass, two ranks with an embedding of 6 rows exchange, per parameter::

                 gradient holds rows     new, rows      gathered indices      .grad on both
    rank 0       1, 4, 4 -> 1, 4         1, 2           1  4                  1: a/2
    rank 1       4                       1, 1           4  0 (padding)        4: (b + c)/2

Every rank knows the numbers of rows of all ranks before the rows travel, so all ranks do the same: nothing if no rank
has a new gradient; a dense all-reduce if one has a dense gradient (the weight is tied to a dense layer); else they
gather the rows. A pass with sparse gradients waits for the device, as the numbers of rows must come to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_bucketddp.grads.checks import require_sound
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.peers.control import Report
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.reducer.participant import Participant, PassResult
from lightning_bucketddp.reducer.state import Origin, Pass

_DENSE = -1
"""Stands where a number of rows would, for a dense gradient."""


def find_sparse(module: nn.Module, declared: Sequence[str] = ()) -> frozenset[str]:
    """The parameters whose gradients may be sparse.

    Args:
        module: Scanned for ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``, trainable or frozen.
        declared: Qualified names of further parameters; any of its names for a shared one.

    Returns:
        Names as in ``module.named_parameters()``.

    Raises:
        ValueError: If a name is unknown.
    """
    by_name = dict(module.named_parameters(remove_duplicate=False))
    unknown = [name for name in declared if name not in by_name]
    if unknown:
        raise ValueError(f"expected sparse_parameters to name parameters of the module, found {unknown}")
    found = {id(by_name[name]) for name in declared}
    for owner in module.modules():
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
            found.add(id(owner.weight))
    return frozenset(name for name, param in module.named_parameters() if id(param) in found)


class SparseGrads(Participant):
    """Reduces the gradients of parameters without a slot, as these may be sparse.

    Args:
        ranks: The ranks.
        divisor: Knows the factor for means.
        max_abs_grad: Refuse gradients that are not finite, or larger in absolute value; None to look at none.

    Attributes:
        used_somewhere: Indices of the parameters with a gradient on some rank in the last reduction.
        nbytes: Bytes that this rank received in the last reduction, padding included.
    """

    def __init__(self, ranks: Ranks, divisor: GradientDivisor, max_abs_grad: float | None = None) -> None:
        self._ranks, self._collectives, self._divisor = ranks, ranks.collectives, divisor
        self._max_abs_grad = max_abs_grad
        self._opened: Pass | None
        self._held: list[tuple[int, Tensor | None]]
        self.used_somewhere: frozenset[int]

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Reduce the sparse gradients of these parameters from now on."""
        self._table = table
        self._names, self._params = table.names, table.all_params
        self._opened, self._held = None, []
        self.used_somewhere, self.nbytes = frozenset(), 0

    @property
    def reads_control(self) -> bool:
        """Whether there are such parameters: rows travel only between ranks in the same pass."""
        return bool(self._held)

    def opened(self, this_pass: Pass) -> None:
        """Remember the pass. A reduction by hand takes every gradient."""
        self._opened = this_pass
        if this_pass.origin is Origin.CALL:
            present = (index for index in self._table.sparse if self._params[index].grad is not None)
            self._table.pending.update(map(self._table.key, present))

    def zero(self) -> None:
        """Drop all gradients: a sparse gradient of zeros is None."""
        for index in self._table.sparse:
            self._params[index].grad = None

    def report(self, report: Report) -> None:
        """Take this rank's gradients, coalesced if sparse.

        Raises:
            RuntimeError: If a gradient cannot be reduced.
        """
        this_pass = self._opened
        assert this_pass is not None
        sparse = [index for index in sorted(self._table.sparse) if this_pass.trainable[index]]
        self._held = [(index, None if this_pass.contributes_zeros else self._own(index)) for index in sparse]

    def _own(self, index: int) -> Tensor | None:
        grad = self._params[index].grad
        if grad is None:
            self._table.pending.discard(self._table.key(index))  # zero_grad() has dropped the gradient
            return None
        self._require_fit(index, grad)
        grad = grad.coalesce() if grad.is_sparse else grad
        if self._max_abs_grad is not None:
            values = grad.values() if grad.is_sparse else grad
            if values.numel():
                largest = torch.linalg.vector_norm(values, math.inf).item()
                require_sound(largest, self._max_abs_grad, self._collectives.rank, self._names[index])
        return grad

    def _require_fit(self, index: int, grad: Tensor) -> None:
        param = self._params[index]
        layout_fits = grad.layout is torch.strided or (grad.layout is torch.sparse_coo and grad.sparse_dim() == 1)
        expected = (param.shape, param.dtype, param.device, False)
        if not layout_fits or (grad.shape, grad.dtype, grad.device, grad.requires_grad) != expected:
            raise RuntimeError(
                f"the gradient of parameter {self._names[index]!r} cannot be reduced: expected a dense one, or one in "
                f"COO layout and sparse in the first dimension only, of shape {tuple(param.shape)}, {param.dtype} on "
                f"{param.device}, without requires_grad (no create_graph=True); found {grad.layout} of shape "
                f"{tuple(grad.shape)}, {grad.dtype} on {grad.device}, requires_grad={grad.requires_grad}"
            )

    def use_reports(self, result: PassResult) -> None:
        """Replace gradients by their means over the ranks. A gradient that is new on no rank stays as it is."""
        self.nbytes = 0
        held = self._held
        if not held:
            return
        pending, key = self._table.pending, self._table.key
        mine = torch.tensor([[key(index) in pending, _rows(grad)] for index, grad in held])
        mine = mine.to(self._params[held[0][0]].device)
        with self._ranks.waiting_for(what := "the number of rows in sparse gradients", Phase.PASS):
            everyone: list[list[list[int]]] = self._ranks.gather(mine, what, Phase.PASS).tolist()
        self.used_somewhere = frozenset(
            index for (index, _), *said in zip(held, *everyone, strict=True) if any(new for new, _ in said)
        )
        for position, (index, grad) in enumerate(held):
            if index not in self.used_somewhere:
                continue
            with self._ranks.waiting_for(f"the sparse gradient of {self._names[index]!r}", Phase.PASS):
                rows = [rank[position][1] for rank in everyone]
                param = self._params[index]
                if _DENSE in rows:
                    param.grad = self._mean_dense(param, grad)
                else:
                    param.grad = self._mean_sparse(param, grad, rows)
                # Multiplied itself, a sparse gradient would no longer count as coalesced.
                self._divisor.rescale(param.grad.values() if param.grad.is_sparse else param.grad)

    def _mean_dense(self, param: Tensor, grad: Tensor | None) -> Tensor:
        dense = param.new_zeros(param.shape) if grad is None else grad.to_dense().contiguous()
        self._weigh(dense)
        self.nbytes += dense.nbytes
        self._collectives.all_reduce_mean(dense.view(-1)).wait()
        return dense

    def _mean_sparse(self, param: Tensor, grad: Tensor | None, rows: Sequence[int]) -> Tensor:
        most = max(rows)
        indices = torch.zeros(most, dtype=torch.int64, device=param.device)
        values = param.new_zeros((most, *param.shape[1:]))
        if grad is not None:
            count = _rows(grad)
            indices[:count], values[:count] = grad.indices()[0], grad.values()
        self._weigh(values)
        values.mul_(1.0 / self._collectives.world_size)  # before the sum, which overflows in fp16 at 65504
        all_indices, indices_pending = self._collectives.all_gather(indices)
        all_values, values_pending = self._collectives.all_gather(values)
        self.nbytes += all_indices.nbytes + all_values.nbytes
        indices_pending.wait()
        values_pending.wait()
        # Every rank adds the same numbers in the same order.
        return torch.sparse_coo_tensor(
            _without_padding(all_indices, rows).unsqueeze(0),
            _without_padding(all_values, rows),
            param.shape,
            check_invariants=False,
        ).coalesce()

    def _weigh(self, values: Tensor) -> None:
        if self._opened is not None and self._opened.weight is not None:
            values.mul_(self._opened.weight)

    def ended(self) -> None:
        """Forget the gradients of this pass."""
        self._held = []


def _rows(grad: Tensor | None) -> int:
    if grad is None:
        return 0
    return len(grad.values()) if grad.is_sparse else _DENSE


def _without_padding(gathered: Tensor, rows: Iterable[int]) -> Tensor:
    return torch.cat([mine[:count] for mine, count in zip(gathered, rows, strict=True)])
