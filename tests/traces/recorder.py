"""Records the collectives that this rank issues, below the package: at torch's ``ProcessGroup``.

All of torch's functions for collectives end in a method of ``ProcessGroup``, which is where each is counted once. A
line is ``operation, reduce op or root, dtype, elements, role``.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.traces.roles import LENGTH_UNKNOWN, Roles

Trace = dict[str, list[str]]
"""A rank's lines by the label of the group."""

# What a line calls an operation, and torch's methods for it, of which names change between versions.
_METHODS = {
    "all_reduce": ["allreduce"],
    "all_reduce_coalesced": ["allreduce_coalesced"],
    "broadcast": ["broadcast"],
    "reduce": ["reduce"],
    "all_gather": ["allgather"],
    "all_gather_coalesced": ["allgather_coalesced"],
    "all_gather_single": ["all_gather_single", "_allgather_base"],
    "all_gather_single_coalesced": ["all_gather_single_coalesced", "allgather_into_tensor_coalesced"],
    "reduce_scatter": ["reduce_scatter"],
    "reduce_scatter_single": ["reduce_scatter_single", "_reduce_scatter_base"],
    "reduce_scatter_single_coalesced": ["reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"],
    "all_to_all": ["alltoall"],
    "all_to_all_single": ["all_to_all_single", "alltoall_base"],
    **{name: [name] for name in ("gather", "scatter", "send")},
    "recv": ["recv", "recv_anysource"],
    "barrier": ["barrier", "monitored_barrier"],
}
_IN_PLACE = ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "send", "recv")


class Recorder:
    """What this rank has issued since it was made.

    Attributes:
        mark: The part of the scenario that runs now; it is written above the first line that falls into it.
    """

    def __init__(self) -> None:
        self.mark = ""
        self.trace: Trace = {}
        self.roles = Roles()
        self._marks: dict[str, str] = {}
        self._labels: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()

    def record(self, operation: str, group: dist.ProcessGroup, given: list[Any]) -> None:
        """Adds one line."""
        sent_at = 0 if operation in _IN_PLACE else 1
        sent = list(_tensors(given[sent_at : sent_at + 1])) if operation != "barrier" else []
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _reduce_op_or_root(operation: str, arguments: list[Any]) -> str:
    """What the options of a call say; torch passes them in an object, or one by one."""
    for value in arguments:
        if hasattr(value, "rootRank") and operation != "reduce":
            return f"{'to' if operation == 'gather' else 'from'} {value.rootRank}"
        if "reduce" in operation:
            op = getattr(value, "reduceOp", value)
            if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
                return next(name.lower() for name, known in dist.ReduceOp.RedOpType.__members__.items() if op == known)
    return "sum" if "reduce" in operation else "-"


current: Recorder | None = None


def mark(text: str) -> None:
    """Names the part of the scenario that begins."""
    if current is not None:
        current.mark = text


@contextmanager
def recording() -> Iterator[Recorder]:
    """Records this process's collectives, of all threads."""
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

    replaced = {
        name: counted(operation, getattr(dist.ProcessGroup, name))
        for operation, names in _METHODS.items()
        for name in names
        if hasattr(dist.ProcessGroup, name)
    }
    with patch.multiple(dist.ProcessGroup, **replaced), patch.object(BucketDDP, "__init__", init):
        try:
            yield recorder
        finally:
            current = None
