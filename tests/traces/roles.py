"""What a collective is for, guessed by dtype, size and order: ``bucket k``, ``control``, ``parameters``, ...

From what is public alone: the modules' tensors and ``BucketDDP.layout``. Roles make traces readable, and a trace that
lost one bucket says which.
"""

import weakref
from collections.abc import Iterable
from typing import Any

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
        self._modules: list[weakref.ref[nn.Module]] = []
        self._wrappers: list[weakref.ref[BucketDDP]] = []
        self._last_wrapper = 0
        self._buckets_since_control = True
        self._layouts: dict[tuple[int, str, str], Any] = {}
        self._next_bucket: dict[tuple[int, str, str], int] = {}

    def wrapping(self, module: nn.Module) -> None:
        """Remembers a module that is about to be wrapped."""
        self._modules.append(weakref.ref(module))

    def wrapped(self, wrapper: BucketDDP) -> None:
        """Remembers a wrapper whose layout is known from now on."""
        self._wrappers.append(weakref.ref(wrapper))

    def of(self, operation: str, group: dist.ProcessGroup, label: str, sent: list[Tensor]) -> str:
        """The role of a collective in which this rank sends these tensors; empty where nothing fits."""
        if not sent:
            return ""
        dtype, numel = sent[0].dtype, sum(tensor.numel() for tensor in sent)
        wrappers = [(at, it) for at, ref in enumerate(self._wrappers) if (it := ref()) is not None and not it.closed]
        if operation == "all_reduce" and dtype is torch.int64:
            slots = [(at, len(it.layout.slots)) for at, it in wrappers]
            ended = [at for at, count in slots if count < numel <= _MOST_PER_SLOT * count + _MOST_BESIDE]
            if ended:
                self._next_bucket = {key: 0 if key[0] in ended else due for key, due in self._next_bucket.items()}
                first, self._buckets_since_control = self._buckets_since_control, False
                return "control" if first else "order"
        elif operation != "broadcast":
            bucket = self._bucket(operation, group, label, dtype, numel, wrappers)
            if bucket:
                return bucket
        if operation in ("broadcast", "all_reduce") and numel > 1:  # a single number may be anything
            for module in [it for ref in self._modules if (it := ref()) is not None]:
                params, buffers = (_numel_of(found, dtype) for found in (module.parameters(), module.buffers()))
                if numel == params + buffers:
                    return " and ".join(["parameters"] * (params > 0) + ["module buffers"] * (buffers > 0))
                if numel in (params, buffers):
                    return "parameters" if numel == params else "module buffers"
        return ""

    def _bucket(
        self,
        operation: str,
        group: dist.ProcessGroup,
        label: str,
        dtype: torch.dtype,
        numel: int,
        wrappers: list[tuple[int, BucketDDP]],
    ) -> str:
        """The bucket of this size that follows the one before, or the first of this size."""
        found: list[tuple[int, bool, int, int]] = []
        for at, wrapper in wrappers:
            layout, key = wrapper.layout, (at, operation, label)
            if self._layouts.get(key) != layout:
                self._layouts[key], self._next_bucket[key] = layout, 0
            for index, bucket in enumerate(layout.buckets):
                spec = layout.slots[bucket.slots[0]].spec
                ranks = group.size()
                shard = -(-bucket.numel // ranks)
                if operation.startswith("all_gather") and dtype is torch.uint8:  # by forward's order, not by index
                    if numel == shard * (spec.param_dtype or spec.dtype).itemsize:
                        return "parameters of a bucket"
                elif operation.startswith("all_gather") and dtype.itemsize >= spec.dtype.itemsize:
                    continue  # gradients are gathered in less precision only
                elif operation == "all_reduce" and index == len(layout.buckets) - 1 and numel == _with_control(layout):
                    self._next_bucket[key] = 0
                    self._buckets_since_control, self._last_wrapper = False, at
                    return f"bucket {index} and control" + (f" of wrapper {at}" if len(self._wrappers) > 1 else "")
                elif operation == "all_reduce" and group is wrapper.process_group and numel != bucket.numel:
                    continue  # shards are reduced across their groups only
                elif numel in (bucket.numel, ranks * shard, (ranks - 1) * shard, shard):
                    skipped = (index - self._next_bucket[key]) % len(layout.buckets)
                    found.append((skipped, at != self._last_wrapper, at, index))
        if not found:
            return ""
        self._buckets_since_control = True
        _, _, at, index = min(found)
        self._next_bucket[at, operation, label], self._last_wrapper = index + 1, at
        return f"bucket {index}" + (f" of wrapper {at}" if len(self._wrappers) > 1 else "")


def _with_control(layout: Layout) -> int:
    """The length of the last bucket with the control vector behind it."""
    return layout.buckets[-1].numel + HEADER + len(layout.slots)


def _numel_of(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in tensors if tensor.dtype is dtype)
