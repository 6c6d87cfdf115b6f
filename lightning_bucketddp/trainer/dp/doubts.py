"""Values of replicas that may mean two things: where what they are taken for may be wrong, it is said once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning.pytorch.utilities import rank_zero_warn


@dataclass
class StepMemory:
    """What is known from the steps before.

    Attributes:
        warned: What has been warned of, and need not be again.
        batch_sizes: Hooks, names and numbers given as ``batch_size`` to ``self.log`` that were the whole batch's.
        of_samples: Paths of values that were seen to depend on the samples.
        fixed: Paths of lists, and how many items they got in steps where replicas had another number of samples.
    """

    warned: set[str] = field(default_factory=set)
    batch_sizes: set[tuple[str, str, int]] = field(default_factory=set)
    of_samples: set[str] = field(default_factory=set)
    fixed: set[tuple[str, int]] = field(default_factory=set)

    def forget(self) -> None:
        """Forgets all but what has been warned of, as another run may have other steps."""
        self.batch_sizes.clear()
        self.of_samples.clear()
        self.fixed.clear()


class Doubts:
    """Warns of values that may have been meant otherwise than they are merged, once for each path.

    Args:
        memory: What is known from the steps before.
        positions: Numbers that say where the Trainer is, by name, as ``{"batch_idx": 3}``.
    """

    def __init__(self, memory: StepMemory, positions: Mapping[str, int]) -> None:
        self._memory = memory
        self._positions = positions

    def is_fixed(self, counts: Sequence[int], sizes: Sequence[int], path: str) -> bool:
        """Whether lists got as many items in this step as in one where that was not the number of samples."""
        if len(set(counts)) > 1:
            self._memory.of_samples.add(path)
        elif list(counts) != list(sizes):
            self._memory.fixed.add((path, counts[0]))
        return (path, counts[0]) in self._memory.fixed and path not in self._memory.of_samples

    def integers(self, values: Sequence[int], sizes: Sequence[int], path: str) -> None:
        """Warns if integers without a name, which are added up, are the step's position."""
        names = [name for name, position in self._positions.items() if position == values[0]]
        if len(set(values)) > 1 or not names:
            self._memory.of_samples.add(path)
        elif values[0] and list(values) != list(sizes):
            self._warn(
                path,
                f"expected an integer without a name to be a count, which is added up over the replicas, found {path} "
                f"to be {values[0]} in each, as {names[0]} is; give it a name that says so, as in "
                f'{{"{names[0]}": {names[0]}}}, or make it a tensor with an element of each sample',
            )

    def rows(self, rows: Sequence[int], sizes: Sequence[int], path: str) -> None:
        """Warns if tensors, which are concatenated, seem to have no rows of samples."""
        if len(set(rows)) > 1:
            self._memory.of_samples.add(path)
        elif rows[0] and (len(set(sizes)) > 1 or rows[0] % sizes[0]):
            self._warn(
                path,
                f"expected tensors to have the samples along their first dimension, which they are concatenated along, "
                f"found {path} to have {rows[0]} rows in each replica, which have {', '.join(map(str, sizes))} "
                "samples; give what it is made from, a row of each sample, or use a metric, such as ConfusionMatrix or "
                "MeanMetric",
            )

    def numbers(self, counts: Sequence[int], sizes: Sequence[int], path: str) -> None:
        """Warns of lists of numbers, which are merged one by one, but may be of the samples."""
        self._warn(
            path,
            f"expected to know whether the list {path} has a number of each sample, found {counts[0]} numbers in each "
            f"replica, which have {', '.join(map(str, sizes))} samples; they are merged one by one, as a loss and an "
            "accuracy are: make it a tuple if that is right, and one tensor if it has a number of each sample",
        )

    def _warn(self, path: str, message: str) -> None:
        if path not in self._memory.of_samples and path not in self._memory.warned:
            self._memory.warned.add(path)
            rank_zero_warn(message)
