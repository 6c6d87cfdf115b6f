"""Records the collectives that this rank issues, below the package: at torch's ``ProcessGroup``.

All of torch's functions for collectives end in a method of ``ProcessGroup``, which is where each is counted once. A
line is ``operation, reduce op or root, dtype, elements, role``.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.traces.roles import LENGTH_UNKNOWN, Roles

Trace = dict[str, list[str]]
"""A rank's lines by the label of the group."""

# torch's methods, of which names change between versions: what a line calls them, and which argument is sent.
_OPERATIONS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "all_gather_single": ("all_gather_single", 1),
    "_allgather_base": ("all_gather_single", 1),
    "all_gather_single_coalesced": ("all_gather_single_coalesced", 1),
    "allgather_into_tensor_coalesced": ("all_gather_single_coalesced", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter_single", 1),
    "_reduce_scatter_base": ("reduce_scatter_single", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single_coalesced", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", -1),
    "monitored_barrier": ("barrier", -1),
}


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

    def record(self, group: dist.ProcessGroup, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Adds one line."""
        operation, sent_at = _OPERATIONS[method]
        given = (*args, *options.values())
        sent = list(_tensors(given[sent_at])) if 0 <= sent_at < len(given) else []
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


def _reduce_op_or_root(operation: str, arguments: Iterable[Any]) -> str:
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
    originals: dict[tuple[type, str], Any] = {}

    def replace(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            originals[owner, name] = vars(owner)[name]  # binds, as the function that getattr gives does not
            setattr(owner, name, functools.wraps(original)(make(original)))

    def counted(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
                recorder.record(group, name, args, options)
                return original(group, *args, **options)

            return run

        return make

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(wrapper: BucketDDP, module: nn.Module, *args: Any, **options: Any) -> None:
            recorder.roles.wrapping(module)
            original(wrapper, module, *args, **options)
            recorder.roles.wrapped(wrapper)

        return init

    for name in _OPERATIONS:
        replace(dist.ProcessGroup, name, counted(name))
    replace(BucketDDP, "__init__", noted)
    try:
        yield recorder
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
        current = None
