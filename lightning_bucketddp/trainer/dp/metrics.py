"""torchmetrics in replicas: what replicas give a metric reaches the LightningModule's own one as the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.wrappers import Running

from lightning_bucketddp.replicas.nested import cloned, move_to, rebuilt, tensors_in
from lightning_bucketddp.trainer.dp.merging import merge

_AGGREGATORS = (MaxMetric, MeanMetric, MinMetric, SumMetric)


class Meeting(Protocol):
    """What a metric in a replica has to know of the step that it is used in."""

    sizes: Sequence[int]
    home: torch.device

    def meet(self, replica: int, call: str, value: Any, once: Callable[[list[Any]], Any]) -> Any:
        """As :meth:`Lockstep.meet`."""

    def current(self, replica: int) -> int:
        """The replica whose thread this is."""


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _has_number(call: _Call) -> bool:
    values = (*call.args, *call.kwargs.values())
    return any(type(value) is int or (isinstance(value, Tensor) and not value.dim()) for value in values)


def _without_window(metric: Metric) -> Metric:
    return metric.base_metric if isinstance(metric, Running) else metric


class SharedMetric:
    """A metric or collection of the LightningModule, given to by several replicas.

    States need not be merged: the metric gets what all replicas give it, as one batch, and so has the states and
    values of one device, whichever metric it is. ``update`` returns nothing, so calls are kept until a
    replica asks for a value or the step ends, and may be made by some replicas alone; calls that return something are
    made when all replicas have got there.

    Args:
        metric: The LightningModule's own.
        name: The attribute by which it is known, for messages.
        step: The step that runs.
        flush: Has this metric and all others given what replicas called ``update`` with; a collection's members too.
    """

    def __init__(self, metric: Metric | MetricCollection, name: str, step: Meeting, flush: Callable[[], None]) -> None:
        self.metric = metric
        self._name = name
        self._step = step
        self._flush_all = flush
        self._updates: list[list[_Call]] = [[] for _ in step.sizes]

    def update(self, replica: int, *args: Any, **kwargs: Any) -> None:
        """Keeps a replica's arguments to the metric's ``update``, as they are now: the step may change its tensors."""
        with torch.no_grad():
            self._updates[self._step.current(replica)].append(cloned(_Call(args, kwargs)))

    def call(self, replica: int, method: str, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the metric that returns something, with what all replicas gave it.

        Args:
            replica: Which replica calls.
            method: ``"forward"``, ``"compute"`` or ``"reset"``.
            device: Where the replica wants the result's tensors.
            args: What it gives.
            kwargs: What it gives by name.

        Raises:
            RuntimeError: If other replicas do not make the call.
            ValueError: If the arguments are none that can be put together.
        """

        def once(calls: list[_Call]) -> Any:
            self._flush_all()
            call = self._joined(calls, self._step.sizes)
            return self._original(method)(*call.args, **call.kwargs)

        described = f"the metric {self._name!r}" + ("" if method == "forward" else f".{method}()")
        result = self._step.meet(replica, described, _Call(args, kwargs), once)
        return move_to(result, device)

    def flush(self) -> None:
        """Gives the metric what ``update`` was called with, the replicas' first calls as one, and so on."""
        updates, self._updates = self._updates, [[] for _ in self._updates]
        if self._per_sample(updates):
            for call in (call for calls in updates for call in calls):
                self._update(move_to(call, self._step.home))
            return
        for row in zip_longest(*updates):
            made = [(call, size) for call, size in zip(row, self._step.sizes, strict=True) if call is not None]
            try:
                if not self._aggregates() and any(map(_has_number, (call for call, _ in made))):
                    raise ValueError("a number of samples cannot be told from a constant")
                joined = [self._joined([call for call, _ in made], [size for _, size in made])]
            except ValueError:  # such as sequences padded to different lengths: one after the other does as well
                joined = [move_to(call, self._step.home) for call, _ in made]
            for call in joined:
                self._update(call)

    def _update(self, call: _Call) -> None:
        self.metric.update(*call.args, **call.kwargs)

    def _per_sample(self, updates: Sequence[Sequence[_Call]]) -> bool:
        """Whether each replica made a call for each of its samples."""
        sizes = list(self._step.sizes)
        if [len(calls) for calls in updates] != sizes or max(sizes) == 1:
            return False
        return not all(
            tensor.dim() and tensor.size(0) == size
            for calls, size in zip(updates, sizes, strict=True)
            for call in calls
            for tensor in tensors_in(call)
        )

    def _members(self) -> list[Metric]:
        return list(self.metric.values()) if isinstance(self.metric, MetricCollection) else [self.metric]

    def _aggregates(self) -> bool:
        return all(isinstance(_without_window(member), _AGGREGATORS) for member in self._members())

    def _original(self, method: str) -> Callable[..., Any]:
        return self.metric if method == "forward" else getattr(self.metric, method)

    def _joined(self, calls: Sequence[_Call], sizes: Sequence[int]) -> _Call:
        first = calls[0]
        if not first.args and not first.kwargs:
            return first
        if self._aggregates() and not any(t.dim() for c in calls for t in tensors_in(c)):
            return self._stacked(calls, sizes)
        path = f"what was given to the metric {self._name!r}"
        if len({(len(call.args), *sorted(call.kwargs)) for call in calls}) > 1:
            raise ValueError(f"cannot merge {path} in the replicas: expected the same arguments, found others")
        args = zip(*(call.args for call in calls), strict=True)
        kwargs = ((name, [call.kwargs[name] for call in calls]) for name in first.kwargs)
        return _Call(
            tuple(self._argument(column, sizes, f"{path} as argument {index}") for index, column in enumerate(args)),
            {name: self._argument(column, sizes, f"{path} as {name!r}") for name, column in kwargs},
        )

    def _argument(self, values: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
        home = self._step.home
        if all(type(value) is list and all(isinstance(item, Mapping) for item in value) for value in values):
            # a dict for each image, which metrics of detection get; their tensors' shapes say nothing
            return [move_to(item, home) for value in values for item in value]
        return merge(values, sizes, home, path)

    def _stacked(self, calls: Sequence[_Call], sizes: Sequence[int]) -> _Call:
        """One value per replica, which the metric itself aggregates as it does those of a batch."""
        named = [dict(zip(("value", "weight"), call.args, strict=False)) | call.kwargs for call in calls]
        stacked = {
            key: torch.stack([torch.as_tensor(values[key], device=self._step.home) for values in named])
            for key in named[0]
        }
        members = self._members()
        means = [isinstance(_without_window(member), MeanMetric) for member in members]
        if any(means) and "weight" not in stacked:
            if any(isinstance(member, Running) and not mean for member, mean in zip(members, means, strict=True)):
                raise RuntimeError(
                    f"expected the collection {self._name!r}, which is given a number, to have no means next to other "
                    "metrics with a window, as means take weights, and windows hand them on to whatever they are of; "
                    "found both; use the means outside of the collection"
                )
            stacked["weight"] = torch.tensor(sizes, device=self._step.home) / sum(sizes)
        return _Call((), stacked)


class _InReplica:
    """What stands for a metric in a replica, as an instance of the metric's class."""

    _shared: SharedMetric
    _replica: int
    _place: torch.device
    __hash__ = object.__hash__  # not the metric's, which is made of its states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._shared.call(self._replica, "forward", self._place, *args, **kwargs)

    __call__ = forward  # not nn.Module's: hooks on the metric run where the metric itself is called

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._shared.update(self._replica, *args, **kwargs)

    def compute(self) -> Any:
        return self._shared.call(self._replica, "compute", self._place)

    def reset(self) -> None:
        self._shared.call(self._replica, "reset", self._place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"expected a metric to be copied or pickled outside of steps, as it has not yet got all samples of the "
            f"batch, found the copy of a {type(self).__name__} in one; make it in a hook such as on_train_batch_end"
        )


def original_of(metric: Any) -> Any:
    """The LightningModule's metric that a replica's stands for; anything else is returned as it is."""
    return metric._shared.metric if isinstance(metric, _InReplica) else metric


class SharedMetrics:
    """The metrics of a LightningModule during one step.

    Args:
        module: The LightningModule.
        step: The step.
    """

    def __init__(self, module: nn.Module, step: Meeting) -> None:
        self._found = list(_metrics_in(module))
        self._held = [
            (key, held)
            for key, held in vars(module).items()
            if key != "_modules" and any(map(_is_metric, _items(held)))
        ]
        self._shared: dict[int, SharedMetric] = {}
        self._step = step

    def stand_ins(self, replica: nn.Module, index: int, device: torch.device) -> list[tuple[dict[str, Any], str, Any]]:
        """What to put where in a replica, so that it has stand-ins instead of metrics: namespaces, names, stand-ins."""
        entries: list[tuple[dict[str, Any], str, Any]] = []
        for path, key, metric in self._found:
            name = f"{path}.{key}" if path else key
            stand_in = self._stand_in(metric, name, index, device)
            entries.append((replica.get_submodule(path)._modules, key, stand_in))
        for key, held in self._held:  # such as self.all = [self.accuracy, self.f1]
            items = [self._stand_in(item, key, index, device) if _is_metric(item) else item for item in _items(held)]
            entries.append((vars(replica), key, rebuilt(held, items)))
        return entries

    def flush(self) -> None:
        """Gives the metrics what replicas called ``update`` with."""
        for shared in self._shared.values():
            shared.flush()

    def _stand_in(
        self, metric: Metric | MetricCollection, name: str, index: int, device: torch.device
    ) -> Metric | MetricCollection:
        if id(metric) not in self._shared:
            self._shared[id(metric)] = SharedMetric(metric, name, self._step, self.flush)
        kind: Any = type(metric)
        stand_in = object.__new__(_class_in_replica(kind))
        attributes = {key: value for key, value in vars(metric).items() if key not in ("update", "compute")}
        attributes |= {"_shared": self._shared[id(metric)], "_replica": index, "_place": device}
        if isinstance(metric, MetricCollection):
            attributes["_modules"] = {
                key: self._stand_in(child, f"{name}.{key}", index, device) for key, child in metric._modules.items()
            }
        vars(stand_in).update(attributes)
        return stand_in


def _metrics_in(module: nn.Module, path: str = "") -> Iterator[tuple[str, str, Metric | MetricCollection]]:
    """Where the outermost metrics and collections are: the path of the module that has them, the name, the metric."""
    for key, child in module._modules.items():
        if isinstance(child, Metric | MetricCollection):
            yield path, key, child
        elif child is not None:
            yield from _metrics_in(child, f"{path}.{key}" if path else key)


def _is_metric(value: Any) -> bool:
    return isinstance(value, Metric | MetricCollection)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()


@functools.lru_cache(maxsize=64)  # a notebook that defines a class again and again would keep them all
def _class_in_replica(kind: type) -> Any:
    return type(kind.__name__, (_InReplica, kind), {})
