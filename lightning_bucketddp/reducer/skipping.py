"""Steps that all ranks skip together, because a gradient is not finite or too large, or a rank ran out of memory.

All ranks decide alike, from the control vector and from a sum over the ranks of what each finds in the reduced
gradients. Of its own gradients a rank only keeps the largest values, to say where the trouble began.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.grads.checks import GradientError
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.control import Report
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.limits import largest_values
from lightning_bucketddp.reducer.participant import Participant, PassResult
from lightning_bucketddp.reducer.state import Pass

REMEMBERED_NORMS = 100
"""How many of the last norms the median is taken of."""

NORMS_FOR_MEDIAN = 10
"""Norms are judged only after the first 10."""


@dataclass(frozen=True)
class _Own:
    """What one rank says of a skipped pass.

    Attributes:
        asked: Why it has asked for the skip; empty if it has not.
        unsound: Its parameters with gradients that are not finite, in launch order.
        largest: The largest absolute value in its gradients; infinite if one is not finite.
        where: The parameter with this value.
    """

    asked: str
    unsound: list[str]
    largest: float = 0.0
    where: str = ""


class StepSkips(Participant):
    """Has all ranks drop the gradients of a step.

    Args:
        options: The user's options.
        ranks: The ranks.
        groups: The ranks that divide the shards; None without shards.
        device: The device of the gradients.

    Attributes:
        skipped: Whether all ranks skip the step of the last pass.
        left_to_scaler: Whether its gradients were left to a GradScaler, instead of dropped.
        place: Where the step is, in a strategy's words.
        scaler_skips: Whether a GradScaler looks for gradients that are not finite. They then stay, so that it skips the
            step and lowers its scale.
    """

    def __init__(self, options: Options, ranks: Ranks, groups: ShardGroups | None, device: torch.device) -> None:
        self._options, self._ranks = options, ranks
        self._norms = _Norms(options.skip_norm_above, ranks, groups, device)
        self.skipped = self.left_to_scaler = self.scaler_skips = False
        self.place = ""
        self._in_a_row = 0
        self._asked = ""  # why this rank asks for a skip
        self._seen: list[tuple[list[str], Tensor]] = []  # the largest values of this rank's gradients, by name

    @property
    def on_oom(self) -> bool:
        """Whether ranks skip a step in which one ran out of memory."""
        return "oom" in self._options.skip_step_on

    def history(self) -> tuple[list[float], int]:
        """What later steps are judged by, the same on every rank, in simple types."""
        return [*self._norms.last], self._in_a_row

    def recall(self, history: tuple[list[float], int]) -> None:
        """Judge by what an earlier run has seen."""
        norms, self._in_a_row = history
        self._norms.last.extend(norms)

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Look at these gradients from now on."""
        self._table, self._storage = table, storage

    def ask(self, why: str) -> None:
        """Have all ranks drop the gradients of the next reduction.

        Args:
            why: As the end of a sentence that begins with the rank.
        """
        self._asked = self._asked or why

    @property
    def reads_control(self) -> bool:
        """True: other ranks may ask for a skip."""
        return True

    @property
    def _looks(self) -> bool:
        return "nonfinite" in self._options.skip_step_on or self._options.skip_norm_above is not None

    def opened(self, this_pass: Pass) -> None:
        """Forget the last pass."""
        self.skipped = self.left_to_scaler = False
        self._seen = []

    def before_launch(self, bucket: Bucket) -> None:
        """Keep the largest values of this rank's gradients."""
        if self._looks:
            self._seen.append(largest_values(self._table, self._storage, bucket))

    def report(self, report: Report) -> None:
        """Ask for a skip, if there is a reason on this rank."""
        report.drop = bool(self._asked)
        if self._looks and (sparse := self._sparse_values()):
            largest = torch.stack([torch.linalg.vector_norm(values, math.inf).double() for values in sparse.values()])
            self._seen.append(([*sparse], largest))

    def use_reports(self, result: PassResult) -> None:
        """Decide, and count.

        Raises:
            GradientError: On all ranks, if too many steps in a row were skipped.
        """
        assert result.control is not None
        finite, why = True, ""
        if not result.control.dropping_ranks:
            if self._looks:
                finite, why = self._norms.judge(result, self._sparse_values().values())
            if finite and not why:
                self._in_a_row = 0
                return
            if not finite and "nonfinite" not in self._options.skip_step_on:
                return
        self.skipped = True
        self.left_to_scaler = self.scaler_skips and not finite
        result.this_pass.dropped = not self.left_to_scaler
        self._in_a_row += 1
        everyone = self._ranks.objects(self._own(), "why a step is skipped", Phase.PASS)
        reason, which = _describe(everyone, why), f"pass {result.this_pass.number}{self.place}"
        if self._in_a_row > (most := self._options.max_skipped):
            raise GradientError(
                f"rank {self._ranks.rank}: expected at most max_skipped={most} skipped steps in a row, "
                f"found another one in {which}: {reason}. Look at the batches, and at the learning rate"
            )
        if self._ranks.rank == 0:
            in_a_row = f"{self._in_a_row} in a row so far"
            warnings.warn(f"rank 0: all ranks skip the step of {which}, {in_a_row}: {reason}", stacklevel=2)

    def _sparse_values(self) -> dict[str, Tensor]:
        """By name, the elements of gradients without a slot."""
        params, names = self._table.all_params, self._table.names
        grads = {names[index]: grad for index in sorted(self._table.sparse) if (grad := params[index].grad) is not None}
        values = {name: grad.coalesce().values() if grad.is_sparse else grad for name, grad in grads.items()}
        return {name: elements for name, elements in values.items() if elements.numel()}

    def _own(self) -> _Own:
        names = [name for found, _ in self._seen for name in found]
        values = [value for _, largest in self._seen for value in largest.tolist()]
        unsound = [name for name, value in zip(names, values, strict=True) if not math.isfinite(value)]
        largest = max(zip(values, names, strict=True), default=(0.0, ""))
        return _Own(self._asked, unsound, *((math.inf, unsound[0]) if unsound else largest))

    def ended(self) -> None:
        """Forget this rank's reason, whose gradients are gone."""
        self._asked = ""


@dataclass(eq=False)
class _Norms:
    """Judges reduced gradients, alike on every rank.

    Attributes:
        multiple: Norms above this multiple of their median are too large; None for any norm.
        ranks: The ranks.
        groups: The ranks that divide the shards; None without shards.
        device: The device of the gradients.
        last: The last norms.
    """

    multiple: float | None
    ranks: Ranks
    groups: ShardGroups | None
    device: torch.device
    last: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_NORMS))

    def judge(self, result: PassResult, sparse: Iterable[Tensor]) -> tuple[bool, str]:
        """Say whether all gradients are finite, and if so, why their norm is too large.

        Args:
            result: The pass.
            sparse: The elements of gradients without a slot.
        """
        total, norm = self._measure(result, sparse)
        if not math.isfinite(total):
            return False, ""
        if self.multiple is not None:
            median = statistics.median(self.last) if len(self.last) >= NORMS_FOR_MEDIAN else math.inf
            if norm > self.multiple * median:
                return True, f"the gradient norm {norm:.4g} is above {self.multiple} times its median, {median:.4g}"
            self.last.append(norm)
        return True, ""

    @torch.no_grad()
    def _measure(self, result: PassResult, sparse: Iterable[Tensor]) -> tuple[float, float]:
        """A number that is finite if all gradients are, and their norm.

        Both are summed over the ranks: shards differ, and other devices may round a norm otherwise.
        """
        groups, ranks = self.groups, self.ranks.world_size
        flats = [progress.bucket.flat for progress in result.this_pass.active]
        own = flats if groups is None else [groups.shard(flat) for flat in flats]
        copies = ranks if groups is None else ranks // groups.shards
        measured = torch.zeros(2, device=self.device)
        for part, held_by in [*((part, copies) for part in own), *((values, ranks) for values in sparse)]:
            if part.numel():
                measured[0] += torch.linalg.vector_norm(part, math.inf).to(measured)
            if self.multiple is not None:
                wide = torch.promote_types(part.dtype, torch.float32)
                measured[1] += torch.linalg.vector_norm(part, dtype=wide).to(measured).square() / held_by
        with self.ranks.waiting_for("the norm of the gradients", Phase.PASS):  # for the device, too
            self.ranks.collectives.all_reduce_sum(measured).wait()
            total, squares = measured.tolist()
        return total, math.sqrt(squares)


def _describe(everyone: list[_Own], why: str) -> str:
    """Why a step is skipped, in words.

    Args:
        everyone: By rank, what each says.
        why: What all know alike; empty if some gradient is not finite or some rank has asked.
    """
    if asked := [f"rank {rank} {own.asked}" for rank, own in enumerate(everyone) if own.asked]:
        return "; ".join(asked)
    if why:
        rank, own = max(enumerate(everyone), key=lambda each: each[1].largest)
        return f"{why}. The largest value, {own.largest:.4g}, is rank {rank}'s, in the gradient of {own.where!r}"
    found = [
        f"rank {rank} has NaN or Inf in {len(own.unsound)} gradient(s), first in that of {own.unsound[0]!r}"
        for rank, own in enumerate(everyone)
        if own.unsound
    ]
    return "; ".join(found) or "the mean over the ranks has NaN or Inf, though the gradients of every rank are finite"
