"""What a collective is for, guessed by dtype, size and order: ``bucket k``, ``control``, ``parameters``, ...

From what is public alone: the modules' tensors and ``BucketDDP.layout``. Roles make traces readable, and a trace that
lost one bucket says which.
"""

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.control import HEADER

# What ranks tell one another after a pass is expected in int64 vectors with at least a number for each slot. Their
# lengths are not recorded: what they hold may change where the order of collectives does not.
_MOST_PER_SLOT, _MOST_BESIDE = 4, 32
LENGTH_UNKNOWN = ("control", "order")


class Roles:
    """The roles of one rank's collectives, one after the other."""

    def __init__(self) -> None:
        self.modules: list[weakref.ref[nn.Module]] = []  # that are wrapped, or are about to be
        self.wrappers: list[weakref.ref[BucketDDP]] = []  # whose layout is known
        self._last_wrapper = 0
        self._buckets_since_control = True
        self._next_bucket: dict[tuple[int, Layout, str, str], int] = {}

    def of(self, operation: str, group: dist.ProcessGroup, label: str, sent: list[Tensor]) -> str:
        """The role of a collective in which this rank sends these tensors; empty where nothing fits."""
        if not sent:
            return ""
        dtype, numel = sent[0].dtype, sum(tensor.numel() for tensor in sent)
        if operation == "all_reduce" and dtype is torch.int64:
            slots = [(at, len(it.layout.slots)) for at, it in self._open()]
            ended = [at for at, count in slots if count < numel <= _MOST_PER_SLOT * count + _MOST_BESIDE]
            if ended:
                self._next_bucket = {key: due for key, due in self._next_bucket.items() if key[0] not in ended}
                first, self._buckets_since_control = self._buckets_since_control, False
                return "control" if first else "order"
        elif operation != "broadcast" and (bucket := self._bucket(operation, group, label, dtype, numel)):
            return bucket
        if operation in ("broadcast", "all_reduce") and numel > 1:  # a single number may be anything
            for module in [it for ref in self.modules if (it := ref()) is not None]:
                params, buffers = (_numel_of(found, dtype) for found in (module.parameters(), module.buffers()))
                for role, count in [("parameters", params), ("module buffers", buffers)]:
                    if numel == count:
                        return role
                if numel == params + buffers:
                    return "parameters and module buffers"
        return ""

    def _open(self) -> list[tuple[int, BucketDDP]]:
        return [(at, it) for at, ref in enumerate(self.wrappers) if (it := ref()) is not None and not it.closed]

    def _bucket(self, operation: str, group: dist.ProcessGroup, label: str, dtype: torch.dtype, numel: int) -> str:
        """The bucket of this size that follows the one before, or the first of this size."""
        found: list[tuple[int, bool, int, int]] = []
        gathers = operation.startswith("all_gather")
        for at, wrapper in self._open():
            layout, key = wrapper.layout, (at, wrapper.layout, operation, label)
            last = len(layout.buckets) - 1
            for index, bucket in enumerate(layout.buckets):
                spec = layout.slots[bucket.slots[0]].spec
                shard = -(-bucket.numel // group.size())
                if gathers and dtype is torch.uint8:  # by forward's order, not by index
                    if numel == shard * (spec.param_dtype or spec.dtype).itemsize:
                        return "parameters of a bucket"
                elif gathers and dtype.itemsize >= spec.dtype.itemsize:
                    continue  # gradients are gathered in less precision only
                elif operation == "all_reduce" and index == last and numel == bucket.numel + HEADER + len(layout.slots):
                    self._next_bucket[key] = 0
                    self._buckets_since_control, self._last_wrapper = False, at
                    return f"bucket {index} and control{self._of_wrapper(at)}"
                elif operation == "all_reduce" and group is wrapper.process_group and numel != bucket.numel:
                    continue  # shards are reduced across their groups only
                elif numel in (bucket.numel, group.size() * shard, (group.size() - 1) * shard, shard):
                    skipped = (index - self._next_bucket.get(key, 0)) % len(layout.buckets)
                    found.append((skipped, at != self._last_wrapper, at, index))
        if not found:
            return ""
        self._buckets_since_control = True
        _, _, at, index = min(found)
        key = (at, self.wrappers[at]().layout, operation, label)  # type: ignore[union-attr]
        self._next_bucket[key], self._last_wrapper = index + 1, at
        return f"bucket {index}{self._of_wrapper(at)}"

    def _of_wrapper(self, at: int) -> str:
        return f" of wrapper {at}" if len(self.wrappers) > 1 else ""


def _numel_of(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    """The elements of this dtype; for uint8 all bytes, as broadcasts send them."""
    if dtype is torch.uint8:
        return sum(tensor.nbytes for tensor in tensors)
    return sum(tensor.numel() for tensor in tensors if tensor.dtype is dtype)
