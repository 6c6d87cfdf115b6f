"""How many samples a training batch has."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_bucketddp.replicas.nested import leaves
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP


class SampleCount:
    """Counts the samples of each backward in a Trainer, unless the user has counted them.

    A batch has as many samples as its tensors are long, if all have one length. Tensors of no dimension do not count.
    """

    def __init__(self) -> None:
        self._lengths: set[int] = set()

    def look_at(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the batch, which ``training_step`` gets first."""
        batch = next(iter((*args, *kwargs.values())), None)
        self._lengths = {len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}

    def skip(self) -> None:
        """Say that the batch has no loss, so that none of its samples counts."""
        self._lengths = {0}

    def count(self, wrapper: BucketDDP) -> None:
        """Count the batch before a backward.

        Raises:
            RuntimeError: If the tensors have several lengths, or there are none.
        """
        if wrapper._passes.wrapped.context.divisor.counted:
            return
        if len(self._lengths) != 1:
            raise RuntimeError(
                f"rank {wrapper._passes.peers.rank}: expected a batch whose tensors all have one length, its number of "
                f'samples, where gradient_divide_by="samples"; found lengths {sorted(self._lengths)}. Call '
                "self.trainer.strategy.count_samples(n) in training_step"
            )
        wrapper.count_samples(*self._lengths)
