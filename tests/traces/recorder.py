"""Records the collectives that this rank issues, below the package: at torch's ``ProcessGroup``.

All of torch's functions for collectives end in a method of ``ProcessGroup``, which is where each is counted once. A
line is ``operation, reduce op or root, dtype, elements, role``.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm import work
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.control import HEADER

Trace = dict[str, list[str]]
"""A rank's lines by the label of the group."""

# What a line calls an operation, and torch's methods for it, of which names change between versions.
_METHODS = {
    **{name: [name] for name in ("broadcast", "reduce", "reduce_scatter", "gather", "scatter", "send")},
    "all_reduce": ["allreduce"],
    "all_reduce_coalesced": ["allreduce_coalesced"],
    "all_gather": ["allgather"],
    "all_gather_coalesced": ["allgather_coalesced"],
    "all_gather_single": ["all_gather_single", "_allgather_base"],
    "all_gather_single_coalesced": ["all_gather_single_coalesced", "allgather_into_tensor_coalesced"],
    "reduce_scatter_single": ["reduce_scatter_single", "_reduce_scatter_base"],
    "reduce_scatter_single_coalesced": ["reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"],
    "all_to_all": ["alltoall"],
    "all_to_all_single": ["all_to_all_single", "alltoall_base"],
    "recv": ["recv", "recv_anysource"],
    "barrier": ["barrier", "monitored_barrier"],
}
_IN_PLACE = ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "send", "recv")
# Their lengths are not recorded: what they hold may change where the order of collectives does not.
LENGTH_UNKNOWN = ("control", "order")


class Roles:
    """What a rank's collectives are for, guessed from modules' tensors and ``BucketDDP.layout`` by size and order."""

    def __init__(self) -> None:
        self.modules: list[weakref.ref[nn.Module]] = []  # that are wrapped, or are about to be
        self.wrappers: list[weakref.ref[BucketDDP]] = []  # whose layout is known
        self._last_wrapper = 0
        self._after_control = True  # for vectors of a length that both have
        self._next_bucket: dict[tuple[int, Layout, str, str], int] = {}

    def of(self, operation: str, group: dist.ProcessGroup, label: str, sent: list[Tensor]) -> str:
        """The role of a collective in which this rank sends these tensors; empty where nothing fits."""
        if not sent:
            return ""
        dtype, numel = sent[0].dtype, sum(tensor.numel() for tensor in sent)
        if operation == "all_to_all_single" and dtype is torch.int64:  # a copy for each rank
            operation, numel = "all_reduce", numel // group.size()
        elif operation == "all_to_all_single" and dtype is torch.uint8:  # the same, or one for the other one of two
            operation, numel = "all_gather", numel if group.size() == 2 else numel // group.size()
        if operation == "all_reduce" and dtype is torch.int64:
            slots = [(at, len(wrapper.layout.slots)) for at, wrapper in self._open()]
            ended = [at for at, count in slots if numel in (HEADER + count, 3 * count + 3)]
            if ended:
                self._begin_anew(ended, label)
                is_control = any(numel == HEADER + count for _, count in slots)
                is_order = any(numel == 3 * count + 3 for _, count in slots)
                self._after_control = is_control and not (is_order and self._after_control)
                return "control" if self._after_control else "order"
        elif operation != "broadcast" and (bucket := self._bucket(operation, group, label, dtype, numel)):
            return bucket
        if operation in ("broadcast", "all_reduce") and numel > 1:  # a single number may be anything
            for module in [alive for ref in self.modules if (alive := ref()) is not None]:
                params, buffers = (_numel_of(found, dtype) for found in (module.parameters(), module.buffers()))
                for role, count in [("parameters", params), ("module buffers", buffers)]:
                    if numel == count:
                        return role
                if numel == params + buffers:
                    return "parameters and module buffers"
        return ""

    def _open(self) -> list[tuple[int, BucketDDP]]:
        wrappers = enumerate(ref() for ref in self.wrappers)
        return [(at, wrapper) for at, wrapper in wrappers if wrapper is not None and not wrapper.closed]

    def _bucket(self, operation: str, group: dist.ProcessGroup, label: str, dtype: torch.dtype, numel: int) -> str:
        """The bucket of this size that follows the one before, or the first of this size."""
        found: list[tuple[int, bool, int, int]] = []
        gathers = operation.startswith("all_gather")
        for at, wrapper in self._open():
            layout, key = wrapper.layout, (at, wrapper.layout, operation, label)
            for index, bucket in enumerate(layout.buckets):
                spec = layout.slots[bucket.slots[0]].spec
                shard, room = -(-bucket.numel // group.size()), bucket.room
                at_once = group.size() * (bucket.numel + room), bucket.numel + group.size() * room
                with_control = {"all_reduce": [bucket.numel + room], "all_to_all_single": at_once}.get(operation, ())
                if gathers and dtype is torch.uint8:  # by forward's order, not by index
                    if numel == shard * (spec.param_dtype or spec.dtype).itemsize:
                        return "parameters of a bucket"
                elif gathers and dtype.itemsize >= spec.dtype.itemsize:
                    continue  # gradients are gathered in less precision only
                elif room and dtype is spec.dtype and numel in with_control:
                    self._begin_anew([at], label)
                    self._last_wrapper, self._after_control = at, True
                    return f"bucket {index} and control{self._of_wrapper(at)}"
                elif operation == "all_reduce" and group is wrapper.process_group and numel != bucket.numel:
                    continue  # shards are reduced across their groups only
                elif numel in (bucket.numel, group.size() * shard, (group.size() - 1) * shard, shard):
                    skipped = (index - self._next_bucket.get(key, 0)) % len(layout.buckets)
                    found.append((skipped, at != self._last_wrapper, at, index))
        if not found:
            return ""
        _, _, at, index = min(found)
        key = (at, self.wrappers[at]().layout, operation, label)  # type: ignore[union-attr]
        self._next_bucket[key], self._last_wrapper, self._after_control = index + 1, at, False
        return f"bucket {index}{self._of_wrapper(at)}"

    def _begin_anew(self, ended: list[int], label: str) -> None:
        """Expect the first bucket of these wrappers again. Threads may still start stages in groups of their own."""
        due = self._next_bucket.items()
        self._next_bucket = {key: at for key, at in due if key[0] not in ended or key[3] != label}

    def _of_wrapper(self, at: int) -> str:
        return f" of wrapper {at}" if len(self.wrappers) > 1 else ""


def _numel_of(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    """The elements of this dtype; for uint8 all bytes, as broadcasts send them."""
    if dtype is torch.uint8:
        return sum(tensor.nbytes for tensor in tensors)
    return sum(tensor.numel() for tensor in tensors if tensor.dtype is dtype)


class Recorder:
    def __init__(self) -> None:
        self.mark = ""  # the part of the scenario that runs now, written above the first line that falls into it
        self.trace: Trace = {}
        self.roles = Roles()
        self._marks: dict[str, str] = {}
        self._labels: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()

    def record(self, operation: str, group: dist.ProcessGroup, given: list[Any]) -> None:
        """Adds one line."""
        sent_at = 0 if operation in _IN_PLACE else 1
        values = tree_leaves(given[sent_at : sent_at + 1]) if operation != "barrier" else []
        sent = [value for value in values if isinstance(value, Tensor)]
        dtype = str(sent[0].dtype).removeprefix("torch.") if sent else "-"
        elements: int | str = sum(tensor.numel() for tensor in sent) if sent else "-"
        label = self._label(group)
        role = self.roles.of(operation, group, label, sent)
        if role in LENGTH_UNKNOWN or (dtype == "uint8" and not role):  # of the latter, pickled objects are the most
            elements = "*"
        lines = self.trace.setdefault(label, [])
        if self.mark != self._marks.get(label, ""):
            self._marks[label] = self.mark
            lines.append(f"-- {self.mark}")
        how = _reduce_op_or_root(operation, given)
        lines.append(f"{operation:<18} {how:<7} {dtype:<8} {elements:>6}  {role}".rstrip())

    def _label(self, group: dist.ProcessGroup) -> str:
        """The group's ranks, and a number if it is not the first of these ranks."""
        if group not in self._labels:
            ranks = dist.get_process_group_ranks(group)
            label = "world" if group is dist.group.WORLD else f"ranks {' '.join(map(str, ranks))}"
            number = 1 + sum(other.split(",")[0] == label for other in self._labels.values())
            self._labels[group] = label if number == 1 else f"{label}, number {number}"
        return self._labels[group]


def _reduce_op_or_root(operation: str, arguments: list[Any]) -> str:
    """What the options of a call say; torch passes them in an object, or one by one."""
    for value in arguments:
        if operation != "reduce" and (hasattr(value, "rootRank") or type(value) is int):
            return f"{'to' if operation == 'gather' else 'from'} {getattr(value, 'rootRank', value)}"
        if "reduce" in operation:
            op = getattr(value, "reduceOp", value)
            if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
                return next(name.lower() for name, known in dist.ReduceOp.RedOpType.__members__.items() if op == known)
    return "sum" if "reduce" in operation else "-"


current: Recorder | None = None


def mark(text: str) -> None:
    if current is not None:
        current.mark = text


@contextmanager
def recording() -> Iterator[Recorder]:
    global current
    recorder = current = Recorder()

    def counted(operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            recorder.record(operation, group, [*args, *options.values()])
            return original(group, *args, **options)

        return run

    wrapper_init = BucketDDP.__init__

    def init(wrapper: BucketDDP, module: nn.Module, *args: Any, **options: Any) -> None:
        recorder.roles.modules.append(weakref.ref(module))
        wrapper_init(wrapper, module, *args, **options)
        recorder.roles.wrappers.append(weakref.ref(wrapper))

    def heard(handle: Any, wait_for: Callable[[Any], None] = work.wait_for) -> None:
        assert work._polls.poll is not None, "expected a wait inside waiting_for(), which hears of failures; found none"
        wait_for(handle)

    methods = [(name, operation) for operation, names in _METHODS.items() for name in names]
    known = [(name, operation) for name, operation in methods if hasattr(dist.ProcessGroup, name)]
    replaced = {name: counted(operation, getattr(dist.ProcessGroup, name)) for name, operation in known}
    wraps = patch.object(BucketDDP, "__init__", init)
    with patch.multiple(dist.ProcessGroup, **replaced), wraps, patch.object(work, "wait_for", heard):
        try:
            yield recorder
        finally:
            current = None
