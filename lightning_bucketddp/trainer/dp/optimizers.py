"""Optimizers and schedulers as a step of manual optimisation sees them in a replica: what changes them happens once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_bucketddp.trainer.dp.merging import merge, merge_loss


class Meeting(Protocol):
    """What an optimizer in a replica has to know of the step that it is used in."""

    sizes: Sequence[int]
    home: torch.device

    def meet(self, replica: int, call: str, value: Any, once: Callable[[list[Any]], Any]) -> Any:
        """As :meth:`Lockstep.meet`; ``once`` sees the LightningModule as it is outside of steps."""

    def merge(self, values: Sequence[Any], path: str) -> Any:
        """Merges one value per replica, with warnings where it may have been meant otherwise."""

    def current(self, replica: int) -> int:
        """The replica whose thread this is."""

    def outside(self) -> AbstractContextManager[None]:
        """Inside, the first replica's thread sees the LightningModule as it is outside of steps."""

    def inside(self) -> AbstractContextManager[None]:
        """Within :meth:`outside`: the first replica's thread sees it as its step does."""

    def toggle(self, replica: int, optimizer: Any, on: bool) -> None:
        """Calls ``toggle_optimizer`` or ``untoggle_optimizer`` once for all replicas."""

    def renew(self) -> None:
        """Brings the replicas' parameters up to date."""


class _InReplica:
    """Stands for an object in a replica, as an instance of its class; attributes are the object's."""

    _original: Any
    _step: Meeting
    _replica: int
    _name: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _OptimizerInReplica(_InReplica):
    """An optimizer, or what Lightning wraps one in."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's; in other replicas than the first copies, so that what a step does to them is done once."""
        groups: list[dict[str, Any]] = self._original.param_groups
        return groups if self._step.current(self._replica) == 0 else [dict(group) for group in groups]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        call = f"{self._name}.zero_grad()"
        self._step.meet(self._replica, call, None, lambda _: self._original.zero_grad(*args, **kwargs))

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is not None:
            return self._step_with(closure, **kwargs)
        return self._step.meet(self._replica, f"{self._name}.step()", None, lambda _: self._step_once(**kwargs))

    def _step_once(self, **kwargs: Any) -> Any:
        result = self._original.step(**kwargs)
        self._step.renew()
        return result

    def _step_with(self, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Steps in the first replica's thread; the others run their closures whenever the optimizer asks for a loss."""
        step, call = self._step, f"{self._name}.step(closure)"
        step.meet(self._replica, call, None, _nothing)

        def run_closure() -> Any:
            return step.meet(self._replica, f"{call}, whose closure has ended", closure(), self._joined)

        if step.current(self._replica) != 0:
            while True:
                again, result = step.meet(self._replica, call, None, _nothing)
                if not again:
                    return result
                run_closure()

        def run_closures() -> Any:
            with step.inside():
                step.renew()  # as an optimizer may change parameters between two closures
                step.meet(0, call, None, lambda _: (True, None))
                return run_closure()

        with step.outside():
            result = self._original.step(closure=run_closures, **kwargs)
        step.renew()
        step.meet(0, call, None, lambda _: (False, result))
        return result

    def _joined(self, values: list[Any]) -> Any:
        if not all(isinstance(value, Tensor) for value in values):
            return values[0]
        losses = [value.detach() for value in values]
        return merge_loss(losses, self._step.sizes, self._step.home, f"{self._name}.step(closure)")

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        self._step.toggle(self._replica, self, True)
        yield
        self._step.toggle(self._replica, self, False)


class _SchedulerInReplica(_InReplica):
    """A learning-rate scheduler."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        def once(found: list[Any]) -> None:
            what = f"what was given to {self._name}.step()"
            columns = zip(*found, strict=True)
            merged = [
                column[0]  # the epoch, which is the same in all replicas
                if all(type(value) is int and value == column[0] for value in column)
                else merge(column, self._step.sizes, self._step.home, what)
                for column in columns
            ]
            self._original.step(*merged[: len(args)], **dict(zip(kwargs, merged[len(args) :], strict=True)))

        self._step.meet(self._replica, f"{self._name}.step()", (*args, *kwargs.values()), once)


def in_replica(found: Any, kind: str, step: Meeting, replica: int) -> Any:
    """What stands in a replica for optimizers or schedulers.

    Args:
        found: One of them, a list, or None.
        kind: ``"optimizer"`` or ``"scheduler"``.
        step: The step that runs.
        replica: The replica's index.
    """
    if isinstance(found, list):
        return [_stand_in(item, kind, f"{kind} {index}", step, replica) for index, item in enumerate(found)]
    return None if found is None else _stand_in(found, kind, f"the {kind}", step, replica)


def original_of(optimizer: Any) -> Any:
    """What a replica's optimizer stands for; anything else is returned as it is."""
    return optimizer._original if isinstance(optimizer, _InReplica) else optimizer


def _stand_in(original: Any, kind: str, name: str, step: Meeting, replica: int) -> Any:
    base: Any = _OptimizerInReplica if kind == "optimizer" else _SchedulerInReplica
    whose: Any = type(original)
    stand_in = object.__new__(_class_in_replica(base, whose))
    vars(stand_in).update(_original=original, _step=step, _replica=replica, _name=name)
    return stand_in


@functools.lru_cache(maxsize=64)  # a notebook that defines a class again and again would keep them all
def _class_in_replica(base: type, kind: type) -> Any:
    return type(kind.__name__, (base, kind), {})


def _nothing(_: Any) -> None:
    """Does nothing, where replicas only wait for each other."""
