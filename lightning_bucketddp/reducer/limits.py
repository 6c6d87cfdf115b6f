"""Refuses gradients that are not finite, or too large, before they reach other ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.grads.checks import require_sound
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.reducer.participant import Participant


class GradientLimits(Participant):
    """Looks at gradients before their bucket is packed. The host waits for them.

    Args:
        limit: The largest absolute value.
        rank: This rank.
    """

    def __init__(self, limit: float, rank: int) -> None:
        self._limit, self._rank = limit, rank

    def follow(self, table: SlotTable, storage: Storage, planner: LayoutPlanner) -> None:
        """Look at these gradients from now on."""
        self._table, self._storage = table, storage

    def before_launch(self, bucket: Bucket) -> None:
        """Require that the gradients of the bucket are finite and within the limit.

        Raises:
            GradientError: If not.
        """
        names, largest = largest_values(self._table, self._storage, bucket)
        for name, value in zip(names, largest.tolist(), strict=True):
            require_sound(value, self._limit, self._rank, name)


def largest_values(table: SlotTable, storage: Storage, bucket: Bucket) -> tuple[list[str], Tensor]:
    """The largest absolute value in each gradient of a bucket that is about to be packed.

    Returns:
        The parameters' names, and their values in a 1-D tensor; NaN where a gradient holds any. The host does not wait.
    """
    storage.pack_and_bind(bucket.slots)
    params = table.params
    present = [(slot, grad) for slot in bucket.slots if (grad := params[slot].grad) is not None and grad.numel()]
    if not present:
        return [], torch.empty(0)
    norms = torch._foreach_norm([grad for _, grad in present], math.inf)
    return [table.specs[slot].name for slot, _ in present], torch.stack(norms).double()
